"""Taking segments and traces away from object stores, which rename nothing, but write an object only if there is none.

A segment is taken away by marks, in a staging prefix beside the trace that no reader lists:

- ``aside/<segment>/<mark>``: a collection wants it gone. The segment stays visible, and whole.
- ``decided/<segment>/<mark>``: what becomes of that: ``back`` or ``drop``. It is written only if there is none, so
  who comes first decides, and a decision counts only while its mark is there.

Who drops decides, sees that its mark is still there, and removes the segment's document, its shard, the marks, and
the decisions, in this order. Who needs the segment decides on each mark that it finds, removes the marks and then the
decisions that it won, and looks for the document last. Killed in between, it leaves a mark without a decision, which
the next to look brings back; a decision to drop with its mark, which the next collection completes; or a decision
without its mark, which means nothing.

A trace is gone with its root document. A note in the staging prefix, put before that goes and removed last, tells that
what remains may be removed, which might else be something of others, and keeps them from making a trace there.
"""

from __future__ import annotations

import abc
import asyncio
import errno
import os
from typing import TYPE_CHECKING, ClassVar

from tracefile.errors import NotATraceError, OptionError, StoreError
from tracefile.format import METADATA_NAME, is_segment_id, new_segment_id
from tracefile.object_client import client
from tracefile.object_library import time_limit
from tracefile.reclaim import Leftover, ReclaimingStore

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tracefile.object_client import Listed

_ASIDE, _DECIDED, _DELETED = "aside", "decided", "deleted"
_BACK, _DROP = b"back ", b"drop "
#: What lies between a writer's look at the segments that it names and its document's being there: asking for their
#: documents, and the upload of its own. Each ends within the time that a request may be tried.
_REQUESTS_TO_PUBLISH = 2

#: Buckets that were seen to refuse a second object of one name.
_conditional: set[str] = set()


