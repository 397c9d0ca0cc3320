"""tracefile: routed experts of MoE rollouts in memory-mapped traces, read lazily by the ranks that need them."""

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
    RoutedExpertsShapeError,
    RoutedExpertsTypeError,
    SampleGapError,
    SampleIdError,
    SampleNotFoundError,
    SegmentMissingError,
    ShardDamagedError,
    TraceError,
    TraceNotFoundError,
    WaitTimeoutError,
)
from tracefile.format import ChunkGeometry, ModelConfig
from tracefile.lazy import LazyRoutedExperts
from tracefile.loader import MicrobatchLoader
from tracefile.segments import process_stats
from tracefile.settings import Settings, configure, settings
from tracefile.sharding import ShardSpec
from tracefile.stats import ReadStats
from tracefile.trace import Trace, open
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
    "OptionError",
]
