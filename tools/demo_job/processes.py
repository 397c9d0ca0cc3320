"""Child processes that start together, report, and never outlive the parent.

A child is a function that gets a :class:`Channel`. The parent waits for all children at once, so that the death
of one is noticed at once, whatever the others do.

Children are spawned, or forked from a server that has imported what they need and done nothing else: sixteen
ranks that each import torch would take most of the demo's time.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import traceback
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from multiprocessing.process import BaseProcess
    from types import TracebackType

_ENVIRONMENT = {
    # Children share the cores among themselves: one thread each. Read when they import torch and tracefile.
    "OMP_NUM_THREADS": "1",
    "TRACEFILE_DECODE_THREADS": "1",
    # numcodecs makes a semaphore per process; killed processes leave theirs to multiprocessing's tracker, which
    # removes them, but not without a warning.
    "PYTHONWARNINGS": "ignore:resource_tracker:UserWarning",
}


class ChildFailed(RuntimeError):
    """A child process raised, was killed or exited before its time."""


@dataclass(frozen=True, slots=True)
class _Progress:
    text: str


@dataclass(frozen=True, slots=True)
class _Failure:
    text: str


class Channel:
    """A child's line to its parent."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def progress(self, text: str) -> None:
        """Something to show while the parent waits."""
        self._connection.send(_Progress(text))

    def reply(self, value: object) -> None:
        self._connection.send(value)

    def receive(self) -> Any:
        """What the parent says next; blocks."""
        return self._connection.recv()


@contextlib.contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Start processes inside: a blocked signal stays blocked in a child.

    Ctrl-C, which the terminal sends to every process of the job, is then the parent's to handle.
    """
    unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)


def prepare(*modules: str) -> None:
    """Set the environment of children, and have the fork server import ``modules`` in the background."""
    os.environ.update(_ENVIRONMENT)
    resource_tracker.ensure_running()  # first: starting it unblocks what is blocked
    with _interrupts_blocked():
        forkserver.set_forkserver_preload(list(modules))
        forkserver.ensure_running()


def _child(connection: Connection, target: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    try:
        target(Channel(connection), *arguments)
    except (EOFError, BrokenPipeError):
        return  # the parent needs no more, or is gone
    except BaseException:
        connection.send(_Failure(traceback.format_exc()))
        raise SystemExit(1) from None


class Team:
    """Some children, each with a name; leaving the context ends them, by force if it is left with an error.

    Parameters
    ----------
    target : callable
        Runs in each child as ``target(channel, *arguments)``.
    members : mapping
        Arguments of each child by its name.
    method : {"spawn", "forkserver"}
    progress : callable
        Gets the name of a child and what it has to show.
    """

    def __init__(
        self,
        target: Callable[..., None],
        members: Mapping[str, tuple[Any, ...]],
        *,
        method: Literal["spawn", "forkserver"],
        progress: Callable[[str, str], None] = lambda name, text: None,
    ) -> None:
        self._progress = progress
        self._processes: dict[str, BaseProcess] = {}
        self._connections: dict[str, Connection] = {}
        spawned = method == "spawn"
        context = multiprocessing.get_context("spawn") if spawned else multiprocessing.get_context("forkserver")
        try:
            with _interrupts_blocked():
                for name, arguments in members.items():
                    ours, theirs = context.Pipe()
                    process = context.Process(target=_child, args=(theirs, target, arguments), name=name, daemon=True)
                    self._processes[name], self._connections[name] = process, ours
                    process.start()
                    theirs.close()
        except BaseException:
            self.kill()
            raise

    @property
    def pids(self) -> dict[str, int]:
        return {name: process.pid for name, process in self._processes.items() if process.pid is not None}

    def tell(self, message: object) -> None:
        """Send the same to every child."""
        for name, connection in self._connections.items():
            try:
                connection.send(message)
            except BrokenPipeError:
                raise self._died(name) from None

    def replies(self) -> dict[str, Any]:
        """Wait for one reply of each child.

        Raises
        ------
        ChildFailed
            One of them raised, was killed or exited instead.
        """
        waiting = dict(self._connections)
        replies: dict[str, Any] = {}
        names = {id(connection): name for name, connection in self._connections.items()}
        while waiting:
            for connection in wait(list(waiting.values())):
                name = names[id(connection)]
                try:
                    message = waiting[name].recv()
                except (EOFError, ConnectionResetError):
                    raise self._died(name) from None
                if isinstance(message, _Failure):
                    raise ChildFailed(f"{name} failed:\n{message.text}")
                if isinstance(message, _Progress):
                    self._progress(name, message.text)
                else:
                    replies[name] = message
                    del waiting[name]
        return replies

    def _died(self, name: str) -> ChildFailed:
        process = self._processes[name]
        process.join(5)
        code = process.exitcode
        how = f"was killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"exited with {code}"
        return ChildFailed(f"{name} (process {process.pid}) {how}")

    def kill(self) -> None:
        for process in self._processes.values():
            if process.pid is not None:
                process.kill()
        for process in self._processes.values():
            if process.pid is not None:
                process.join()
        for connection in self._connections.values():
            connection.close()

    def __enter__(self) -> Team:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            for connection in self._connections.values():
                connection.close()  # a child that waits for more takes that as the end
            for process in self._processes.values():
                process.join(5)
        self.kill()
