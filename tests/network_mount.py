"""A directory mounted through sshfs, a real network file system, over a link that takes its time and counts.

sshfs speaks SFTP with OpenSSH's sftp-server; between the two runs this file as a process of its own, which delays
every message and counts what is asked for. Each mount is a node: what one has cached, another does not know of.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
from queue import SimpleQueue
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import BinaryIO

_SERVERS = ("/usr/lib/openssh/sftp-server", "/usr/libexec/openssh/sftp-server", "/usr/lib/ssh/sftp-server")
_READ, _DATA = 5, 103  # SFTP's SSH_FXP_READ and SSH_FXP_DATA
_COUNTS = struct.Struct("<QQQ")  # messages to the server, READs among them, bytes of data that came back


def sftp_server() -> str | None:
    return next(filter(os.path.exists, _SERVERS), None)


def why_not() -> str:
    """Why nothing can be mounted here; empty where it can be tried."""
    if shutil.which("sshfs") is None or sftp_server() is None:
        return "sshfs and openssh-sftp-server are not installed"
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "/dev/fuse is not accessible"
    return ""


class Mount:
    """A mounted directory."""

    def __init__(self, path: str, counts: mmap.mmap, server: subprocess.Popen[bytes]) -> None:
        self.path = path
        self._counts = counts
        self._server = server

    def counts(self) -> tuple[int, int, int]:
        """Messages sent, reads among them, and bytes of data received, since it was mounted."""
        messages, reads, nbytes = _COUNTS.unpack_from(self._counts)
        return messages, reads, nbytes

    def quiet_counts(self) -> tuple[int, int, int]:
        """The counts once nothing is under way: the kernel closes files after it has returned from doing so."""
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            counts = self.counts()
            time.sleep(0.25)
            if self.counts() == counts:
                return counts
        raise TimeoutError(f"messages keep going to {self.path}")

    def fail(self) -> None:
        """Have the server die."""
        self._server.send_signal(signal.SIGUSR1)


@contextlib.contextmanager
def mounted(directory: str, at: str, *, delay: float, cache_seconds: float = 1.0) -> Iterator[Mount]:
    """Mount ``directory`` at ``at``; each message takes ``delay`` seconds, names and attributes are cached."""
    os.makedirs(at, exist_ok=True)
    counts_path = at.rstrip("/") + ".counts"
    with open(counts_path, "wb") as file:
        file.truncate(_COUNTS.size)
    with open(counts_path, "r+b") as file:
        counts = mmap.mmap(file.fileno(), _COUNTS.size)
    relay = subprocess.Popen(
        [sys.executable, __file__, str(delay), counts_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    options = f"passive,dcache_timeout={cache_seconds},attr_timeout={cache_seconds},entry_timeout={cache_seconds}"
    file_system = subprocess.Popen(
        ["sshfs", "-f", "-o", options, f"node:{directory}", at],
        stdin=relay.stdout,
        stdout=relay.stdin,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 20
        while not os.path.ismount(at):
            if file_system.poll() is not None or time.monotonic() > deadline:
                raise OSError(f"sshfs did not mount {at}")
            time.sleep(0.02)
        yield Mount(at, counts, relay)
    finally:
        subprocess.run(["fusermount3", "-u", "-z", at], check=False, stderr=subprocess.DEVNULL)
        for process in (file_system, relay):
            process.terminate()
            process.wait(10)
        for pipe in (relay.stdin, relay.stdout):
            assert pipe is not None
            pipe.close()
        counts.close()


def _pump(source: BinaryIO, sink: BinaryIO, delay: float, count: object) -> None:
    """Pass on messages, each ``delay`` seconds later than it came, in order, however many are under way."""
    waiting: SimpleQueue[tuple[float, bytes]] = SimpleQueue()

    def deliver() -> None:
        while True:
            due, message = waiting.get()
            time.sleep(max(0.0, due - time.monotonic()))
            if not message:
                sink.close()
                return
            with contextlib.suppress(BrokenPipeError):
                sink.write(message)
                sink.flush()

    threading.Thread(target=deliver, daemon=True).start()
    while True:
        head = source.read(4)
        message = head + source.read(int.from_bytes(head, "big")) if len(head) == 4 else b""
        if message:
            count(message)  # type: ignore[operator]
        waiting.put((time.monotonic() + delay, message))
        if not message:
            return


def _relay(delay: float, counts_path: str) -> None:
    server = sftp_server()
    assert server is not None
    process = subprocess.Popen([server], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    signal.signal(signal.SIGUSR1, lambda *_: process.kill())
    signal.signal(signal.SIGTERM, lambda *_: (process.kill(), os._exit(0)))
    with open(counts_path, "r+b") as file:
        counts = mmap.mmap(file.fileno(), _COUNTS.size)
    messages = reads = nbytes = 0

    def count(message: bytes) -> None:
        nonlocal messages, reads, nbytes
        messages += message[4] < 100
        reads += message[4] == _READ
        nbytes += len(message) - 13 if message[4] == _DATA else 0
        _COUNTS.pack_into(counts, 0, messages, reads, nbytes)

    out = os.fdopen(1, "wb")  # unlike sys.stdout.buffer, it can be closed
    # Half of the delay each way.
    back = threading.Thread(target=_pump, args=(process.stdout, out, delay / 2, count))
    back.start()
    _pump(sys.stdin.buffer, process.stdin, delay / 2, count)
    back.join()


if __name__ == "__main__":
    _relay(float(sys.argv[1]), sys.argv[2])