class ObjectReclaim(ReclaimingStore):
    """What :class:`~tracefile.object_store.ObjectStore` does as a store that things can be taken away from."""

    round_trips: ClassVar[bool] = True

    @abc.abstractmethod
    def objects(self, trace: str) -> dict[str, list[Listed]]:
        """The objects of each segment, by their names in it.

        Raises
        ------
        FileNotFoundError
            There are none.
        """

    def settle(self, trace: str) -> float:
        return _REQUESTS_TO_PUBLISH * time_limit()

    def changed(self, path: str) -> float:
        return client.run(client.stat(path)).changed

    # Segments

    def set_aside(self, trace: str, segment: str) -> str:
        _check_conditional(trace)
        if self.is_gone(trace, segment):
            return ""
        mark = new_segment_id()
        client.run(client.put(_aside(trace, segment, mark), b""))
        return mark

    def aside(self, trace: str) -> list[str]:
        return sorted(_Records(trace).marks)

    def bring_back(self, trace: str, segment: str) -> bool:
        return self.bring_back_all(trace, [segment])[segment]

    def bring_back_all(self, trace: str, segments: Iterable[str]) -> dict[str, bool]:
        segments = list(dict.fromkeys(segments))
        if not segments:
            return {}
        marks = _Records(trace).marks
        pairs = [(segment, mark) for segment in segments for mark in marks.get(segment, ())]
        # The documents last: while one of the marks was there, so was the document, unless it was dropped.
        dropped = client.run(_bring_back(trace, pairs)) if pairs else set()
        lost = self.gone(trace, segments) | dropped
        return {segment: segment not in lost for segment in segments}

    def drop(self, trace: str, segment: str, mark: str = "") -> bool:
        mark = mark or max(_Records(trace).marks.get(segment, [""]))
        if not mark or not client.run(_drop(trace, segment, mark)):
            return False
        first = not self.is_gone(trace, segment)  # else another collection was faster
        self._remove(trace, segment)
        return first

    def _remove(self, trace: str, segment: str) -> None:
        """Remove a segment that is to be dropped, and then what is known of that."""
        self.delete(trace, segment)
        for what in (_ASIDE, _DECIDED):
            _delete_below(os.path.join(_staging(trace), what, segment))

    def leftovers(self, trace: str) -> list[Leftover]:
        try:
            objects = self.objects(trace)
        except FileNotFoundError:
            objects = {}
        records = _Records(trace)
        dropped = _dropped(trace, records)
        found = []
        for segment in sorted({*objects, *dropped}):
            listed = objects.get(segment, [])
            if segment in dropped or all(each.name != METADATA_NAME for each in listed):
                nbytes = sum(each.nbytes for each in listed if each.name != METADATA_NAME)
                changed = max((each.changed for each in listed), default=0.0)
                found.append(Leftover(segment, nbytes, changed, segment in dropped))
        for segment, decisions in sorted(records.decisions.items()):
            for mark, changed in decisions.items():
                if mark not in records.marks.get(segment, {}):
                    found.append(Leftover(f"{_DECIDED}/{segment}/{mark}", 0, changed, False))
        return found

    def remove_leftover(self, trace: str, name: str) -> None:
        try:
            if name.startswith(f"{_DECIDED}/"):
                client.run(client.delete([os.path.join(_staging(trace), name)]))
            elif name in _dropped(trace, _Records(trace)):
                self._remove(trace, name)
            elif self.is_gone(trace, name):  # else its writer was slow
                self.delete(trace, name)
        except OSError:
            pass

    # Traces

    def traces(self, directory: str) -> list[str]:
        names = client.run(client.directories(directory))
        if not names:
            raise FileNotFoundError(errno.ENOENT, "no objects below", directory)
        paths = [os.path.join(directory, name) for name in names if not name.startswith(".")]
        there = client.run(client.exist([os.path.join(path, METADATA_NAME) for path in paths]))
        return sorted(path for path, here in zip(paths, there, strict=True) if here)

    def delete_trace(self, trace: str) -> None:
        self.check_deletable(trace)
        root, note = os.path.join(trace, METADATA_NAME), _note(trace, new_segment_id())
        client.run(client.stat(root))
        client.run(client.put(note, b""))
        client.run(client.delete([root]))
        self._remove_trace(trace, note)

    def _remove_trace(self, trace: str, note: str) -> None:
        """Remove what a trace without a root document left, and the notes about it last."""
        for _ in range(10):
            listed = client.run(client.list(trace))
            # While it is there, nobody makes a trace in this place: all that was listed belongs to the old one.
            if not listed or not client.run(client.exist([note]))[0]:
                break
            names = sorted((each.name for each in listed), key=lambda name: not name.endswith(METADATA_NAME))
            client.run(client.delete([os.path.join(trace, name) for name in names]))
        if not listed:  # else there is another trace now, or writers that have not noticed yet
            _delete_below(_staging(trace))

    def check_vacant(self, trace: str) -> None:
        """See that no trace is being deleted where one is to be made.

        Raises
        ------
        NotATraceError
        """
        if _Records(trace).notes:
            raise NotATraceError(
                f"the trace at {trace} is being deleted, or that was interrupted: tracefile gc"
                f" {os.path.dirname(trace)} completes it; then make another",
                path=trace,
            )

    def sweep(self, directory: str, before: float) -> list[str]:
        swept = []
        for name in client.run(client.directories(directory)):
            trace = name[1:].removesuffix(".staging")
            path = os.path.join(directory, trace)
            if name != f".{trace}.staging":
                continue
            records = _Records(path)
            if client.run(client.exist([os.path.join(path, METADATA_NAME)]))[0]:
                # Of deletions that were interrupted before they began.
                old = [note for note, changed in records.notes.items() if changed < before]
                client.run(client.delete([_note(path, note) for note in old]))
                continue
            if records.notes:
                self._remove_trace(path, _note(path, max(records.notes)))
            else:
                _delete_below(_staging(path))
            swept.append(trace)
        return sorted(swept)


class _Records:
    """What is in a trace's staging prefix.

    Attributes
    ----------
    marks, decisions : dict of str to dict of str to float
        By segment and mark, when they were put.
    notes : dict of str to float
        When deletions of the whole trace began.
    """

    def __init__(self, trace: str) -> None:
        self.marks: dict[str, dict[str, float]] = {}
        self.decisions: dict[str, dict[str, float]] = {}
        self.notes: dict[str, float] = {}
        for each in client.run(client.list(_staging(trace))):
            match each.name.split("/"):
                case ["aside", segment, mark] if is_segment_id(segment):
                    self.marks.setdefault(segment, {})[mark] = each.changed
                case ["decided", segment, mark] if is_segment_id(segment):
                    self.decisions.setdefault(segment, {})[mark] = each.changed
                case ["deleted", note]:
                    self.notes[note] = each.changed


