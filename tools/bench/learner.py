"""How long a learner rank waits for its routing, per microbatch, while it computes.

    .venv/bin/python tools/bench/learner.py

Workloads, one rank of each:

- GLM-4.7-Flash, 47 layers x top-4 of 64, cp 2 (zigzag) x tp 4, microbatches of two samples of about 32k tokens
- Qwen3.5-35B-A3B, 40 layers x top-8 of 256, packs of 262,144 tokens of eight samples, SP 8

Each layer of a microbatch is followed by its part of a compute step of 100 ms (matrix products on one core). The
contenders differ in how they come by a layer's ids; waiting is the time in which they do and nothing is computed.

- in RAM: what the frameworks do; the whole int32 payload lies in the rank's memory, and is padded, concatenated,
  sliced and copied layer by layer
- whole samples: as that, but samples are read whole from the trace first
- lazy: what the frameworks do, on lazy tensors
- loader: MicrobatchLoader, without and with reading ahead

Every contender's ids are compared with what was written, in the same run.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, os.path.dirname(__file__))
from workload import GLM, ModelShape, synthetic_routing

import tracefile
from tracefile import MicrobatchLoader, ShardSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

QWEN35 = ModelShape("Qwen3.5-35B-A3B", 40, 8, 256)
COMPUTE_S = 0.1
console = Console(width=110)

#: Gives a layer's ids ``[local_rows, top_k]``.
Layers = "Callable[[int], torch.Tensor]"


@dataclass(frozen=True)
class Workload:
    title: str
    shape: ModelShape
    tokens: tuple[int, ...]  # of the samples of a microbatch
    spec: ShardSpec
    dtype: torch.dtype  # in which the framework takes ids


WORKLOADS = (
    Workload("cp 2 x tp 4, 2 samples", GLM, (32_749, 32_003), ShardSpec(2, 0, tp_size=4, tp_rank=1), torch.int32),
    Workload(
        "SP 8, packs of 262,144 tokens",
        QWEN35,
        (32_768,) * 8,
        ShardSpec(8, 3, cp_layout="contiguous", padding="zeros"),
        torch.int64,
    ),
)


class Compute:
    """A compute step's part for one layer: matrix products that take as long on an idle core."""

    def __init__(self, seconds: float) -> None:
        self.matrix = torch.rand(256, 256)
        self.products = 1
        while (took := self._time()) < seconds:
            self.products = max(self.products + 1, int(self.products * min(2.0, seconds / took)))

    def _time(self) -> float:
        took = []
        for _ in range(9):
            start = time.perf_counter()
            self()
            took.append(time.perf_counter() - start)
        return statistics.median(took)

    def __call__(self) -> None:
        for _ in range(self.products):
            torch.mm(self.matrix, self.matrix)


class Job:
    """One rank's microbatches of a workload, as every contender gets them."""

    def __init__(self, directory: str, workload: Workload, microbatches: int) -> None:
        self.workload = workload
        shape = workload.shape
        base = synthetic_routing(shape, max(workload.tokens), 0)
        path = os.path.join(directory, f"{shape.name}.trace")
        self.ram: list[list[torch.Tensor]] = []
        self.lazy: list[list[torch.Tensor]] = []
        with tracefile.TraceWriter(path, **shape.options) as writer:
            for number in range(microbatches):
                arrays = []
                for i, tokens in enumerate(workload.tokens):
                    # Other experts of the same popularity, from another place in the sample.
                    moved = np.roll(base, 1000 * (number * len(workload.tokens) + i), axis=0)[:tokens]
                    arrays.append((moved + 7 * number + i) % shape.num_experts)
                self.ram.append([torch.from_numpy(array.astype(np.int32)) for array in arrays])
                self.lazy.append([writer.append(f"{number}/{i}", array) for i, array in enumerate(arrays)])
        self.payload = sum(sample.nbytes for samples in self.ram for sample in samples)
        self.expected = [self.shard(samples) for samples in self.ram]

    def shard(self, samples: Sequence[torch.Tensor]) -> torch.Tensor:
        spec, experts = self.workload.spec, self.workload.shape.num_experts
        return spec.apply(samples, self.workload.tokens, num_experts=experts)

    def in_ram(self) -> Iterator[Callable[[int], torch.Tensor]]:
        for samples in self.ram:
            yield self._eager(samples)

    def whole_samples(self) -> Iterator[Callable[[int], torch.Tensor]]:
        for samples in self.lazy:
            yield self._eager([sample.materialize() for sample in samples])  # type: ignore[attr-defined]

    def _eager(self, samples: Sequence[torch.Tensor]) -> Callable[[int], torch.Tensor]:
        local = self.shard([sample.to(self.workload.dtype) for sample in samples]).contiguous()
        return lambda layer: local[:, layer].contiguous()

    def lazily(self) -> Iterator[Callable[[int], torch.Tensor]]:
        for samples in self.lazy:
            local = self.shard([sample.to(self.workload.dtype) for sample in samples])
            yield lambda layer, local=local: local[:, layer].materialize()  # type: ignore[misc]

    def loaded(self, prefetch: int) -> Iterator[Callable[[int], torch.Tensor]]:
        shards: Any = [self.shard(samples) for samples in self.lazy]
        with MicrobatchLoader(shards, prefetch=prefetch, dtype=self.workload.dtype) as loader:
            loader.begin_pass("forward")
            for microbatch in loader:
                yield microbatch.layer
            self.loader_stats = loader.stats()


