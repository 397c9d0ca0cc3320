"""A whole RL step on a trace, fifty times: .venv/bin/python tools/train_r3.py [--help]"""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
import time
from enum import StrEnum
from functools import partial
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.markup import escape

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)
_rl, _rollouts, _ranks, _model, _files = (
    partial(typer.Option, rich_help_panel=panel) for panel in ("RL", "Rollouts", "Learner ranks", "Model", "Files")
)


class Mode(StrEnum):
    """Whether rollouts wait for the learner."""

    sync = "sync"
    asynchronous = "async"


class Dtype(StrEnum):
    """Of rollout weights."""

    bfloat16 = "bfloat16"
    float32 = "float32"


class ContextLayout(StrEnum):
    """Which rows a context parallel rank has."""

    zigzag = "zigzag"
    contiguous = "contiguous"


class Routing(StrEnum):
    """Where the learner's routers get their experts from."""

    tracefile = "tracefile"
    eager = "eager"
    native = "native"


@app.command()
def train(
    steps: Annotated[int, _rl(min=1, help="RL steps.")] = 50,
    prompts: Annotated[int, _rl(min=1, help="Prompts of a step.")] = 16,
    group: Annotated[int, _rl(min=2, help="Sessions of each prompt.")] = 8,
    turns: Annotated[int, _rl(min=1, max=16, help="Answers in a session.")] = 2,
    largest: Annotated[int, _rl(min=1, max=999, help="The largest number to add.")] = 9,
    warmup_steps: Annotated[
        int, _rl(min=0, help="Supervised steps before RL: untrained, no answer is ever right.")
    ] = 150,
    learning_rate: Annotated[float, _rl(help="Of RL (AdamW).")] = 1e-3,
    clip: Annotated[float, _rl(help="Importance ratios are clipped to 1 +- this.")] = 0.2,
    seed: Annotated[int, _rl(min=0, help="Of everything. With --mode sync, the same seed gives the same run.")] = 0,
    mode: Annotated[
        Mode, _rollouts(help="async: the next step's rollouts begin while this one trains, with older weights.")
    ] = Mode.asynchronous,
    workers: Annotated[int, _rollouts(min=1, help="Ray actors that roll out.")] = 2,
    rollout_dtype: Annotated[Dtype, _rollouts(help="Of rollout weights; the learner's are float32.")] = Dtype.bfloat16,
    router_noise: Annotated[
        float, _rollouts(min=0, help="Noise on the logits of rollout routers, so that they choose otherwise.")
    ] = 0.05,
    routing: Annotated[
        Routing,
        _ranks(help="tracefile: each rank's rows, from the trace; eager: all of it to every rank; native: no replay."),
    ] = Routing.tracefile,
    dp: Annotated[int, _ranks(min=1, help="Data parallel size.")] = 1,
    cp: Annotated[int, _ranks(min=1, help="Context parallel size.")] = 2,
    sp: Annotated[int, _ranks(min=1, help="Sequence parallel size. Ranks are dp x cp x sp.")] = 2,
    cp_layout: Annotated[ContextLayout, _ranks(help="Which rows a context parallel rank has.")] = ContextLayout.zigzag,
    pack_tokens: Annotated[int, _ranks(min=1, help="The most tokens of a microbatch.")] = 768,
    checkpointing: Annotated[bool, _ranks(help="Recompute activations in the backward.")] = True,
    layers: Annotated[int, _model(min=1, help="MoE layers.")] = 3,
    experts: Annotated[int, _model(min=2, help="Experts of each.")] = 8,
    top_k: Annotated[int, _model(min=1, help="Experts that a token goes through.")] = 2,
    dense_first: Annotated[bool, _model(help="A dense layer before the MoE layers.")] = True,
    out: Annotated[str, _files(help="Directory of the log, the plot, the traces and the checkpoint.")] = "train-r3-out",
    resume: Annotated[
        bool, _files("--resume", help="Go on with the run in --out, from the step where it ended.")
    ] = False,
    keep_traces: Annotated[bool, _files("--keep-traces", help="Keep every step's trace, not the last two.")] = False,
    wandb: Annotated[str | None, _files(metavar="PROJECT", help="Also log to Weights & Biases.")] = None,
) -> None:
    """Train a small MoE model by RL to add numbers, with its rollouts' routing replayed from a trace.

    Ray actors sample groups of sessions and write the experts that they used with `tracefile.TraceWriter`. Learner
    ranks (torch.distributed, context and sequence parallel) read only their own rows of it through
    `tracefile.MicrobatchLoader`, for the forward and again for the recompute, and send their weights back.
    """
    if top_k > experts:
        raise typer.BadParameter(f"{top_k} of {experts} experts", param_hint="--top-k")
    if learning_rate <= 0:
        raise typer.BadParameter("must be positive", param_hint="--learning-rate")
    if not 0 < clip < 1:
        raise typer.BadParameter("must lie between 0 and 1", param_hint="--clip")
    if workers > prompts:
        raise typer.BadParameter(f"{workers} workers share {prompts} prompts", param_hint="--workers")
    if dp * cp * sp > 64:
        raise typer.BadParameter(
            f"{dp} x {cp} x {sp} are {dp * cp * sp} ranks; at most 64", param_hint="--dp/--cp/--sp"
        )
    for module, why in (("ray", "rollouts (pip install 'tracefile[ray]')"), ("wandb", "--wandb (pip install wandb)")):
        if (module != "wandb" or wandb is not None) and importlib.util.find_spec(module) is None:
            raise typer.BadParameter(f"{module} is not installed; it is needed for {why}")
    console = Console(stderr=True)
    console.print("[dim]importing torch[/]")

    from demo_job.processes import ChildFailed, prepare
    from train_r3_job import cluster, job, report
    from train_r3_job.model import ModelShape
    from train_r3_job.parallel import Layout
    from train_r3_job.step import StepOptions
    from train_r3_job.task import ALPHABET

    options = job.Options(
        out=out,
        steps=steps,
        prompts=prompts,
        group=group,
        turns=turns,
        largest=largest,
        mode=mode.value,
        workers=workers,
        shape=ModelShape(len(ALPHABET), layers, experts, top_k, dense_first),
        layout=Layout(dp, cp, sp, cp_layout.value),
        step=StepOptions(pack_tokens, clip, routing.value, checkpointing),
        learning_rate=learning_rate,
        warmup_steps=warmup_steps,
        rollout_dtype=rollout_dtype.value,
        noise=router_noise,
        seed=seed,
        keep_traces=keep_traces,
        wandb_project=wandb,
    )

    def terminate(*_: object) -> NoReturn:
        raise SystemExit(128 + signal.SIGTERM)

    signal.signal(signal.SIGTERM, terminate)
    began = time.monotonic()
    try:
        with cluster.importable():
            prepare("train_r3_job.learner")
        with report.Shown(console, options) as progress:
            outcome = job.run(options, resume=resume, progress=progress)
        report.show(Console(), options, outcome, time.monotonic() - began)
    except (job.RunFailed, ChildFailed, cluster.RolloutsFailed, OSError) as error:
        console.print(f"[bold red]train_r3 failed:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        console.print(f"interrupted; --resume goes on with it, once the warm-up is done: {escape(out)}", soft_wrap=True)
        raise typer.Exit(128 + signal.SIGINT) from None


if __name__ == "__main__":
    app(prog_name="tools/train_r3.py")
