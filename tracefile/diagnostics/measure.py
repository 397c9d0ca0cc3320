"""What reading has cost this process and what it holds, as a flat dict of floats."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tracefile.ahead import held_ahead
from tracefile.cache import chunk_cache
from tracefile.segments import process_stats

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tracefile.trace import Trace

_STATUS = {"RssAnon": "rss_anon_bytes", "VmRSS": "rss_bytes"}
_SMAPS = {
    "Private_Clean": "uss_bytes",
    "Private_Dirty": "uss_bytes",
    "Private_Hugetlb": "uss_bytes",
    "Pss": "pss_bytes",
    "Pss_Anon": "pss_anon_bytes",
}


def snapshot(trace: Trace | None = None, *, prefix: str = "tracefile/", smaps: bool = True) -> dict[str, float]:
    """What reading has cost this process so far, and what it holds now. Reads no routing.

    Parameters
    ----------
    trace : Trace, optional
        Adds the size of this trace as of its last refresh, from its headers.
    prefix : str
        Put before every name.
    smaps : bool
        Whether to ask for USS and PSS, for which the kernel walks every page that is mapped: 35 ms for each GiB.

    Returns
    -------
    dict of str to float
        Names that end in ``_bytes`` are in bytes, the others count. Ready for ``wandb.log``, for TensorBoard's
        ``add_scalar`` one by one, or to be merged into a framework's own metrics:

        - ``read_bytes``, ``decoded_bytes``, ``moved_bytes``: taken from shard files, decoded from that, and sent to
          another device in the width in which they travelled. With ``reads`` (materializations),
          ``decoded_chunks`` and ``cache_hits`` (chunks found decoded), totals of the process over all traces.
        - ``active_chunks``, ``active_bytes``: decoded chunks that are held now, by the cache and by loaders, and
          ``peak_active_bytes``, the most that the cache and each loader held.
        - ``rss_anon_bytes``, ``rss_bytes``, and with ``smaps`` ``uss_bytes``, ``pss_bytes``, ``pss_anon_bytes``.
          What the kernel does not tell is left out.
        - ``cuda_allocated_bytes``, ``cuda_reserved_bytes``: of torch's allocator, over all devices. Left out until
          something else has initialized CUDA.
        - ``trace_int32_bytes``, ``trace_stored_bytes``, ``trace_samples``, ``trace_rows``: the rows of the newest
          revision of every sample as int32, the shard files as they are, and counts. Only with ``trace``.

    Examples
    --------
    >>> import numpy as np, tempfile, tracefile
    >>> from tracefile.diagnostics import snapshot
    >>> path = tempfile.mkdtemp() + "/step_1.trace"
    >>> with tracefile.TraceWriter(path, num_layers=3, top_k=2, num_experts=64) as writer:
    ...     experts = writer.append("a", np.zeros((100, 3, 2), int))
    >>> before = snapshot(tracefile.open(path))
    >>> before["tracefile/trace_rows"], before["tracefile/trace_int32_bytes"]
    (100.0, 2400.0)
    >>> values = experts.materialize()
    >>> snapshot()["tracefile/reads"] - before["tracefile/reads"]
    1.0
    """
    stats = process_stats()
    ahead = held_ahead()
    values: dict[str, float] = {
        "read_bytes": stats.bytes_read,
        "decoded_bytes": stats.bytes_decoded,
        "moved_bytes": stats.bytes_moved,
        "decoded_chunks": stats.chunks_decoded,
        "cache_hits": stats.cache_hits,
        "reads": stats.reads,
        "active_chunks": len(chunk_cache) + ahead.active_chunks,
        "active_bytes": chunk_cache.nbytes + ahead.active_bytes,
        "peak_active_bytes": chunk_cache.peak_nbytes + ahead.peak_bytes,
    }
    values |= kernel_bytes("/proc/self/status", _STATUS)
    if smaps:
        values |= kernel_bytes("/proc/self/smaps_rollup", _SMAPS)
    values |= _cuda_bytes()
    if trace is not None:
        values |= _trace_size(trace)
    return {prefix + name: float(value) for name, value in values.items()}


def kernel_bytes(path: str, names: Mapping[str, str]) -> dict[str, float]:
    """Sums of a /proc file's fields, by the name that each has here; none where there is no such file."""
    try:
        with open(path, "rb") as file:
            lines = file.read().decode("ascii", "replace").splitlines()
    except OSError:
        return {}
    found: dict[str, float] = {}
    for line in lines:
        field, _, value = line.partition(":")
        if field in names:
            found[names[field]] = found.get(names[field], 0.0) + int(value.split()[0]) * 1024
    return found


def _cuda_bytes() -> dict[str, float]:
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return {}
    try:
        # All devices: which one is current differs between threads, and a sampler has its own.
        stats = [torch.cuda.memory_stats(device) for device in range(torch.cuda.device_count())]
    except RuntimeError:
        return {}  # a pluggable allocator keeps no statistics
    return {
        f"cuda_{name}_bytes": sum(device.get(f"{name}_bytes.all.current", 0) for device in stats)
        for name in ("allocated", "reserved")
    }


def _trace_size(trace: Trace) -> dict[str, float]:
    config = trace.config
    samples = list(trace._visible.newest.entries.values())  # copied: another thread may refresh the trace, or close it
    rows = sum(sample.rows for sample in samples)
    return {
        "trace_int32_bytes": rows * config.num_layers * config.top_k * 4,
        "trace_stored_bytes": sum(segment.shard_bytes for segment in list(trace.segments.values())),
        "trace_samples": len(samples),
        "trace_rows": rows,
    }
