"""Requests to object stores, from any thread: one obstore client a bucket, one event loop a process.

obstore retries what fails on the way: connections, 5xx answers, timeouts. What it can't know is asked for again
here: an answer that is shorter than what was asked for. Everything ends within ``retry_timeout``.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import errno
import functools
import pathlib
import re
import sys
import threading
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from tracefile.errors import StoreError
from tracefile.forking import tell_after_fork
from tracefile.object_library import first_line, load_obstore, new_store, time_limit
from tracefile.settings import on_change

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping, Sequence
    from concurrent.futures import Future

    from tracefile.object_library import Obstore

T = TypeVar("T")

#: How often an answer that is shorter than it must be is asked for again before that is reported.
_TRIES = 3
#: Requests under way at once, of a process.
_CONCURRENCY = 64
_DELETED_AT_ONCE = 500
_PART_BYTES = 8 * 1024 * 1024
_PARTS_AT_ONCE = 4


class Place(NamedTuple):
    """Where an object is: ``scheme://bucket`` (or container, or host), and its key."""

    bucket: str
    key: str

    @classmethod
    def of(cls, url: str) -> Place:
        """
        >>> Place.of("s3://traces/run-1/step_1.trace")
        Place(bucket='s3://traces', key='run-1/step_1.trace')
        """
        scheme, _, rest = url.partition("://")
        bucket, _, key = rest.partition("/")
        return cls(f"{scheme}://{bucket}", key)

    def __str__(self) -> str:
        return f"{self.bucket}/{self.key}"


class Fetched(NamedTuple):
    """Bytes of an object, and the size of the whole of it."""

    data: memoryview
    size: int


class Listed(NamedTuple):
    """An object that was listed: its name, its bytes, and when it was put, in seconds since the epoch."""

    name: str
    nbytes: int
    changed: float


class ObjectMoved(Exception):
    """An object has another size than it was published with: the argument."""


