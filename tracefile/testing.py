"""For tests of what builds on traces: Hypothesis strategies for routing, and a machine of random trace histories.

Needs Hypothesis, which tracefile itself does not.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import tracefile
from tracefile.collect import collect
from tracefile.format import ModelConfig
from tracefile.revision import Keep

if TYPE_CHECKING:
    from tracefile.lazy import LazyRoutedExperts

__all__ = ["RetentionHistory", "TraceHistory", "model_configs", "routing"]

_MISSING = -1


def model_configs(max_layers: int = 5, max_top_k: int = 4) -> st.SearchStrategy[ModelConfig]:
    """Model configurations of both stored widths.

    Examples
    --------
    >>> from hypothesis import find
    >>> find(model_configs(), lambda config: config.num_experts > 256).dtype
    dtype('uint16')
    """
    return st.builds(
        lambda layers, top_k, experts: ModelConfig(layers, top_k, experts),
        st.integers(1, max_layers),
        st.integers(1, max_top_k),
        st.sampled_from([4, 64, 255, 256, 257, 512]),
    )


def routing(config: ModelConfig, max_rows: int = 40, *, missing: bool = True) -> st.SearchStrategy[Any]:
    """Routed experts ``[rows, num_layers, top_k]`` int32; with ``missing``, some rows may be -1 throughout.

    Examples
    --------
    >>> from hypothesis import find
    >>> find(routing(ModelConfig(2, 3, 64)), lambda ids: len(ids) == 2).shape
    (2, 2, 3)
    """

    def make(rows: int, seed: int, gone: set[int]) -> Any:
        rng = np.random.default_rng(seed)
        # Few different rows, so that samples begin alike now and then.
        few = rng.integers(0, config.num_experts, (3, config.num_layers, config.top_k), np.int32)
        ids = few[rng.integers(0, 3, rows)] if seed % 2 else few[np.arange(rows) % 3]
        ids[[row for row in gone if row < rows]] = _MISSING
        return ids

    gone = st.sets(st.integers(0, max_rows), max_size=3) if missing else st.just(set[int]())
    return st.builds(make, st.integers(0, max_rows), st.integers(0, 7), gone)


class TraceHistory(RuleBasedStateMachine):
    """Random histories of a trace, by several writers, against a plain dict of arrays.

    Run it as ``TestHistory = TraceHistory.TestCase``, or subclass it with rules of your own. After every step, each
    sample read through the newest handle, through a fresh :func:`tracefile.open`, and through every older handle
    must be what the model says.
    """

    samples = ("a", "b", "c")
    writers = 2
    max_rows = 40

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.mkdtemp()
        self.path = os.path.join(self.directory, "t.trace")
        self.model: dict[str, Any] = {}
        self.versions: dict[str, list[Any]] = {}
        self.handles: list[tuple[LazyRoutedExperts, Any]] = []

    @initialize(config=model_configs(), codec=st.sampled_from(["fast", "compact", "none"]), share=st.booleans())
    def begin(self, config: ModelConfig, codec: str, share: bool) -> None:
        self.config = config
        self.open_writers = [
            tracefile.TraceWriter(
                self.path,
                num_layers=config.num_layers,
                top_k=config.top_k,
                num_experts=config.num_experts,
                codec=codec,
                share_prefixes=share,
                rows_per_chunk=8,
                layers_per_chunk=2,
            )
            for _ in range(self.writers)
        ]

    def _draw_routing(self, data: st.DataObject) -> Any:
        return data.draw(routing(self.config, self.max_rows))

    def _committed(self, sample: str, ids: Any, handle: LazyRoutedExperts) -> None:
        self.model[sample] = ids
        self.handles.append((handle, ids))

    def _writer(self, data: st.DataObject) -> tracefile.TraceWriter:
        return self.open_writers[data.draw(st.integers(0, self.writers - 1))]

    def _sample(self, data: st.DataObject) -> str:
        return data.draw(st.sampled_from(self.samples))

    @rule(data=st.data())
    def append(self, data: st.DataObject) -> None:
        """A new sample, or a whole new revision."""
        sample, ids = self._sample(data), self._draw_routing(data)
        self._committed(sample, ids, self._writer(data).append(sample, ids))

    @rule(data=st.data())
    def append_many(self, data: st.DataObject) -> None:
        """Several samples in one segment, which may begin alike."""
        first = self._draw_routing(data)
        names = data.draw(st.lists(st.sampled_from(self.samples), unique=True, min_size=1))
        samples = [(name, np.concatenate([first, self._draw_routing(data)])) for name in names]
        handles = self._writer(data).append_many(samples)
        for (name, ids), handle in zip(samples, handles, strict=True):
            self._committed(name, ids, handle)

    @rule(data=st.data())
    def go_on(self, data: st.DataObject) -> None:
        """Continue a sample, inside of what it has, at its end, or beyond."""
        sample, new = self._sample(data), self._draw_routing(data)
        old = self.model.get(sample, np.zeros((0, self.config.num_layers, self.config.top_k), np.int32))
        start = data.draw(st.integers(0, len(old) + 3))
        keep: Keep = data.draw(st.sampled_from(get_args(Keep)))
        writer = self._writer(data)
        gap = np.full((max(0, start - len(old)), *old.shape[1:]), _MISSING, np.int32)
        if len(gap):
            try:
                writer.append(sample, new, start=start, keep=keep)
            except tracefile.SampleGapError as error:
                refused = vars(error)["rows"]
            else:
                refused = None
            if refused != len(old):
                raise AssertionError(f"a gap before row {start} of {len(old)} was not refused")
        handle = writer.append(sample, new, start=start, keep=keep, gap="missing")
        self._committed(sample, self.continued(np.concatenate([old, gap]), new, start, keep), handle)

    @staticmethod
    def continued(old: Any, new: Any, start: int, keep: str) -> Any:
        """What :meth:`TraceWriter.append` says of ``start`` and ``keep``, row by row."""
        rows = list(old[:start])
        for number in range(start, max(start + len(new), len(old) if keep == "first" else 0)):
            before = old[number] if number < len(old) else None
            after = new[number - start] if number < start + len(new) else None
            first, second = (after, before) if keep == "last" else (before, after)
            captured = [row for row in (first, second) if row is not None and not (row == _MISSING).all()]
            rows.append(captured[0] if captured else np.full(old.shape[1:], _MISSING, np.int32))
        return np.array(rows, np.int32).reshape(-1, *old.shape[1:])

    @rule(data=st.data())
    def resume_lazily(self, data: st.DataObject) -> None:
        """What slime builds when a rollout resumes: rows of a handle, and new ones."""
        if not self.handles:
            return
        handle, ids = self.handles[data.draw(st.integers(0, len(self.handles) - 1))]
        start = data.draw(st.integers(0, len(ids)))
        new = self._draw_routing(data)
        sample = self._sample(data)
        lazy = torch.cat([handle[:start], torch.from_numpy(new)])
        try:
            resumed = self._writer(data).append(sample, lazy)
        except tracefile.SegmentMissingError:
            if not self._may_be_gone(handle):
                raise
            return
        self._committed(sample, np.concatenate([ids[:start], new]), resumed)

    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        """Cut a sample to its first rows."""
        sample = self._sample(data)
        if sample in self.model:
            rows = data.draw(st.integers(0, len(self.model[sample])))
            self._committed(sample, self.model[sample][:rows], self._writer(data).truncate(sample, rows))

    def _may_be_gone(self, handle: LazyRoutedExperts) -> bool:
        """Whether the rows of a handle need not be there any more."""
        return False

    @invariant()
    def every_handle_reads_what_it_named(self) -> None:
        """Handles of older revisions too."""
        for handle, ids in self.handles[-12:]:
            try:
                check_same(handle, ids)
            except tracefile.SegmentMissingError:
                if not self._may_be_gone(handle):
                    raise

    @invariant()
    def a_fresh_reader_sees_the_newest(self) -> None:
        """Whatever writer wrote it."""
        if not os.path.exists(self.path):
            return
        with tracefile.open(self.path) as trace:
            assert set(trace) == set(self.model)
            for sample, ids in self.model.items():
                check_same(trace[sample], ids)

    def teardown(self) -> None:
        for writer in getattr(self, "open_writers", []):
            writer.close()
        shutil.rmtree(self.directory)


class RetentionHistory(TraceHistory):
    """The same with samples that are deleted, and rows that are reclaimed while older handles are around.

    Such a handle reads what it named or raises :class:`~tracefile.errors.SegmentMissingError`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.current: dict[str, LazyRoutedExperts] = {}
        self.collected = False

    def _committed(self, sample: str, ids: Any, handle: LazyRoutedExperts) -> None:
        super()._committed(sample, ids, handle)
        self.current[sample] = handle

    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        """Delete those of some samples that are there."""
        names = data.draw(st.lists(st.sampled_from(self.samples), unique=True, min_size=1))
        deleted = tracefile.open(self.path).delete_samples(names, missing_ok=True)
        assert deleted == [name for name in names if name in self.model]
        for name in deleted:
            del self.model[name], self.current[name]

    @rule()
    def collect(self) -> None:
        """Reclaim at once what nothing refers to."""
        collect(self.path, grace=0, settle=0)
        self.collected = True

    def _may_be_gone(self, handle: LazyRoutedExperts) -> bool:
        return self.collected and all(handle is not current for current in self.current.values())


def check_same(experts: LazyRoutedExperts, ids: Any) -> None:
    """Assert that a lazy tensor holds ``ids``, with rows that are -1 throughout missing."""
    assert tuple(experts.shape) == ids.shape
    assert experts.valid.tolist() == [not (row == _MISSING).all() for row in ids]
    np.testing.assert_array_equal(experts.filled("minus_one").numpy(), ids)
