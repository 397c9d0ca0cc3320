"""The demo's command line."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import sys
import tempfile
import time
from typing import NoReturn

from rich.console import Console
from rich.markup import escape

from demo_job import figure, job, report
from demo_job.processes import ChildFailed, prepare


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="tools/demo",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        description="Trains a small MoE model, lets two rollout processes write its routing into one trace, and eight"
        " learner ranks read it: once from the whole payload, as frameworks do today, and once through tracefile."
        " Compares the results bit for bit, and the memory of the ranks.",
    )
    sizes = parser.add_argument_group("sizes (the payload is samples x tokens x layers x top-k x 4 bytes)")
    sizes.add_argument("--samples", type=int, default=96, help="samples over all prompts")
    sizes.add_argument("--tokens", type=int, default=4096, help="longest sample; prompts take 3/4 and more of it")
    sizes.add_argument("--layers", type=int, default=24, help="MoE layers; a dense first layer comes on top")
    sizes.add_argument("--top-k", type=int, default=8, help="experts per token and layer")
    sizes.add_argument("--experts", type=int, default=64, help="experts per layer")
    sizes.add_argument("--group", type=int, default=16, help="samples per prompt")
    sizes.add_argument("--microbatch", type=int, default=8, help="samples per microbatch of the learner")
    training = parser.add_argument_group("training")
    training.add_argument("--train-steps", type=int, default=48, help="steps")
    training.add_argument("--train-seconds", type=float, default=20.0, help="stop training after this long")
    parser.add_argument("--seed", type=int, default=0, help="of weights, text, sampling and order")
    parser.add_argument("--out", default="demo-out", metavar="DIR", help="where memory.png goes, and files underway")
    parser.add_argument("--keep", action="store_true", help="keep the trace, the payload files and the weights")
    options = parser.parse_args(arguments)
    least = {"samples": 1, "tokens": 256, "layers": 1, "top_k": 1, "experts": 2, "group": 1, "microbatch": 1}
    for name, lowest in least.items():
        if getattr(options, name) < lowest:
            parser.error(f"--{name.replace('_', '-')} must be at least {lowest}")
    if options.top_k > options.experts:
        parser.error("--top-k cannot exceed --experts")
    return options


def run(arguments: argparse.Namespace, work: str, progress: Console) -> None:
    """Everything, with files underway in ``work``; prints the result."""
    began = time.monotonic()
    names = job.Options.__dataclass_fields__
    options = job.Options(**{name: value for name, value in vars(arguments).items() if name in names})

    def say(text: str) -> None:
        progress.print(f"[dim]{time.monotonic() - began:6.1f} s[/]  {text}", highlight=False, soft_wrap=True)

    picture = os.path.join(arguments.out, "memory.png")
    with contextlib.suppress(FileNotFoundError):
        os.unlink(picture)  # an earlier run's must not pass for this one's if this one fails
    job.check_room(options)
    prepare("demo_job.learner")
    say("training a small MoE model on Python's language reference")
    trained = job.run_training(options, lambda text: say(f"  {text}"))
    say("two rollout processes: prefill, sample, write the trace")
    rollouts = job.run_rollouts(options, trained, work, lambda text: say(f"  {text}"))
    say("eight learner ranks, the whole payload in each")
    eager = job.run_pass(options, rollouts, lazy=False)
    say("eight learner ranks, through tracefile")
    lazy = job.run_pass(options, rollouts, lazy=True)
    job.check_same(eager, lazy)
    figure.save(picture, eager, lazy, rollouts.payload_bytes)
    say("done")

    output = Console()
    if not output.is_terminal:
        output.width = 110
    output.print(report.training_line(trained), highlight=False)
    output.print(report.rollout_line(options, rollouts), highlight=False)
    output.print()
    output.print(report.table(rollouts, eager, lazy))
    output.print()
    output.print(report.sentence(eager, lazy), highlight=False)
    output.print(f"Memory over time: {escape(picture)}", highlight=False, soft_wrap=True)


def main() -> int:
    arguments = parse()
    progress = Console(stderr=True)

    def terminate(*_: object) -> NoReturn:
        raise SystemExit(128 + signal.SIGTERM)

    signal.signal(signal.SIGTERM, terminate)
    work = ""
    try:
        os.makedirs(arguments.out, exist_ok=True)
        work = tempfile.mkdtemp(prefix="run-", dir=arguments.out)
        run(arguments, work, progress)
    except (job.DemoFailed, ChildFailed, OSError) as error:
        progress.print(f"[bold red]demo failed:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        progress.print("interrupted")
        return 128 + signal.SIGINT
    finally:
        if arguments.keep:
            progress.print(f"kept: {escape(work)}", highlight=False, soft_wrap=True)
        elif work:
            shutil.rmtree(work, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
