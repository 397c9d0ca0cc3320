"""How shard files are read: by mapping on local file systems, by pread on network ones, the same bytes either way."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING
from unittest import mock

import numpy as np
import pytest
from support import random_routing

import tracefile
from tracefile import source
from tracefile.segments import segment_pool

if TYPE_CHECKING:
    from pathlib import Path


def kind_of(experts: tracefile.LazyRoutedExperts) -> str:
    """How this tensor's first segment is being read."""
    (ref, *_) = experts.selection.rows.segments()
    opened = segment_pool.get(ref.trace, experts.config, ref.id).source
    assert opened is not None
    return opened.kind


def test_the_type_of_a_file_system(tmp_path: Path) -> None:
    with open("/proc/self/mounts") as mounts:
        known = {line.split()[2] for line in mounts}
    assert source.file_system_type(str(tmp_path)) in known
    assert source.file_system_type("/proc") == "proc"


@pytest.mark.parametrize(
    ("fs_type", "kind"),
    [
        ("ext4", "mmap"), ("xfs", "mmap"), ("tmpfs", "mmap"), ("overlay", "mmap"),
        ("nfs", "pread"), ("nfs4", "pread"), ("lustre", "pread"), ("fuse", "pread"), ("fuse.juicefs", "pread"),
        ("ceph", "pread"), ("gpfs", "pread"), ("beegfs", "pread"), ("9p", "pread"), ("virtiofs", "pread"),
        ("", "pread"),
    ],
)  # fmt: skip
def test_auto_goes_by_the_file_system(path: str, rng: np.random.Generator, fs_type: str, kind: str) -> None:
    ids = random_routing(rng, 300, 6, 2, 16)
    with tracefile.TraceWriter(path, num_layers=6, top_k=2, num_experts=16, rows_per_chunk=64) as writer:
        experts = writer.append("a", ids)
    with mock.patch.object(source, "_type_of_device", return_value=fs_type):
        np.testing.assert_array_equal(experts.numpy(), ids)
        assert kind_of(experts) == kind
    tracefile.open(path).close()


@pytest.mark.parametrize("kind", ["mmap", "pread"])
def test_a_chosen_source_travels_with_the_handle(path: str, rng: np.random.Generator, kind: str) -> None:
    import pickle

    ids = random_routing(rng, 300, 6, 2, 16)
    with tracefile.TraceWriter(path, num_layers=6, top_k=2, num_experts=16) as writer:
        writer.append("a", ids)
    experts = pickle.loads(pickle.dumps(tracefile.open(path, source=kind)["a"]))
    np.testing.assert_array_equal(experts.numpy(), ids)
    assert kind_of(experts) == kind
    with pytest.raises(tracefile.OptionError, match="source must be one of"):
        tracefile.open(path, source="http")


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_pread_merges_neighbouring_chunks(path: str, rng: np.random.Generator, threads: int) -> None:
    ids = random_routing(rng, 4096, 6, 2, 16)
    with tracefile.TraceWriter(
        path, num_layers=6, top_k=2, num_experts=16, rows_per_chunk=64, source="pread"
    ) as writer:
        experts = writer.append("a", ids)
    experts[:1].numpy()  # opened: header and index are read
    tracefile.configure(decode_threads=threads)
    with mock.patch.object(os, "pread", wraps=os.pread) as pread:
        np.testing.assert_array_equal(experts[64:].numpy(), ids[64:])
    assert pread.call_count == threads


def test_short_reads_are_completed(path: str, rng: np.random.Generator) -> None:
    """A network file system may return less than it was asked for."""
    ids = random_routing(rng, 2000, 6, 2, 16)
    with tracefile.TraceWriter(path, num_layers=6, top_k=2, num_experts=16, source="pread") as writer:
        experts = writer.append("a", ids)
    real = os.pread
    with mock.patch.object(os, "pread", side_effect=lambda fd, size, offset: real(fd, min(size, 1000), offset)):
        np.testing.assert_array_equal(experts.numpy(), ids)
