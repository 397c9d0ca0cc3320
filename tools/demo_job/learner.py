"""A learner rank: gets the routing of all samples in one of two ways, and takes its part of each microbatch."""

from __future__ import annotations

import hashlib
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

# Torch imports this at the first operation on any tensor subclass with its own dispatch; learners that shard
# with FSDP or Megatron have it anyway. Here, so that it is part of a rank's start in both passes.
import torch.distributed.tensor
from torch import Tensor

import tracefile
from demo_job.parallel import Rank, local_experts, record

if TYPE_CHECKING:
    from demo_job.processes import Channel


@dataclass(frozen=True, slots=True)
class LearnerTask:
    """What every rank is told; the same for all of them.

    Attributes
    ----------
    payload_files : tuple of str
        The whole payload, to be loaded; empty if there are handles.
    handles : dict of str to LazyRoutedExperts
        References into a trace, by sample; empty if there are files.
    microbatches : tuple of tuple of str
        Sample ids.
    num_experts : int
    """

    payload_files: tuple[str, ...]
    handles: dict[str, tracefile.LazyRoutedExperts]
    microbatches: tuple[tuple[str, ...], ...]
    num_experts: int


@dataclass(frozen=True, slots=True)
class LearnerResult:
    """What a rank got, and what it cost.

    Attributes
    ----------
    digest : str
        Of every int32 tensor of every layer and microbatch, in order.
    tensors : int
        How many went into the digest.
    rows : int
        Local rows, over all microbatches.
    bytes_read : int
        From payload files or from the trace.
    wall_s, cpu_s : float
        Spent in getting the routing; the digest is not counted.
    """

    digest: str
    tensors: int
    rows: int
    bytes_read: int
    wall_s: float
    cpu_s: float


class _Stopwatch:
    """Wall and processor time spent inside its contexts."""

    def __init__(self) -> None:
        self.wall_s = self.cpu_s = 0.0

    def __enter__(self) -> None:
        self._began = time.perf_counter(), time.process_time()

    def __exit__(self, *exception: object) -> None:
        self.wall_s += time.perf_counter() - self._began[0]
        self.cpu_s += time.process_time() - self._began[1]


def _load(files: tuple[str, ...]) -> dict[str, Tensor]:
    payload: dict[str, Tensor] = {}
    for file in files:
        payload.update(torch.load(file, weights_only=True))
    return payload


def learn(channel: Channel, rank: Rank) -> None:
    """The process. Says that it is ready, gets a :class:`LearnerTask`, replies with a :class:`LearnerResult`.

    Until it is told the number of a microbatch it then stays, with all that it holds, so that its memory can be
    looked at; it replies with that microbatch's arrays.
    """
    torch.set_num_threads(1)
    channel.reply("ready")
    task: LearnerTask = channel.receive()
    stopwatch = _Stopwatch()
    digest = hashlib.blake2b(digest_size=16)
    tensors = rows = 0
    with stopwatch:
        payload = _load(task.payload_files) if task.payload_files else task.handles

    def layers_of(microbatch: tuple[str, ...]) -> list[Tensor]:
        return record(local_experts([payload[sample] for sample in microbatch], rank, task.num_experts))

    for microbatch in task.microbatches:
        with stopwatch:
            layers = layers_of(microbatch)
        for layer in layers:
            digest.update(layer.numpy().data)
        tensors += len(layers)
        rows += len(layers[0])
    if task.payload_files:
        bytes_read = sum(os.path.getsize(file) for file in task.payload_files)
    else:
        bytes_read = tracefile.process_stats().bytes_read
    channel.reply(LearnerResult(digest.hexdigest(), tensors, rows, bytes_read, stopwatch.wall_s, stopwatch.cpu_s))
    channel.reply([layer.numpy() for layer in layers_of(task.microbatches[channel.receive()])])
    channel.receive()
