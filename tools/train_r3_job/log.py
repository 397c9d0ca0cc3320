"""Where a run's numbers go: a file of JSON lines, and TensorBoard or Weights & Biases where they are installed."""

from __future__ import annotations

import importlib.util
import json
import math
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

LOG_NAME = "log.jsonl"
#: A step's numbers by name.
Record = dict[str, float]


def read_log(path: str) -> list[Record]:
    """The records of a log, one for each step, without a last line that was cut short."""
    records: list[Record] = []
    if os.path.exists(path):
        with open(path, encoding="utf-8") as file:
            for line in file:
                if line.endswith("\n"):
                    records.append({name: _number(value) for name, value in json.loads(line).items()})
    return records


def _number(value: float | None) -> float:
    return math.nan if value is None else value


class Log:
    """Takes each step's record.

    Parameters
    ----------
    directory : str
        Gets ``log.jsonl``, and ``tensorboard/`` if TensorBoard is installed.
    keep : list of dict
        Records of an earlier run that this one continues.
    wandb_project : str, optional
        Also log there.

    Attributes
    ----------
    path : str
    tensorboard : str or None
        TensorBoard's directory, if it is installed.
    """

    def __init__(self, directory: str, keep: list[Record], wandb_project: str | None = None) -> None:
        self.path = os.path.join(directory, LOG_NAME)
        self.tensorboard: str | None = None
        self._board: Any = None
        self._wandb: Any = None
        if wandb_project is not None:
            import wandb  # type: ignore[import-not-found, unused-ignore]

            self._wandb = wandb.init(project=wandb_project, dir=directory)
        if importlib.util.find_spec("tensorboard") is not None:
            from torch.utils.tensorboard import SummaryWriter

            self.tensorboard = os.path.join(directory, "tensorboard")
            self._board = SummaryWriter(self.tensorboard, purge_step=len(keep))
        self._file = open(self.path, "w", encoding="utf-8")  # noqa: SIM115 - closed with the log
        for record in keep:
            self._write(record)

    def _write(self, record: Mapping[str, float]) -> None:
        known = {name: None if math.isnan(value) else value for name, value in record.items()}
        self._file.write(json.dumps(known) + "\n")
        self._file.flush()

    def add(self, step: int, record: Mapping[str, float]) -> None:
        self._write(record)
        known = {name: value for name, value in record.items() if not math.isnan(value)}
        if self._board is not None:
            for name, value in known.items():
                self._board.add_scalar(name, value, step)
        if self._wandb is not None:
            self._wandb.log(known, step=step)

    def __enter__(self) -> Log:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()
        if self._wandb is not None:
            self._wandb.finish()
