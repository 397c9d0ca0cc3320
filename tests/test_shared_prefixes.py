"""Samples that begin alike: rows are stored once, whatever nearly fools the search, and read back exact."""

from __future__ import annotations

import json
import shutil
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from support import in_fork, random_routing
from typer.testing import CliRunner

import tracefile
from tracefile import prefixes
from tracefile.cli import app
from tracefile.prefixes import BLOCK_ROWS, PrefixChain
from tracefile.store import list_segments

if TYPE_CHECKING:
    from collections.abc import Iterator

SHAPE = {"num_layers": 6, "top_k": 4, "num_experts": 64}
Array = np.ndarray[Any, Any]


@pytest.fixture
def writer(path: str) -> Iterator[tracefile.TraceWriter]:
    with tracefile.TraceWriter(path, **SHAPE) as writer:
        yield writer


def make(rng: np.random.Generator, rows: int) -> Array:
    return random_routing(rng, rows, **SHAPE)


def own_rows(path: str) -> int:
    """Rows that are stored, alignment to chunks left out."""
    result = CliRunner().invoke(app, ["inspect", path, "--json"])
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    stored: int = facts["rows_stored"]
    assert stored <= facts["rows_seen"]
    return stored


@pytest.mark.parametrize("at_once", [False, True])
def test_a_group_shares_its_prompt(writer: tracefile.TraceWriter, rng: np.random.Generator, at_once: bool) -> None:
    """16 samples with 4k rows in common: what is stored is within 1.05 of what is distinct."""
    prompt = make(rng, 4096 - 37)
    samples = {f"p/{i}": np.concatenate([prompt, make(rng, 500 + 61 * i)]) for i in range(16)}
    if at_once:
        lazies = dict(zip(samples, writer.append_many(samples.items()), strict=True))
    else:
        lazies = {sample: writer.append(sample, ids) for sample, ids in samples.items()}
    distinct = len(prompt) + sum(len(ids) - len(prompt) for ids in samples.values())
    assert own_rows(writer.path) <= 1.05 * distinct
    assert own_rows(writer.path) == distinct, "up to the very row where they part"
    trace = tracefile.open(writer.path)
    for sample, ids in samples.items():
        np.testing.assert_array_equal(lazies[sample].numpy(), ids)
        np.testing.assert_array_equal(trace[sample].numpy(), ids)


def test_a_session_of_100_turns(path: str, rng: np.random.Generator) -> None:
    """To 64k rows, each turn sent with everything before it; its boundary row changes every time."""
    shape = {"num_layers": 2, "top_k": 2, "num_experts": 64}
    whole = random_routing(rng, 100 * 655, **shape)
    with tracefile.TraceWriter(path, **shape) as writer:
        for turn in range(1, 101):
            writer.append("session", whole[: turn * 655])
            if turn % 33 == 0:
                np.testing.assert_array_equal(tracefile.open(path)["session"].numpy(), whole[: turn * 655])
    assert own_rows(path) == len(whole)
    handles = [tracefile.open(path)["session"]]
    np.testing.assert_array_equal(handles[0].numpy(), whole)


def test_what_shares_nothing(writer: tracefile.TraceWriter, rng: np.random.Generator) -> None:
    arrays = [make(rng, rows) for rows in (0, 1, BLOCK_ROWS - 1, BLOCK_ROWS, 1000, 1000)]
    for number, ids in enumerate(arrays):
        np.testing.assert_array_equal(writer.append(str(number), ids).numpy(), ids)
    assert own_rows(writer.path) == sum(map(len, arrays))


@pytest.mark.parametrize("rows", [BLOCK_ROWS - 1, BLOCK_ROWS, BLOCK_ROWS + 1, 5 * BLOCK_ROWS, 700])
def test_how_long_a_prefix_is(writer: tracefile.TraceWriter, rng: np.random.Generator, rows: int) -> None:
    first, second = make(rng, 1000), make(rng, 1000)
    second[:rows] = first[:rows]
    second[rows] = (first[rows] + 1) % 64
    writer.append("a", first)
    np.testing.assert_array_equal(writer.append("b", second).numpy(), second)
    assert own_rows(writer.path) == 2000 - (rows if rows >= BLOCK_ROWS else 0)
    # The same, and shorter, and from another dtype and shape.
    torch_ids = torch.from_numpy(first[:900].astype(np.uint8)).view(900, -1)
    np.testing.assert_array_equal(writer.append("c", torch_ids).numpy(), first[:900])
    assert own_rows(writer.path) == 2000 - (rows if rows >= BLOCK_ROWS else 0)


def test_rows_that_were_not_captured_are_not_shared(writer: tracefile.TraceWriter, rng: np.random.Generator) -> None:
    ids = make(rng, 600)
    holes = ids.copy()
    holes[300:310] = -1
    for sample, array in (("a", holes), ("b", ids), ("c", holes), ("d", ids)):
        experts = writer.append(sample, array)
        np.testing.assert_array_equal(experts.filled("minus_one").numpy(), array)
        assert int((~experts.valid).sum()) == (10 if array is holes else 0)
    # b takes 300 rows of a; c what it shares with b up to its hole; d all of b.
    assert own_rows(writer.path) == 600 + 300 + 300 + 0


