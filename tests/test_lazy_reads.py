"""What a lazy tensor reads: nothing until values are needed, then exactly the chunks touched, each once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import random_routing

import tracefile

LAYERS, TOP_K, EXPERTS = 10, 2, 300
LAYERS_PER_CHUNK, ROWS_PER_CHUNK = 4, 16
ROWS = 100

Chunk = tuple[str, int, int]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> tuple[tracefile.LazyRoutedExperts, np.ndarray[Any, Any]]:
    path = str(tmp_path_factory.mktemp("reads") / "t.trace")
    array = random_routing(np.random.default_rng(3), ROWS, LAYERS, TOP_K, EXPERTS)
    with tracefile.TraceWriter(
        path,
        num_layers=LAYERS,
        top_k=TOP_K,
        num_experts=EXPERTS,
        layers_per_chunk=LAYERS_PER_CHUNK,
        rows_per_chunk=ROWS_PER_CHUNK,
    ) as writer:
        return writer.append("a", array), array


def chunks_of(segment: str, rows: list[int], layers: list[int]) -> set[Chunk]:
    """The chunks that hold any of these rows and layers, by definition."""
    return {(segment, layer // LAYERS_PER_CHUNK, row // ROWS_PER_CHUNK) for row in rows for layer in layers}


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_exactly_the_touched_chunks_each_once(
    shared: tuple[tracefile.LazyRoutedExperts, np.ndarray[Any, Any]], decoded: list[Chunk], data: st.DataObject
) -> None:
    experts, array = shared
    segment = experts.selection.rows.segments()[0].id
    rows = data.draw(st.lists(st.integers(0, ROWS - 1), max_size=8) | st.just(list(range(ROWS))))
    start = data.draw(st.integers(0, ROWS))
    rows += range(start, data.draw(st.integers(start, ROWS)))
    layers = data.draw(st.lists(st.integers(0, LAYERS - 1), min_size=1, max_size=LAYERS))
    tracefile.clear_cache()
    decoded.clear()
    before = tracefile.process_stats()
    local = torch.cat([experts[torch.tensor(rows, dtype=torch.int64)][:, layers], experts[:0][:, layers]])
    assert tracefile.process_stats() == before
    np.testing.assert_array_equal(local.numpy(), array[rows][:, layers])
    assert len(decoded) == len(set(decoded))
    assert set(decoded) == chunks_of(segment, rows, layers)
    after = tracefile.process_stats()
    assert after.chunks_decoded - before.chunks_decoded == len(decoded)
    chunk_bytes = LAYERS_PER_CHUNK * ROWS_PER_CHUNK * TOP_K * 2
    assert after.bytes_decoded - before.bytes_decoded == len(decoded) * chunk_bytes


def test_bytes_read_are_the_encoded_bytes_of_the_chunks(
    shared: tuple[tracefile.LazyRoutedExperts, np.ndarray[Any, Any]],
) -> None:
    from tracefile.segments import segment_pool

    experts, _ = shared
    ref = experts.selection.rows.segments()[0]
    segment = segment_pool.get(ref.trace, experts.config, ref.id)
    before = tracefile.process_stats()
    experts[20:40, 5].materialize()
    row_chunks = segment.row_chunks
    lengths = [segment.index.lengths[1 * row_chunks + row] for row in (1, 2)]
    assert tracefile.process_stats().bytes_read - before.bytes_read == sum(lengths)


@pytest.mark.parametrize("order", ["forward", "backward"])
def test_layer_by_layer_decodes_each_chunk_once(
    shared: tuple[tracefile.LazyRoutedExperts, np.ndarray[Any, Any]], decoded: list[Chunk], order: str
) -> None:
    experts, array = shared
    local = experts[10:90]
    for layer in range(LAYERS) if order == "forward" else reversed(range(LAYERS)):
        np.testing.assert_array_equal(local[:, layer].numpy(), array[10:90, layer])
    assert len(decoded) == len(set(decoded)) == 3 * 6
    assert tracefile.process_stats().cache_hits > 0


def test_without_a_budget_nothing_is_kept(
    shared: tuple[tracefile.LazyRoutedExperts, np.ndarray[Any, Any]], decoded: list[Chunk]
) -> None:
    experts, _ = shared
    tracefile.configure(cache_bytes=0)
    for _ in range(2):
        experts[0].materialize()
    assert len(decoded) == 2 * 3
    assert tracefile.open(experts.selection.rows.segments()[0].trace.path).active == (0, 0)


def test_a_tight_budget_is_never_passed(
    shared: tuple[tracefile.LazyRoutedExperts, np.ndarray[Any, Any]], decoded: list[Chunk]
) -> None:
    from tracefile.cache import chunk_cache

    experts, array = shared
    chunk_bytes = LAYERS_PER_CHUNK * ROWS_PER_CHUNK * TOP_K * 2
    tracefile.configure(cache_bytes=3 * chunk_bytes)
    for row in [*range(0, ROWS, 7), *range(0, ROWS, 11)]:
        np.testing.assert_array_equal(experts[row].numpy(), array[row])
        assert chunk_cache.nbytes <= 3 * chunk_bytes
        assert len(chunk_cache) <= 3


def test_a_chunk_that_is_used_up_is_not_kept(
    shared: tuple[tracefile.LazyRoutedExperts, np.ndarray[Any, Any]],
) -> None:
    experts, _ = shared
    trace = tracefile.open(experts.selection.rows.segments()[0].trace.path)
    trace["a"].materialize()
    assert trace.active == (0, 0)
    trace["a"][5:40, 2].materialize()
    assert trace.active[0] == 3


def test_stats_of_a_trace_and_of_the_process(path: str, rng: np.random.Generator) -> None:
    array = random_routing(rng, 50, 4, 2, 16)
    with tracefile.TraceWriter(path, num_layers=4, top_k=2, num_experts=16) as writer:
        writer.append("a", array)
    trace = tracefile.open(path)
    process = tracefile.process_stats()
    assert trace.stats == tracefile.ReadStats()
    trace["a"][:10].materialize()
    assert trace.stats.reads == 1
    assert trace.stats.bytes_read > 0
    assert tracefile.process_stats().bytes_read == process.bytes_read + trace.stats.bytes_read


def test_repr_reads_nothing(path: str, rng: np.random.Generator) -> None:
    import shutil

    with tracefile.TraceWriter(path, num_layers=4, top_k=2, num_experts=16) as writer:
        experts = writer.append("a", random_routing(rng, 50, 4, 2, 16))
    shutil.rmtree(path)
    padded = torch.cat([experts[3:9], torch.zeros(2, 4, 2, dtype=torch.int32)])
    assert repr(experts) == "<LazyRoutedExperts 50 x 4 x 2 int32 (uint8 on disk), 50 rows of 1 segment, nothing read>"
    assert "6 rows of 1 segment, 2 padding rows, nothing read" in repr(padded)
    assert str(padded) == f"{padded}" == repr(padded)