class ObjectClient:
    """All requests of a process. Nothing is imported or started before the first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stale = False
        self._obstore: Obstore | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._slots: asyncio.Semaphore | None = None
        self._stores: dict[str, Any] = {}
        tell_after_fork(self)
        on_change(self._stores.clear)  # to be made with the options that hold then
        atexit.register(self._stop)

    def after_fork(self) -> None:
        self._lock = threading.Lock()
        self._stale = self._stale or "obstore._obstore" in sys.modules
        self._obstore = self._loop = self._thread = self._slots = None
        self._stores.clear()

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Have the process's event loop do some work."""
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._slots = asyncio.Semaphore(_CONCURRENCY)
                self._thread = threading.Thread(
                    target=self._loop.run_forever, name="tracefile-object-store", daemon=True
                )
                self._thread.start()
            loop = self._loop
        return asyncio.run_coroutine_threadsafe(work, loop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Have the process's event loop do some work, and wait for it."""
        future = self.start(work)
        try:
            return future.result()
        finally:
            future.cancel()  # for who is interrupted

    def _stop(self) -> None:
        loop, thread = self._loop, self._thread
        if loop is None or thread is None:
            return

        def cancel() -> None:
            for task in asyncio.all_tasks(loop):
                task.cancel()
            loop.call_soon(loop.stop)

        loop.call_soon_threadsafe(cancel)
        thread.join(1)

    def obstore(self) -> Obstore:
        """obstore's modules; see :func:`tracefile.object_library.load_obstore`."""
        with self._lock:
            if self._obstore is None:
                self._obstore = load_obstore(stale=self._stale)
            return self._obstore

    def _store(self, bucket: str) -> Any:
        """obstore's client of a bucket."""
        found = self._stores.get(bucket)
        if found is None:
            found = self._stores[bucket] = new_store(self.obstore(), bucket)
        return found

    async def _ask(
        self, where: Place, request: Callable[[Obstore, Any], Coroutine[Any, Any, T]], *, limited: bool = True
    ) -> T:
        """One request, within its time and its turn; errors as an OSError, but for those of no request."""
        obstore, store = self.obstore(), self._store(where.bucket)
        exceptions = obstore.exceptions
        assert self._slots is not None
        async with self._slots:
            try:
                async with asyncio.timeout(time_limit() if limited else None):
                    return await request(obstore, store)
            except FileNotFoundError:
                raise FileNotFoundError(errno.ENOENT, "no such object", str(where)) from None
            except TimeoutError:
                raise _no_answer(where, f"nothing within {time_limit():g} s", 1) from None
            except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError) as error:
                raise StoreError(
                    f"{where}: the store refuses these credentials ({first_line(error)}); see what the environment"
                    " or object_store_options give obstore",
                    path=str(where),
                    attempts=1,
                    errno=errno.EACCES,
                ) from error
            except (exceptions.NotSupportedError, exceptions.InvalidPathError, NotImplementedError) as error:
                raise StoreError(
                    f"{where}: this store cannot do that ({first_line(error)})", path=str(where), attempts=1
                ) from error
            except exceptions.GenericError as error:
                tries = re.search(r"after (\d+) retries", why := first_line(error))
                raise _no_answer(where, why, 1 + int(tries[1]) if tries else 1) from error

    async def get(self, url: str, start: int = 0, stop: int | None = None, *, size: int | None = None) -> Fetched:
        """Bytes ``[start, stop)`` of an object, by default all.

        Parameters
        ----------
        size : int, optional
            What the object must have; with it, less than what was asked for is no answer.

        Raises
        ------
        FileNotFoundError
        ObjectMoved
            It has another size.
        StoreError
        """
        where = Place.of(url)
        options = None if stop is None else {"range": (start, stop)}

        async def once(obstore: Obstore, store: Any) -> Fetched:
            for _ in range(_TRIES):
                result = await obstore.package.get_async(store, where.key, options=options)
                whole = int(result.meta["size"])
                if size is not None and whole != size:
                    raise ObjectMoved(whole)
                wanted = (whole if stop is None else min(stop, whole)) - start
                try:
                    data = memoryview(await result.bytes_async())
                except obstore.exceptions.GenericError as error:
                    why = first_line(error)
                else:
                    if len(data) == wanted:
                        return Fetched(data, whole)
                    why = f"it sent {len(data)} bytes where {wanted} were asked for"
            raise _no_answer(where, why, _TRIES)

        try:
            return await self._ask(where, once)
        except StoreError as error:
            # A range beyond the end of what an object has become is refused without its size being told.
            if size is not None and "416" in error.message and (actual := await self.size(url)) != size:
                raise ObjectMoved(actual) from None
            raise

    async def get_all(self, urls: Sequence[str], nbytes: int | None = None) -> list[bytes | OSError]:
        """Whole objects, or what kept each from being read."""

        async def one(url: str) -> bytes | OSError:
            try:
                return bytes((await self.get(url, 0, nbytes)).data)
            except OSError as error:
                return error

        return await asyncio.gather(*map(one, urls))

    async def stat(self, url: str) -> Listed:
        where = Place.of(url)
        return _listed(url, await self._ask(where, lambda obstore, store: obstore.package.head_async(store, where.key)))

    async def size(self, url: str) -> int:
        return (await self.stat(url)).nbytes

    async def sizes(self, urls: Sequence[str]) -> list[int | OSError]:
        """Sizes of objects, or what kept each from being known."""

        async def one(url: str) -> int | OSError:
            try:
                return await self.size(url)
            except OSError as error:
                return error

        return await asyncio.gather(*map(one, urls))

    async def exist(self, urls: Sequence[str]) -> list[bool]:
        """Which objects there are."""
        found = await self.sizes(urls)
        for each in found:
            if isinstance(each, OSError) and not isinstance(each, FileNotFoundError):
                raise each
        return [isinstance(each, int) for each in found]

    async def put(self, url: str, data: bytes) -> None:
        where = Place.of(url)
        await self._ask(where, lambda obstore, store: obstore.package.put_async(store, where.key, data))

    async def put_file(self, url: str, path: str) -> None:
        """Upload a file, in parts where it is large; a few parts of it are in memory at once."""
        where, file = Place.of(url), pathlib.Path(path)
        await self._ask(
            where,
            lambda obstore, store: obstore.package.put_async(
                store, where.key, file, chunk_size=_PART_BYTES, max_concurrency=_PARTS_AT_ONCE
            ),
            limited=False,  # it takes as long as it takes; each part has its time
        )

    async def put_new(self, url: str, data: bytes) -> bool:
        """Write an object unless there is one; ``False`` if there is."""
        where = Place.of(url)
        exists = self.obstore().exceptions.AlreadyExistsError

        async def once(obstore: Obstore, store: Any) -> bool:
            try:
                await obstore.package.put_async(store, where.key, data, mode="create")
            except exists:
                return False
            return True

        if await self._ask(where, once):
            return True
        try:
            return (await self.get(url)).data == data  # ours, where the first answer was lost
        except FileNotFoundError:
            return False  # removed since

    async def directories(self, url: str) -> list[str]:
        """The names right below ``url`` that have objects below them."""
        where = Place.of(url)
        found = await self._ask(
            where, lambda obstore, store: obstore.package.list_with_delimiter_async(store, where.key)
        )
        return [prefix.rstrip("/").rpartition("/")[2] for prefix in found["common_prefixes"]]

    async def list(self, url: str, limit: int | None = None) -> list[Listed]:
        """The objects below ``url``, by names relative to it."""
        where = Place.of(url)

        async def once(obstore: Obstore, store: Any) -> list[Listed]:
            found: list[Listed] = []
            above = len(where.key.split("/"))
            async for batch in obstore.package.list(store, prefix=where.key, chunk_size=limit or 1000):
                found += (_listed("/".join(meta["path"].split("/")[above:]), meta) for meta in batch)
                if limit is not None and len(found) >= limit:
                    break
            return found

        return await self._ask(where, once)

    async def delete(self, urls: Sequence[str]) -> None:
        """Delete objects, whether there are any or not."""
        for first in range(0, len(urls), _DELETED_AT_ONCE):
            keys = [Place.of(url).key for url in urls[first : first + _DELETED_AT_ONCE]]
            await self._ask(Place.of(urls[first]), functools.partial(_delete, keys))


async def _delete(keys: Sequence[str], obstore: Obstore, store: Any) -> None:
    try:
        await obstore.package.delete_async(store, keys)
    except FileNotFoundError:  # of one of them; the others may be there still
        for key in keys if len(keys) > 1 else ():
            with contextlib.suppress(FileNotFoundError):
                await obstore.package.delete_async(store, [key])


def _listed(name: str, meta: Mapping[str, Any]) -> Listed:
    return Listed(name, int(meta["size"]), meta["last_modified"].timestamp())


def _no_answer(where: Place, why: str, attempts: int) -> StoreError:
    return StoreError(
        f"{where}: the object store does not answer, or wrongly ({why}); see whether it is up and what it says, then"
        " try again",
        path=str(where),
        attempts=attempts,
        errno=errno.EIO,
    )


#: The requests of this process.
client = ObjectClient()