def waits(
    job: Job, contender: Callable[[], Iterator[Callable[[int], torch.Tensor]]], compute: Compute | None
) -> list[float]:
    """Seconds waited in each microbatch; without ``compute``, ids are compared instead."""
    tracefile.clear_cache()
    result = []
    start = time.perf_counter()
    for number, layer_of in enumerate(contender()):
        waited = time.perf_counter() - start
        for layer in range(job.workload.shape.num_layers):
            start = time.perf_counter()
            ids = layer_of(layer)
            waited += time.perf_counter() - start
            if compute is None:
                if not torch.equal(ids.int(), job.expected[number][:, layer]):
                    raise AssertionError("a rank got other ids than were written")
            else:
                compute()
        result.append(waited)
        start = time.perf_counter()
    return result


def run(directory: str, workload: Workload, microbatches: int, rounds: int) -> None:
    job = Job(directory, workload, microbatches)
    rows = job.expected[0].shape[0]
    console.print(
        f"\n[bold]{workload.shape}[/], {workload.title}: {rows:,} rows a rank; {microbatches} microbatches,"
        f" {job.payload / 2**20:,.0f} MiB as int32"
    )
    contenders: dict[str, Callable[[], Iterator[Callable[[int], torch.Tensor]]]] = {
        "in RAM: pad, cat, slice, copy": job.in_ram,
        "whole samples, then slice": job.whole_samples,
        "lazy": job.lazily,
        "loader, prefetch=0": lambda: job.loaded(0),
        "loader, prefetch=2": lambda: job.loaded(2),
    }
    compute = Compute(COMPUTE_S / workload.shape.num_layers)
    medians: dict[str, list[float]] = {name: [] for name in contenders}
    reads: dict[str, list[float]] = {name: [] for name in contenders}
    for contender in contenders.values():
        waits(job, contender, None)
    for _ in range(rounds):
        for name, contender in contenders.items():
            # Not the first microbatch: nothing is computed before it that could hide reading it.
            medians[name].append(statistics.median(waits(job, contender, compute)[1:]))
            if name.startswith("loader"):
                reads[name].append(job.loader_stats.wait_seconds)
    table = Table(title="Waiting for routing", title_justify="left", title_style="bold")
    for column in ("", "per microbatch", "in RAM takes", "whole samples takes"):
        table.add_column(column, justify="left" if not column else "right")
    for name, values in medians.items():
        ratios = [
            statistics.median(a / b for a, b in zip(medians[other], values, strict=True)) for other in list(medians)[:2]
        ]
        table.add_row(name, f"{statistics.median(values) * 1e3:.2f} ms", *(f"{ratio:.1f} x" for ratio in ratios))
    console.print(table)
    alone, ahead = reads["loader, prefetch=0"], reads["loader, prefetch=2"]
    hidden = statistics.median(1 - b / a for a, b in zip(alone, ahead, strict=True))
    console.print(
        f"waiting for reads, all microbatches, the first included: {statistics.median(alone) * 1e3:.1f} ms without"
        f" reading ahead, {statistics.median(ahead) * 1e3:.1f} ms with: {hidden:.0%} hidden behind a compute step of"
        f" {COMPUTE_S * 1e3:.0f} ms"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--microbatches", type=int, default=6)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        for workload in WORKLOADS:
            run(directory, workload, options.microbatches, options.rounds)


if __name__ == "__main__":
    main()
