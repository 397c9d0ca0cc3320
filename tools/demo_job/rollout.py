"""A rollout process: prefills prompts, samples continuations in batch, records the routing, writes it down.

The samples of a prompt share its prefill, as an engine's prefix cache has it; each has its own continuation.
The routing of a sample is what the routers chose when its tokens went through the model, row by row. The last
token was sampled but never fed, so it has no row.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

import tracefile
from demo_job import corpus
from demo_job.model import KeyValues, Model, ModelShape, Routing

if TYPE_CHECKING:
    from demo_job.processes import Channel

#: About as many samples are decoded in one batch: whole prompts, at least one.
BATCH_SAMPLES = 48


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of ``length`` tokens and the ids of the samples that continue it."""

    sample_ids: tuple[str, ...]
    length: int


@dataclass(frozen=True, slots=True)
class RolloutTask:
    """What one rollout process has to do, and where it writes.

    Attributes
    ----------
    weights, trace_path : str
    payload_path : str
        Directory for the same routing as int32 tensors, as an engine returns it.
    shape : ModelShape
    prompts : tuple of Prompt
    max_new : int
        The longest continuation, in tokens.
    seed : int
    """

    weights: str
    trace_path: str
    payload_path: str
    shape: ModelShape
    prompts: tuple[Prompt, ...]
    max_new: int
    seed: int


@dataclass(frozen=True, slots=True)
class RolloutResult:
    """What came of it.

    Attributes
    ----------
    handles : dict of str to LazyRoutedExperts
        References into the trace, by sample.
    payload_files : list of str
    generated : int
        Sampled tokens.
    write_s : float
        Seconds spent in appending to the trace.
    reproduced : float
        Share of the expert ids recorded for a sample's continuation that a forward pass over all of its tokens
        chooses again.
    """

    handles: dict[str, tracefile.LazyRoutedExperts]
    payload_files: list[str]
    generated: int
    write_s: float
    reproduced: float


@dataclass(slots=True)
class _Sample:
    sample_id: str
    prompt: Tensor
    prompt_rows: Tensor
    new_tokens: list[int]
    new_rows: list[Tensor]

    @property
    def tokens(self) -> Tensor:
        return torch.cat([self.prompt, torch.tensor(self.new_tokens)])

    def routed_experts(self) -> Tensor:
        """``[tokens - 1, layers, top_k]`` int32."""
        return torch.cat([self.prompt_rows, torch.stack(self.new_rows)]) if self.new_rows else self.prompt_rows


def _rows(routing: list[Routing]) -> Tensor:
    """``[tokens, layers, top_k]`` int32."""
    return torch.stack([layer.experts for layer in routing], 1).to(torch.int32)


def _prefill(model: Model, prompt: Tensor) -> tuple[Tensor, Tensor, list[KeyValues]]:
    """Logits of the next token ``[vocab]``, routing rows, and the last window of each layer's KV cache."""
    logits, routing, caches = model(prompt[None])
    window = model.shape.window
    kept = [KeyValues(cache.keys[:, :, -window:].clone(), cache.values[:, :, -window:].clone()) for cache in caches]
    return logits[0, -1], _rows(routing), kept


def generate(
    model: Model, prompts: list[tuple[Prompt, Tensor]], max_new: int, sampler: torch.Generator
) -> list[_Sample]:
    """Continue each prompt once per sample id, all in one batch, until a paragraph ends or at ``max_new`` tokens."""
    samples: list[_Sample] = []
    parts: list[list[KeyValues]] = []
    first: list[Tensor] = []
    for prompt, tokens in prompts:
        logits, rows, caches = _prefill(model, tokens)
        samples += [_Sample(sample_id, tokens, rows, [], []) for sample_id in prompt.sample_ids]
        parts += [caches] * len(prompt.sample_ids)
        first += [logits] * len(prompt.sample_ids)
    caches = [
        KeyValues(*(torch.cat(tensors) for tensors in zip(*layer, strict=True))) for layer in zip(*parts, strict=True)
    ]
    positions = torch.tensor([len(sample.prompt) for sample in samples])
    logits = torch.stack(first)
    running = list(samples)
    for step in range(max_new):
        tokens = torch.multinomial(logits.softmax(-1), 1, generator=sampler)[:, 0]
        for sample, token in zip(running, tokens.tolist(), strict=True):
            sample.new_tokens.append(token)
        going = [i for i, sample in enumerate(running) if not _ended(sample, max_new)]
        if not going:
            break
        if len(going) < len(running):
            keep = torch.tensor(going)
            running = [running[i] for i in going]
            tokens, positions = tokens[keep], positions[keep]
            caches = [KeyValues(cache.keys[keep], cache.values[keep]) for cache in caches]
        logits, routing = model.step(tokens, positions, caches, step % model.shape.window)
        positions = positions + 1
        for sample, row in zip(running, _rows(routing), strict=True):
            sample.new_rows.append(row)
    return samples


def _ended(sample: _Sample, max_new: int) -> bool:
    count = len(sample.new_tokens)
    return count == max_new or (count >= max_new // 4 and sample.new_tokens[-2:] == corpus.STOP)


def _reproduced(model: Model, sample: _Sample) -> float:
    """Compare what was recorded token by token, from the KV cache, with one forward pass over all tokens."""
    _, routing, _ = model(sample.tokens[None, :-1])
    sampled = slice(len(sample.prompt), None)
    return float((_rows(routing)[sampled] == sample.routed_experts()[sampled]).float().mean())


def rollout(channel: Channel, name: str, task: RolloutTask) -> None:
    """The process: replies with a :class:`RolloutResult`."""
    model = Model(task.shape)
    model.load_state_dict(torch.load(task.weights, weights_only=True))
    model.eval()
    text = corpus.load()
    cutter = torch.Generator().manual_seed(task.seed)
    handles: dict[str, tracefile.LazyRoutedExperts] = {}
    files: list[str] = []
    generated, write_s, reproduced = 0, 0.0, 1.0
    writer = tracefile.TraceWriter(
        task.trace_path,
        num_layers=task.shape.num_layers,
        top_k=task.shape.top_k,
        num_experts=task.shape.num_experts,
        layer_ids=task.shape.layer_ids,
    )
    with torch.inference_mode(), writer:
        group = max((len(prompt.sample_ids) for prompt in task.prompts), default=1)
        per_batch = max(1, BATCH_SAMPLES // group)
        for start in range(0, len(task.prompts), per_batch):
            batch = task.prompts[start : start + per_batch]
            cuts = [(prompt, corpus.cut(text, prompt.length, cutter)) for prompt in batch]
            samples = generate(model, cuts, task.max_new, cutter)
            if not start:
                reproduced = _reproduced(model, max(samples, key=lambda sample: len(sample.new_tokens)))
            payload = {sample.sample_id: sample.routed_experts() for sample in samples}
            began = time.perf_counter()
            for sample_id, routed_experts in payload.items():
                handles[sample_id] = writer.append(sample_id, routed_experts)
            write_s += time.perf_counter() - began
            files.append(os.path.join(task.payload_path, f"{name}-{len(files)}.pt"))
            torch.save(payload, files[-1])
            generated += sum(len(sample.new_tokens) for sample in samples)
            channel.progress(f"{len(handles)} samples, {generated} tokens sampled")
    channel.reply(RolloutResult(handles, files, generated, write_s, reproduced))
