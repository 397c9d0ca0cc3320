"""A server that speaks S3, and a proxy before it that adds latency, counts, and fails when told to."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
import uuid
import xml.etree.ElementTree as ElementTree
from typing import TYPE_CHECKING, Literal, NamedTuple

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Fault = Literal["reset", "503", "hang", "cut off", "too little"]

_SERVE = """
import sys
from moto.moto_server.threaded_moto_server import ThreadedMotoServer
server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
server.stop()
"""

#: The server does not look at signatures, but asks for one.
_HEADERS = {
    "Authorization": "AWS4-HMAC-SHA256 Credential=k/20260101/us-east-1/s3/aws4_request, SignedHeaders=h, Signature=0",
    "Content-Type": "application/octet-stream",
}


class Asked(NamedTuple):
    """A request that came through the proxy, and the bytes of content that it was answered with."""

    method: str
    key: str
    query: str
    range: str
    sent: int
    round: int


class Bucket:
    """The objects of one bucket, by key, past the proxy."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._call("PUT", "")

    def _call(self, method: str, key: str, data: bytes | None = None, query: str = "") -> bytes:
        url = f"{self._url}/{urllib.parse.quote(key)}{query}"
        request = urllib.request.Request(url, data=data, method=method, headers=_HEADERS)
        try:
            with urllib.request.urlopen(request, timeout=30) as response:
                found: bytes = response.read()
                return found
        except urllib.error.HTTPError as error:
            with error:
                raise KeyError(f"{method} {key}: {error.code}") from None

    def __getitem__(self, key: str) -> bytes:
        return self._call("GET", key)

    def __setitem__(self, key: str, data: bytes) -> None:
        self._call("PUT", key, data)

    def __delitem__(self, key: str) -> None:
        self._call("DELETE", key)

    def names(self, prefix: str = "") -> list[str]:
        found: list[str] = []
        after = ""
        while True:
            query = f"?list-type=2&prefix={urllib.parse.quote(prefix)}&start-after={urllib.parse.quote(after)}"
            root = ElementTree.fromstring(self._call("GET", "", query=query))
            keys = [element.text or "" for element in root.iter() if element.tag.endswith("}Key")]
            found += keys
            if len(keys) < 1000:
                return found
            after = keys[-1]