async def _decide(trace: str, segment: str, mark: str, what: bytes) -> bytes:
    """Decide what becomes of a mark; what was decided, or nothing if the mark counts no more."""
    url = _decided(trace, segment, mark)
    decided = what + new_segment_id().encode()
    if not await client.put_new(url, decided):
        try:
            decided = bytes((await client.get(url)).data)
        except FileNotFoundError:
            return b""  # decisions go after their marks
    # A decision to bring back holds in any case: nobody drops what has no mark.
    if decided.startswith(_DROP) and not (await client.exist([_aside(trace, segment, mark)]))[0]:
        return b""
    return decided


async def _bring_back(trace: str, pairs: Sequence[tuple[str, str]]) -> set[str]:
    """Decide that segments stay; those that another has decided to drop."""
    decided = await asyncio.gather(*(_decide(trace, segment, mark, _BACK) for segment, mark in pairs))
    done = [pair for pair, what in zip(pairs, decided, strict=True) if what.startswith(_BACK)]
    for where in (_aside, _decided):  # in this order
        await client.delete([where(trace, segment, mark) for segment, mark in done])
    return {segment for (segment, _), what in zip(pairs, decided, strict=True) if what.startswith(_DROP)}


async def _drop(trace: str, segment: str, mark: str) -> bool:
    """Decide that a segment goes; whether it does."""
    decided = await _decide(trace, segment, mark, _DROP)
    if decided.startswith(_DROP):
        return True
    for where in (_aside, _decided):
        await client.delete([where(trace, segment, mark)])
    return False


def _dropped(trace: str, records: _Records) -> set[str]:
    """Segments that are being dropped, or whose dropping was interrupted."""
    pairs = [
        (segment, mark)
        for segment, decisions in records.decisions.items()
        for mark in decisions
        if mark in records.marks.get(segment, {})
    ]
    if not pairs:
        return set()
    found = client.run(client.get_all([_decided(trace, segment, mark) for segment, mark in pairs]))
    pairs = [
        pair for pair, what in zip(pairs, found, strict=True) if isinstance(what, bytes) and what.startswith(_DROP)
    ]
    there = client.run(client.exist([_aside(trace, segment, mark) for segment, mark in pairs]))
    return {segment for (segment, _), here in zip(pairs, there, strict=True) if here}


def _check_conditional(trace: str) -> None:
    """See that the store refuses what is there already, as some say that they do, and do not.

    Raises
    ------
    OptionError
    """
    bucket = "/".join(trace.split("/", 3)[:3])
    if bucket in _conditional:
        return
    url = _decided(trace, new_segment_id(), new_segment_id())  # that of no mark
    try:
        refused = client.run(client.put_new(url, b"1")) and not client.run(client.put_new(url, b"2"))
    except StoreError as error:
        if error.errno is not None and "501" not in error.message:
            raise  # it does not answer, or refuses all
        refused = False
    client.run(client.delete([url]))
    if not refused:
        raise OptionError(
            f"{bucket} has no conditional put (If-None-Match), without which nothing can be reclaimed safely while"
            " writers are at work; see what object_store_options say of it, or delete whole traces with the store's"
            " own tools"
        )
    _conditional.add(bucket)


def _delete_below(url: str) -> None:
    client.run(client.delete([os.path.join(url, each.name) for each in client.run(client.list(url))]))


def _staging(trace: str) -> str:
    parent, _, name = trace.rpartition("/")
    return f"{parent}/.{name}.staging"


def _note(trace: str, note: str) -> str:
    return os.path.join(_staging(trace), _DELETED, note)


def _aside(trace: str, segment: str, mark: str) -> str:
    return os.path.join(_staging(trace), _ASIDE, segment, mark)


def _decided(trace: str, segment: str, mark: str) -> str:
    return os.path.join(_staging(trace), _DECIDED, segment, mark)
