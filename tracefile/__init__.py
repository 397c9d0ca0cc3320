"""tracefile: routed experts of MoE rollouts in memory-mapped traces, read lazily by the ranks that need them."""

import importlib
from typing import TYPE_CHECKING, Any

from tracefile._version import __version__
from tracefile.cache import clear_cache
from tracefile.errors import (
    CaptureError,
    ChunkDamagedError,
    ChunkMissingError,
    ClosedError,
    ConfigurationMismatchError,
    DamagedTraceError,
    DuplicateSampleError,
    EngineOutputError,
    ExpertIdError,
    FormatVersionError,
    LazyTensorError,
    LoaderBudgetError,
    MaterializeLimitError,
    MetadataDamagedError,
    MissingRowsError,
    NotATraceError,
    OptionError,
    PublishError,
    QuotaExceededError,
    RoutedExpertsShapeError,
    RoutedExpertsTypeError,
    SampleGapError,
    SampleIdError,
    SampleNotFoundError,
    SegmentMissingError,
    ShardDamagedError,
    StoreError,
    TraceError,
    TraceMismatchError,
    TraceNotFoundError,
    WaitTimeoutError,
)
from tracefile.format import ChunkGeometry, ModelConfig
from tracefile.lazy import LazyRoutedExperts
from tracefile.segments import process_stats
from tracefile.settings import Settings, configure, settings
from tracefile.stats import ReadStats
from tracefile.trace import Trace, open

if TYPE_CHECKING:
    from tracefile.loader import MicrobatchLoader
    from tracefile.sharding import ShardSpec
    from tracefile.writer import TraceWriter

__all__ = [
    "__version__",
    "open",
    "Trace",
    "TraceWriter",
    "LazyRoutedExperts",
    "ShardSpec",
    "MicrobatchLoader",
    "ModelConfig",
    "ChunkGeometry",
    "ReadStats",
    "process_stats",
    "Settings",
    "settings",
    "configure",
    "clear_cache",
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

#: Imported when they are first asked for: rollout workers don't load, learner ranks don't write.
_LATER = {
    "MicrobatchLoader": "tracefile.loader",
    "ShardSpec": "tracefile.sharding",
    "TraceWriter": "tracefile.writer",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_LATER[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