def test_ids_that_would_look_the_same_when_narrowed(writer: tracefile.TraceWriter, rng: np.random.Generator) -> None:
    ids = make(rng, 600)
    writer.append("a", ids)
    wrong = ids.copy()
    wrong[200, 3, 2] += 256
    with pytest.raises(tracefile.ExpertIdError, match="token 200, layer 3"):
        writer.append("b", wrong)
    np.testing.assert_array_equal(writer.append("b", ids).numpy(), ids)
    assert own_rows(writer.path) == 600


def test_checksums_that_collide(
    writer: tracefile.TraceWriter, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the checksum finds is compared; with one that says yes to everything, values are right all the same."""
    monkeypatch.setattr(prefixes, "crc32c", lambda data, value=0: 0)
    first, second = make(rng, 1000), make(rng, 1200)
    second[:500] = first[:500]
    for sample, ids in (("a", first), ("b", second), ("c", first), ("d", second), ("e", make(rng, 300))):
        np.testing.assert_array_equal(writer.append(sample, ids).numpy(), ids)


def test_a_failed_segment_is_not_shared(
    writer: tracefile.TraceWriter, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = make(rng, 600)
    bad = make(rng, 5)
    bad[2, 1, 0] = 99
    with pytest.raises(tracefile.ExpertIdError):
        writer.append_many([("a", ids), ("b", bad)])
    np.testing.assert_array_equal(writer.append("a", ids).numpy(), ids)
    assert own_rows(writer.path) == 600


def test_what_was_deleted_is_written_again(writer: tracefile.TraceWriter, rng: np.random.Generator) -> None:
    ids = make(rng, 600)
    writer.append("a", ids)
    (segment,) = list_segments(writer.path)
    tracefile.open(writer.path).close()  # nobody holds its files
    shutil.rmtree(f"{writer.path}/segments/{segment}")
    np.testing.assert_array_equal(writer.append("b", ids).numpy(), ids)
    assert own_rows(writer.path) == 600


def test_off(path: str, rng: np.random.Generator) -> None:
    ids = make(rng, 600)
    with tracefile.TraceWriter(path, **SHAPE, share_prefixes=False) as writer:
        for sample in "ab":
            writer.append(sample, ids)
    assert own_rows(path) == 1200


def test_continued_samples_are_not_mistaken(writer: tracefile.TraceWriter, rng: np.random.Generator) -> None:
    """What begins with rows that the trace has is not looked up, and new rows after a shared prefix may be."""
    first, second = make(rng, 600), make(rng, 400)
    writer.append("a", first)
    writer.append("a", second, start=500)
    expected = np.concatenate([first[:500], second])
    np.testing.assert_array_equal(writer.append("b", expected).numpy(), expected)
    assert own_rows(writer.path) == 600 + 400 + 400
    np.testing.assert_array_equal(writer.append("c", expected).numpy(), expected)
    assert own_rows(writer.path) == 600 + 400 + 400


def test_the_index_is_bounded(path: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefixes, "MAX_BLOCKS", 10)
    with tracefile.TraceWriter(path, **SHAPE) as writer:
        samples = [make(rng, 5 * BLOCK_ROWS) for _ in range(4)]
        for number, ids in enumerate(samples):
            writer.append(str(number), ids)
            index = writer._segments._prefixes
            assert index is not None
            assert len(index._blocks) <= 10
        writer.append("newest again", samples[3])
        assert own_rows(path) == 20 * BLOCK_ROWS
        writer.append("forgotten", samples[0])
        assert own_rows(path) == 25 * BLOCK_ROWS


def test_threads_and_forks(writer: tracefile.TraceWriter, rng: np.random.Generator) -> None:
    prompt = make(rng, 1000)
    writer.append("prompt", prompt)
    arrays = [np.concatenate([prompt, make(rng, 200)]) for _ in range(8)]
    wrong: list[BaseException] = []

    def append(number: int) -> None:
        try:
            np.testing.assert_array_equal(writer.append(str(number), arrays[number]).numpy(), arrays[number])
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=append, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    assert in_fork(lambda: [append(number) for number in range(4, 8)] and not wrong)
    for thread in threads:
        thread.join()
    assert not wrong
    assert own_rows(writer.path) == 1000 + 8 * 200


def test_a_chain_does_not_depend_on_how_rows_come(rng: np.random.Generator) -> None:
    rows = make(rng, 1000).astype(np.uint8)
    whole = PrefixChain()
    whole.update(rows)
    assert [key[0] for key in whole.keys] == list(range(BLOCK_ROWS, 1000, BLOCK_ROWS))
    for step in (1, 7, 128, 300):
        pieces = PrefixChain()
        for first in range(0, 1000, step):
            pieces.update(rows[first : first + step])
        assert pieces.keys == whole.keys
    resumed = PrefixChain(whole.keys[:3])
    resumed.update(rows[3 * BLOCK_ROWS :])
    assert resumed.keys == whole.keys