class Proxy:
    """Passes requests on to the server.

    Attributes
    ----------
    latency : float
        Seconds added to each request.
    in_rounds : bool
        Hold what is asked until nothing more has been asked for a while, then answer it all: what had to be known
        before it could be asked is in a later round.
    asked : list of Asked
    """

    def __init__(self, upstream: int) -> None:
        self.latency = 0.0
        self.in_rounds = False
        self.asked: list[Asked] = []
        self.port = 0
        self._upstream = upstream
        self._faults: list[tuple[Callable[[str, str], bool], Fault]] = []
        self._quiet = 0.15
        self._round = 0
        self._last = 0.0
        self._waiting = 0
        self._gate: asyncio.Event | None = None
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None] | None] = set()  # nothing else holds those whose client has gone
        self._thread = threading.Thread(target=self._run, daemon=True)
        ready = threading.Event()
        self._ready = ready
        self._thread.start()
        assert ready.wait(10)

    def fail(
        self, fault: Fault, times: int = 1, *, where: Callable[[str, str], bool] = lambda method, key: True
    ) -> None:
        """Have the next ``times`` requests that ``where(method, key)`` is true of fail."""
        self._faults += [(where, fault)] * times

    def heal(self) -> None:
        self._faults.clear()

    @contextlib.contextmanager
    def counted(self) -> Iterator[list[Asked]]:
        """What is asked meanwhile."""
        found: list[Asked] = []
        before = len(self.asked)
        yield found
        found += self.asked[before:]

    @contextlib.contextmanager
    def rounds(self) -> Iterator[list[Asked]]:
        """What is asked meanwhile, in rounds."""
        self.in_rounds, self._round = True, 0
        try:
            with self.counted() as found:
                yield found
        finally:
            self.in_rounds = False

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._conditional = asyncio.Lock()
        server = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        self._loop.run_forever()
        server.close()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.close()

    async def _turn(self) -> int:
        """Wait until a request may be answered; the round that it belongs to."""
        if not self.in_rounds:
            await asyncio.sleep(self.latency)
            return self._round
        self._last = time.monotonic()
        if self._gate is None:
            self._gate = gate = asyncio.Event()
            self._round += 1
            number = self._round
            while (left := self._last + self._quiet - time.monotonic()) > 0:
                await asyncio.sleep(left)
            self._gate = None
            gate.set()
        else:
            number = self._round
            await self._gate.wait()
        return number

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        self._tasks.add(task)
        try:
            while await self._exchange(reader, writer):
                pass
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.transport.abort()
            self._tasks.discard(task)

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """One request and its answer; whether there may be another."""
        head = await reader.readuntil(b"\r\n\r\n")
        first, _, rest = head.decode("latin-1").partition("\r\n")
        method, target, _ = first.split(" ")
        headers = dict(line.split(": ", 1) for line in rest.lower().split("\r\n") if line)
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        path, _, query = target.partition("?")
        key = urllib.parse.unquote(path).lstrip("/").partition("/")[2]
        turn = await self._turn()
        fault = self._fault(method, key)
        answer = b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 4\r\n\r\nbusy"
        if fault == "hang":
            await reader.read()  # until the client gives up
        elif fault != "503" and fault != "reset":
            conditional = self._conditional if "if-none-match" in headers else contextlib.nullcontext()
            async with conditional:  # the server looks and writes, and another thread of it may do so in between
                answer = await self._forward(head, body)
        answer_head, _, content = answer.partition(b"\r\n\r\n")
        if fault == "too little":
            content = content[: len(content) // 2]
            answer_head = b"\r\n".join(
                b"content-length: %d" % len(content) if line.lower().startswith(b"content-length:") else line
                for line in answer_head.split(b"\r\n")
            )
        elif fault == "cut off":
            content = content[: len(content) // 2]
        sent = len(content) if fault in (None, "too little", "cut off") else 0
        self.asked.append(Asked(method, key, query, headers.get("range", ""), sent, turn))
        if fault in ("reset", "hang"):
            return False
        writer.write(answer_head + b"\r\n\r\n" + content)
        await writer.drain()
        return fault != "cut off"

    def _fault(self, method: str, key: str) -> Fault | None:
        for number, (where, fault) in enumerate(self._faults):
            if where(method, key):
                del self._faults[number]
                return fault
        return None

    async def _forward(self, head: bytes, body: bytes) -> bytes:
        lines = [line for line in head.split(b"\r\n") if not line.lower().startswith(b"connection:")]
        lines.insert(1, b"connection: close")
        reader, writer = await asyncio.open_connection("127.0.0.1", self._upstream)
        try:
            writer.write(b"\r\n".join(lines) + body)
            await writer.drain()
            answer = await reader.read()
        finally:
            writer.close()
        answer_head, _, content = answer.partition(b"\r\n\r\n")
        lines = [line for line in answer_head.split(b"\r\n") if not line.lower().startswith(b"connection:")]
        return b"\r\n".join(lines) + b"\r\n\r\n" + content


class S3Server:
    """The server and its proxy."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", _SERVE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())
        self.proxy = Proxy(self.port)

    @property
    def environment(self) -> dict[str, str]:
        """What leads obstore here."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.proxy.port}",
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-east-1",
        }

    def new_bucket(self) -> tuple[str, Bucket]:
        name = f"bucket-{uuid.uuid4().hex[:12]}"
        return name, Bucket(f"http://127.0.0.1:{self.port}/{name}")

    def close(self) -> None:
        self.proxy.close()
        self._process.communicate(timeout=20)


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    server = S3Server()
    yield server
    server.close()


class S3Bucket(NamedTuple):
    """A new bucket of a server that obstore finds by the environment."""

    server: S3Server
    name: str
    objects: Bucket

    @property
    def url(self) -> str:
        return f"s3://{self.name}"

    @property
    def proxy(self) -> Proxy:
        return self.server.proxy


@pytest.fixture
def bucket(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Bucket]:
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    yield S3Bucket(s3_server, *s3_server.new_bucket())
    s3_server.proxy.heal()
    s3_server.proxy.latency = 0.0
