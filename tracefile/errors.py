"""What can go wrong with a trace.

One root, :class:`TraceError`, and one leaf per mistake. Every leaf is also the builtin exception that
a caller who does not know tracefile would catch (``KeyError`` for an unknown sample, ``ValueError`` for
bad ids, ``MemoryError`` for a refused materialization, ...). Every error pickles whole, because Ray and
multiprocessing carry errors between processes, and says where: ``path``, ``segment``, ``chunk`` and
``sample`` are attributes, ``None`` where they do not apply.
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "TraceError",
    "TraceNotFoundError",
    "NotATraceError",
    "FormatVersionError",
    "ConfigurationMismatchError",
    "TraceMismatchError",
    "DamagedTraceError",
    "MetadataDamagedError",
    "SegmentMissingError",
    "ShardDamagedError",
    "ChunkMissingError",
    "ChunkDamagedError",
    "SampleNotFoundError",
    "DuplicateSampleError",
    "SampleIdError",
    "SampleGapError",
    "ExpertIdError",
    "CaptureError",
    "RoutedExpertsShapeError",
    "RoutedExpertsTypeError",
    "EngineOutputError",
    "MissingRowsError",
    "MaterializeLimitError",
    "LoaderBudgetError",
    "WaitTimeoutError",
    "LazyTensorError",
    "ClosedError",
    "PublishError",
    "StoreError",
    "QuotaExceededError",
    "OptionError",
]


def _rebuild(cls: type[TraceError], message: str, where: dict[str, Any]) -> TraceError:
    return cls(message, **where)


class TraceError(Exception):
    """Root of every error that tracefile raises.

    Parameters
    ----------
    message : str
        What happened, which file, and what to do about it.
    path, segment, chunk, sample
        Where: the trace's directory or the file, the segment's id, the chunk's ``(layer, row)`` grid
        position, the sample's id. ``None`` where it does not apply.
    **details
        Further facts, kept as attributes.

    Examples
    --------
    >>> error = SampleNotFoundError("no sample 'a' in t.trace", path="t.trace", sample="a")
    >>> error.sample, isinstance(error, KeyError)
    ('a', True)
    """

    def __init__(
        self,
        message: str,
        *,
        path: str | None = None,
        segment: str | None = None,
        chunk: tuple[int, int] | None = None,
        sample: str | None = None,
        **details: Any,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.path = path
        self.segment = segment
        self.chunk = chunk
        self.sample = sample
        self._details = details
        for name, value in details.items():
            setattr(self, name, value)

    def __str__(self) -> str:  # KeyError would show the repr
        return self.message

    def __reduce__(self) -> tuple[Any, ...]:
        where = {"path": self.path, "segment": self.segment, "chunk": self.chunk, "sample": self.sample}
        return _rebuild, (type(self), self.message, where | self._details)


class TraceNotFoundError(TraceError, FileNotFoundError):
    """Nothing is at the path."""


class NotATraceError(TraceError, ValueError):
    """Something is at the path, but not a trace."""


class FormatVersionError(TraceError, ValueError):
    """The trace was written in a format version that this release does not read."""


class ConfigurationMismatchError(TraceError, ValueError):
    """A writer's model configuration differs from the trace's. Attributes ``ours`` and ``theirs``."""


class TraceMismatchError(TraceError, ValueError):
    """One trace was to be copied onto another one. Attributes ``ours`` and ``theirs``: their uuids."""


class DamagedTraceError(TraceError):
    """Base of what ``tracefile verify`` finds: files that are not what a writer published."""


class MetadataDamagedError(DamagedTraceError, ValueError):
    """A ``zarr.json`` is unreadable, contradicts itself, or fails its checksum."""


class SegmentMissingError(DamagedTraceError, FileNotFoundError):
    """A segment, or its shard file, is not there.

    Attributes
    ----------
    gone : bool
        Whether nothing was left of the segment, as where it was deleted, when its document was looked for.
    """

    gone: bool = False


class ShardDamagedError(DamagedTraceError, ValueError):
    """A shard file is truncated, belongs to another segment, or has a broken index."""


class ChunkMissingError(DamagedTraceError, LookupError):
    """The shard's index says that a chunk was never written."""


class ChunkDamagedError(DamagedTraceError, ValueError):
    """A chunk fails its checksum or does not decode to its size."""


class SampleNotFoundError(TraceError, KeyError):
    """The trace has no such sample."""


class DuplicateSampleError(TraceError, ValueError):
    """One segment was given the same sample id twice."""


class SampleIdError(TraceError, TypeError):
    """A sample id is not a string that UTF-8 can hold."""


class SampleGapError(TraceError, ValueError):
    """Rows would begin beyond the end of what the sample has. Attributes ``start``, ``rows``."""


class ExpertIdError(TraceError, ValueError):
    """An id lies outside ``[0, num_experts)``. Attributes ``token``, ``layer``, ``expert``."""


class CaptureError(TraceError, ValueError):
    """Rows show signs of a bad capture, and the writer is strict. Attribute ``findings``, of one sample."""


class RoutedExpertsShapeError(TraceError, ValueError):
    """The array is neither ``[tokens, num_layers, top_k]`` nor ``[tokens, num_layers * top_k]``."""


class RoutedExpertsTypeError(TraceError, TypeError):
    """The array is not of an integer dtype."""


class EngineOutputError(TraceError, ValueError):
    """What an inference engine returned is not of its form. Attributes ``engine``, ``expected``, ``got``."""


class MissingRowsError(TraceError, ValueError):
    """Rows that were never captured were read without choosing how to fill them. Attribute ``rows``."""


class MaterializeLimitError(TraceError, MemoryError):
    """A read would put more bytes in memory than ``materialize_limit``. Attributes ``wanted``, ``limit``."""


class LoaderBudgetError(TraceError, MemoryError):
    """One layer of one microbatch is more than a loader may hold. Attributes ``wanted``, ``budget``, ``microbatch``."""


class WaitTimeoutError(TraceError, TimeoutError):
    """Samples were not committed in time. Attribute ``missing``: their ids."""


class LazyTensorError(TraceError, TypeError):
    """An operation that a lazy tensor cannot do: in-place writes, access to its (absent) storage."""


class ClosedError(TraceError, ValueError):
    """The trace or writer has been closed."""


class PublishError(TraceError, OSError):
    """A segment could not be written or made visible; nothing of it was published."""


class StoreError(TraceError, OSError):
    """A store does not answer, or cannot read a file.

    Attribute ``attempts``: how often an object store was asked, where it did not answer.
    """


class QuotaExceededError(TraceError, OSError):
    """The trace would be larger than its writer's quota; nothing was published. Attributes ``quota``, ``used``."""


class OptionError(TraceError, ValueError):
    """An option has a value that it cannot have."""
