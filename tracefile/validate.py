"""Whether rows look as if they were captured: signs that an engine returned something else than its routing.

Pure, and streaming: the encoder hands over each block of rows while it is in the processor's cache. It has found
all ids in range; these are signs that they are wrong nevertheless:

``row-count``
    Not a row for each token, nor for each but the last (which was sampled and never routed).
``zero-layer``
    A MoE layer is zero in every row. Not looked for where ``top_k`` is 1: expert 0 may be meant.
``duplicate-expert``
    An expert twice in one token's top-k of a layer. Mostly rows of zeros among others.
``repeated-row``
    More than ``repeat_threshold`` rows in a row are equal, in all layers and in order. In the 84,000 tokens of real
    routing that this was tried on, two are once and three never; the runs that users report from faulty captures
    begin at 67 rows. 16 lies well between. A model that repeats one token for ever may exceed it.

Dense layers are zeros where an engine returns all hidden layers, and no engine says which they are. Unless told,
leading layers that are zero in every row of a sample are taken for dense, up to an eighth of all layers and always
one (DeepSeek-V3 has 3 of 61, GLM-4.7-Flash and Moonlight 1), where ``layer_ids`` says that they are the model's
first. More look like a pipeline stage that was never gathered. A model with dense layers elsewhere must name them:
a layer that is zero in sample after sample may as well be one that the engine does not capture.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from tracefile.encode import as_words
from tracefile.errors import CaptureError, OptionError
from tracefile.format import ModelConfig, is_count

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

Array: TypeAlias = "np.ndarray[Any, Any]"
ValidateMode = Literal["strict", "warn", "off"]
CaptureFindingKind = Literal["row-count", "zero-layer", "duplicate-expert", "repeated-row"]

#: More equal rows than this, one after another, are no model's routing.
REPEAT_THRESHOLD = 16


def check_validate(mode: object) -> ValidateMode:
    """``mode`` if it is one.

    Raises
    ------
    OptionError
    """
    if mode == "strict" or mode == "warn" or mode == "off":
        return mode
    raise OptionError(f"validate must be one of strict, warn, off, not {mode!r}")


@dataclass(frozen=True, slots=True)
class CaptureFinding:
    """One sign of a bad capture in one sample; at most one of each kind.

    Attributes
    ----------
    kind : {"row-count", "zero-layer", "duplicate-expert", "repeated-row"}
    sample : str
    rows : (int, int)
        The first range ``[start, stop)`` of affected rows; of ``row-count``, all rows.
    count : int
        All affected rows.
    layers : tuple of int
        Global ids of the affected layers; empty where it is not a matter of layers.
    message : str
        What is wrong, where, and what it resembles.

    Examples
    --------
    >>> finding = CaptureFinding("repeated-row", "a", (512, 579), 67, (), "...")
    >>> CaptureFinding.from_json(finding.as_json()) == finding
    True
    """

    kind: CaptureFindingKind
    sample: str
    rows: tuple[int, int]
    count: int
    layers: tuple[int, ...]
    message: str

    def as_json(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "sample": self.sample,
            "rows": list(self.rows),
            "count": self.count,
            "layers": list(self.layers),
            "message": self.message,
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> CaptureFinding:
        """The inverse of :meth:`as_json`; a kind that a later release adds is kept.

        Raises
        ------
        KeyError, TypeError, ValueError
            The document is none of a finding.
        """
        kind, sample, message = document["kind"], document["sample"], document["message"]
        start, stop = document["rows"]
        count, layers = document["count"], tuple(document["layers"])
        if not (isinstance(kind, str) and isinstance(sample, str) and isinstance(message, str)):
            raise TypeError("kind, sample and message of a capture finding are strings")
        if not all(map(is_count, (start, stop, count, *layers))) or start > stop:
            raise ValueError("rows, count and layers of a capture finding are counts")
        return cls(kind, sample, (start, stop), count, layers, message)  # type: ignore[arg-type]


def capture_error(findings: Sequence[CaptureFinding]) -> CaptureError:
    """What ``validate="strict"`` raises for the findings of one sample."""
    return CaptureError(
        "; ".join(finding.message for finding in findings)
        + '; nothing was written (validate="warn" writes it and records this, "off" does not look)',
        sample=findings[0].sample,
        findings=tuple(findings),
    )


@dataclass(slots=True)
class _Rows:
    """Affected rows as they come: how many, and the first range of them."""

    count: int = 0
    start: int = 0
    stop: int = 0

    def add(self, start: int, stop: int) -> None:
        if not self.count:
            self.start = self.stop = start
        if start == self.stop:
            self.stop = stop
        self.count += stop - start

    def __str__(self) -> str:
        more = self.count - (self.stop - self.start)
        return f"rows [{self.start:,}, {self.stop:,})" + (f" and {more:,} more" if more else "")


@dataclass(slots=True)
class _Seen:
    """What was seen of one sample so far."""

    sample: str
    zero: list[int]  # positions of the layers that were zero in all rows
    end: int = 0  # of all rows, captured or not
    captured: _Rows = field(default_factory=_Rows)
    duplicates: _Rows = field(default_factory=_Rows)
    duplicate_layers: set[int] = field(default_factory=set)
    duplicate_first: str = ""
    repeats: _Rows = field(default_factory=_Rows)
    longest: int = 0
    last: bytes = b""  # the last captured row, where it ends, and where the run of rows like it began
    last_stop: int = -1
    run: int = 0


class CaptureCheck:
    """Looks at samples, block by block, for signs of a bad capture. Has buffers: one thread at a time.

    Parameters
    ----------
    config : ModelConfig
    dense_layers : iterable of int, optional
        Global ids of the layers without experts, which may be zeros. By default, leading layers may; see the
        module. ``()``: every layer is MoE.
    repeat_threshold : int
        More equal rows than this, one after another, are a finding.

    Raises
    ------
    OptionError
        A dense layer that the configuration does not have, or a threshold below 1.

    Examples
    --------
    >>> check = CaptureCheck(ModelConfig(num_layers=3, top_k=2, num_experts=8, layer_ids=(3, 4, 5)))
    >>> rows = np.arange(5 * 3 * 2, dtype=np.uint8).reshape(5, 3, 2) % 8
    >>> rows[2, 1] = 7
    >>> check.begin("prompt-7/3")
    >>> check.block(rows, 0)
    >>> for finding in check.finish(num_tokens=6):
    ...     print(finding.message)
    sample 'prompt-7/3', rows [2, 3): an expert twice in one top-k, first in row 2, layer 1 (global id 4): [7, 7]
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        dense_layers: Iterable[int] | None = None,
        repeat_threshold: int = REPEAT_THRESHOLD,
    ) -> None:
        self.config = config
        self.dense_layers = None if dense_layers is None else frozenset(dense_layers)
        if unknown := sorted((self.dense_layers or frozenset()) - set(config.layer_ids)):
            raise OptionError(f"dense_layers names {unknown}, which are not among the layer ids of {config}")
        if not is_count(repeat_threshold) or repeat_threshold < 1:
            raise OptionError(f"repeat_threshold must be a positive integer, not {repeat_threshold!r}")
        self.repeat_threshold = repeat_threshold
        self._word = as_words(np.empty((1, config.top_k), config.dtype)).dtype
        self._planes = np.empty(0, config.dtype)
        self._hits = bytearray()
        self.begin("")

    def begin(self, sample: str) -> None:
        """Turn to a sample."""
        # Where top_k is 1, zeros may be meant: no layer counts as one that was zero so far.
        layers = self.config.num_layers if self.config.top_k > 1 else 0
        self._seen = _Seen(sample, list(range(layers)))

    def block(self, rows: Array, first: int, captured: Array | None = None) -> None:
        """Look at the next rows of the sample.

        Parameters
        ----------
        rows : ndarray
            ``[n, num_layers, top_k]`` of the stored dtype, ids in range.
        first : int
            The number of the first of them in the sample. Blocks come in order, with or without gaps.
        captured : ndarray of bool, optional
            ``[n]``, false for missing rows, which are not looked at.
        """
        self._seen.end = first + len(rows)
        if captured is None or captured.all():
            self._look(rows, first)
        else:
            for start, stop in _ranges(captured, 0):
                self._look(rows[start:stop], first + start)

    def finish(self, num_tokens: int | None = None, rows: int | None = None) -> list[CaptureFinding]:
        """What was found in the sample.

        Parameters
        ----------
        num_tokens : int, optional
            Tokens of the sample, which has that many rows or one fewer.
        rows : int, optional
            Rows of the sample, where it does not end with the last block: some of it was there already.
        """
        seen, found = self._seen, []
        end = seen.end if rows is None else rows
        self._note_run(seen.run, seen.last_stop)

        def add(kind: CaptureFindingKind, rows: _Rows, layers: Iterable[int], what: str) -> None:
            ids = tuple(self.config.layer_ids[layer] for layer in sorted(layers))
            message = f"sample {seen.sample!r}, {rows}: {what}"
            found.append(CaptureFinding(kind, seen.sample, (rows.start, rows.stop), rows.count, ids, message))

        if num_tokens is not None and end not in (num_tokens, num_tokens - 1):
            what = f"there should be {num_tokens:,}, a row for each token, or one fewer"
            add("row-count", _Rows(end, 0, end), (), what)
        zero = self._zero_moe_layers()
        if zero:
            if len(seen.zero) == self.config.num_layers:
                what = "every layer is all zeros, as engines return where a kernel does not capture its routing"
            else:
                what = f"{self._name(zero[0])} is all zeros" + _and_others(len(zero))
                what += " (layers without experts are named by dense_layers)"
            add("zero-layer", seen.captured, zero, what)
        if seen.duplicates.count:
            what = f"an expert twice in one top-k, first in {seen.duplicate_first}"
            what += _and_others(len(seen.duplicate_layers))
            add("duplicate-expert", seen.duplicates, seen.duplicate_layers, what)
        if seen.repeats.count and not (zero and len(seen.zero) == self.config.num_layers):
            what = f"the same row up to {seen.longest:,} times on end, as a buffer gives that the capture did not write"
            add("repeated-row", seen.repeats, (), what)
        return found

    def _zero_moe_layers(self) -> list[int]:
        zero = self._seen.zero if self._seen.captured.count else []
        ids, layers = self.config.layer_ids, self.config.num_layers
        if self.dense_layers is not None:
            return [layer for layer in zero if ids[layer] not in self.dense_layers]
        leading = 0
        while leading < len(zero) and zero[leading] == leading == ids[leading]:
            leading += 1
        # A model of dense layers only has no routing to return.
        return zero[leading:] if leading <= max(1, layers // 8) and leading < layers else zero

    def _name(self, layer: int) -> str:
        return f"layer {layer} (global id {self.config.layer_ids[layer]})"

    def _look(self, rows: Array, first: int) -> None:
        if not len(rows):
            return
        rows = np.ascontiguousarray(rows)
        words = rows.view(self._word)
        if self.config.top_k > 1:
            self._look_for_zeros(words)
            if len(self._seen.zero) < self.config.num_layers:
                self._look_for_duplicates(rows, first)
        self._look_for_repeats(words, first)
        self._seen.captured.add(first, first + len(rows))

    def _look_for_zeros(self, words: Array) -> None:
        seen = self._seen
        if not seen.zero:
            return
        first_row = words[0].any(axis=1).tolist()  # tells nearly all layers that are not zero
        zero = [k for k in seen.zero if not first_row[k] and not np.count_nonzero(words[:, k])]
        if seen.captured.count and len(zero) < len(seen.zero):
            # Some were MoE layers after all: then all rows before had expert 0 top_k times.
            woken = sorted(set(seen.zero) - set(zero))
            seen.duplicates = _Rows(seen.captured.count, seen.captured.start, seen.captured.stop)
            seen.duplicate_layers.update(woken)
            self._note_first(seen.captured.start, woken[0], [0] * self.config.top_k)
        seen.zero = zero

    def _look_for_duplicates(self, rows: Array, first: int) -> None:
        seen = self._seen
        twice = self._duplicates(rows, seen.zero)
        if twice is None:
            return
        affected: Array = np.logical_or.reduce(twice, axis=1)
        if not seen.duplicates.count:
            row = int(np.argmax(affected))
            layer = int(np.argmax(twice[row]))
            self._note_first(first + row, layer, rows[row, layer].tolist())
        seen.duplicate_layers.update(np.flatnonzero(twice.any(axis=0)).tolist())
        for start, stop in _ranges(affected, first):
            seen.duplicates.add(start, stop)

    def _note_first(self, row: int, layer: int, ids: list[int]) -> None:
        self._seen.duplicate_first = f"row {row:,}, {self._name(layer)}: {ids}"

    def _duplicates(self, rows: Array, zero: list[int]) -> Array | None:
        """Which rows and layers, ``[n, num_layers]``, have an expert twice, but for layers ``zero``; None if none."""
        n, layers, top_k = rows.shape
        if len(self._planes) < rows.size:
            self._planes, self._hits = np.empty(rows.size, rows.dtype), bytearray(rows.size)
        # A plane for each place in the top-k: comparing places is comparing one piece of memory with another.
        flat, equal = self._planes[: rows.size], np.frombuffer(self._hits, bool)
        np.copyto(flat.reshape(top_k, n * layers), rows.reshape(n * layers, top_k).T)
        for layer in zero:
            flat.reshape(top_k, n, layers)[:, :, layer] = np.arange(top_k)[:, None]
        twice: Array | None = None
        for apart in range(1, top_k):
            size = (top_k - apart) * n * layers
            np.equal(flat[-size:], flat[:size], out=equal[:size])
            if self._hits.find(1, 0, size) >= 0:  # a third of the time of equal.any()
                found: Array = np.logical_or.reduce(equal[:size].reshape(-1, n, layers), axis=0)
                twice = found if twice is None else twice | found
        return twice

    def _look_for_repeats(self, words: Array, first: int) -> None:
        seen = self._seen
        stop = first + len(words)
        # Few neighbours agree in the last word, so few are compared whole.
        again = np.flatnonzero(words[1:, -1, -1] == words[:-1, -1, -1]) + 1
        if again.size:
            again = again[(words[again] == words[again - 1]).all(axis=(1, 2))]
        joined = seen.last_stop == first and seen.last == words[0].tobytes()
        if not joined:
            self._note_run(seen.run, seen.last_stop)
        run = stop - 1
        if joined or again.size:
            same = np.zeros(len(words), bool)
            same[0] = joined
            same[again] = True
            for start, end in _ranges(same, first):
                begin = seen.run if start == first else start - 1
                if end < stop:
                    self._note_run(begin, end)
                else:
                    run = begin
        seen.run, seen.last, seen.last_stop = run, words[-1].tobytes(), stop

    def _note_run(self, start: int, stop: int) -> None:
        # One expert in all leaves a router nothing to choose.
        if stop - start > self.repeat_threshold and self.config.num_experts > 1:
            self._seen.repeats.add(start, stop)
            self._seen.longest = max(self._seen.longest, stop - start)


def _ranges(mask: Array, first: int) -> list[list[int]]:
    """Where ``mask`` is true: ranges ``[start, stop)``, counted from ``first``."""
    edges = np.flatnonzero(np.diff(mask, prepend=False, append=False)) + first
    ranges: list[list[int]] = edges.reshape(-1, 2).tolist()
    return ranges


def _and_others(count: int) -> str:
    return f", and in {count - 1} other layers" if count > 2 else ", and in another layer" if count == 2 else ""
