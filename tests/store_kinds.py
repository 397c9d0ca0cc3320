"""The stores that test_stores.py runs over: one class a kind, which makes paths and gets at stored files by name."""

from __future__ import annotations

import abc
import os
import struct
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from support import in_fork

import tracefile

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import pytest
    from object_server import S3Bucket

#: The kinds, by name; a class adds itself.
KINDS: dict[str, type[StoreKind]] = {}


class StoreKind(abc.ABC):
    """One store, empty at first.

    Attributes
    ----------
    name : str
    source : str
        How traces are opened.
    """

    name: ClassVar[str]
    source: ClassVar[str] = "auto"
    #: What a fresh Python runs before it uses the store.
    prelude = ""

    def __init_subclass__(cls) -> None:
        KINDS[cls.name] = cls

    def __init__(self, request: pytest.FixtureRequest, tmp_path: Path) -> None:
        self.request = request
        self.tmp_path = tmp_path

    @abc.abstractmethod
    def path(self, name: str = "step_1.trace") -> str:
        """Where a trace may be; nothing is there."""

    @abc.abstractmethod
    def names(self, path: str) -> list[str]:
        """The files of a trace, by names relative to it, sorted."""

    @abc.abstractmethod
    def read(self, path: str, name: str) -> bytes: ...

    @abc.abstractmethod
    def write(self, path: str, name: str, data: bytes) -> None:
        """Make a file, or put another in its place."""

    @abc.abstractmethod
    def remove(self, path: str, name: str) -> None: ...

    def in_processes(self, *works: Callable[[], Any]) -> list[Any]:
        """What functions return in other processes, all at once."""
        with ThreadPoolExecutor(len(works)) as threads:
            return list(threads.map(in_fork, works))

    def close(self) -> None:  # noqa: B027 - most have nothing to do
        """Stop what was started."""

    def open(self, path: str, **options: Any) -> tracefile.Trace:
        return tracefile.open(path, source=self.source, **options)

    def writer(self, path: str, **options: Any) -> tracefile.TraceWriter:
        """A writer of small chunks, for 5 layers x top-2 of 16 experts unless said otherwise."""
        model = {"num_layers": 5, "top_k": 2, "num_experts": 16, "layers_per_chunk": 2, "rows_per_chunk": 8}
        return tracefile.TraceWriter(path, **(model | {"source": self.source} | options))


class LocalMmap(StoreKind):
    name = "local mmap"
    source = "mmap"

    def path(self, name: str = "step_1.trace") -> str:
        return str(self.tmp_path / name)

    def names(self, path: str) -> list[str]:
        found = []
        for directory, _, files in os.walk(path):
            found += [os.path.relpath(os.path.join(directory, file), path) for file in files]
        return sorted(found)

    def read(self, path: str, name: str) -> bytes:
        with open(os.path.join(path, name), "rb") as file:
            return file.read()

    def write(self, path: str, name: str, data: bytes) -> None:
        # Another file: what is mapped must not shrink.
        where = os.path.join(path, name)
        os.makedirs(os.path.dirname(where), exist_ok=True)
        with open(f"{where}.new", "wb") as file:
            file.write(data)
        os.replace(f"{where}.new", where)

    def remove(self, path: str, name: str) -> None:
        os.unlink(os.path.join(path, name))


class LocalPread(LocalMmap):
    name = "local pread"
    source = "pread"


class ObjectStore(StoreKind):
    name = "object store"

    def __init__(self, request: pytest.FixtureRequest, tmp_path: Path) -> None:
        super().__init__(request, tmp_path)
        self.bucket: S3Bucket = request.getfixturevalue("bucket")

    def path(self, name: str = "step_1.trace") -> str:
        return f"{self.bucket.url}/run/{name}"

    def _key(self, path: str, name: str = "") -> str:
        return f"{path.removeprefix(self.bucket.url + '/')}/{name}"

    def names(self, path: str) -> list[str]:
        prefix = self._key(path)
        return sorted(key.removeprefix(prefix) for key in self.bucket.objects.names(prefix))

    def read(self, path: str, name: str) -> bytes:
        return self.bucket.objects[self._key(path, name)]

    def write(self, path: str, name: str, data: bytes) -> None:
        self.bucket.objects[self._key(path, name)] = data

    def remove(self, path: str, name: str) -> None:
        del self.bucket.objects[self._key(path, name)]


class ObjectStoreWithCache(ObjectStore):
    name = "object store, node cache"

    def __init__(self, request: pytest.FixtureRequest, tmp_path: Path) -> None:
        super().__init__(request, tmp_path)
        tracefile.configure(node_cache=str(tmp_path / "cache"))


class Ray(StoreKind):
    """Traces that are kept by name. A segment is one object there: its files are gone, and damaged, in a new one."""

    name = "ray"

    def __init__(self, request: pytest.FixtureRequest, tmp_path: Path) -> None:
        super().__init__(request, tmp_path)
        self.ray = request.getfixturevalue("ray_node")
        address = self.ray.get_runtime_context().gcs_address
        self.prelude = f"import ray; ray.init({address!r}, logging_level=40, log_to_driver=False)\n"
        self._paths: set[str] = set()

    def __getstate__(self) -> dict[str, Any]:  # for other processes
        return {"tmp_path": self.tmp_path, "_paths": set()}

    def path(self, name: str = "step_1.trace") -> str:
        from tracefile.integrations.ray import keep

        path = f"ray://{self.tmp_path.name}/{name}"
        keep(path)
        self._paths.add(path)
        return path

    def close(self) -> None:
        from tracefile.integrations.ray import delete

        for path in self._paths:
            delete(path)

    def in_processes(self, *works: Callable[[], Any]) -> list[Any]:
        call = self.ray.remote(num_cpus=0)(lambda work: work())
        found: list[Any] = self.ray.get([call.remote(work) for work in works])
        return found

    def _change(self, path: str, change: Callable[[Any], Any]) -> Any:
        """Have the keeper change what it knows of a trace."""
        keeper = self.ray.get_actor("tracefile", namespace="tracefile")
        return self.ray.get(keeper.__ray_call__.remote(lambda self: change(self._traces[path])))

    def names(self, path: str) -> list[str]:
        def listed(trace: Any) -> list[str]:
            names = list(trace.files)
            for segment, (_, shard_bytes, _) in trace.segments.items():
                names += [f"segments/{segment}/zarr.json"] + [f"segments/{segment}/c/0/0/0"] * (shard_bytes >= 0)
            return names

        return sorted(self._change(path, listed))

    def read(self, path: str, name: str) -> bytes:
        from tracefile.store import store_for

        return store_for(path).read(f"{path}/{name}")

    def write(self, path: str, name: str, data: bytes) -> None:
        if name.count("/") < 2:
            self._change(path, lambda trace: trace.files.update({name: data}))
        else:
            _, segment, name = name.split("/", 2)
            self._replace(path, segment, **{"document" if name == "zarr.json" else "shard": data})

    def _replace(self, path: str, segment: str, **changed: bytes | None) -> None:
        from tracefile.integrations.ray.keeper import HEADER

        document = changed.get("document") or self.read(path, f"segments/{segment}/zarr.json")
        shard = changed["shard"] if "shard" in changed else self.read(path, f"segments/{segment}/c/0/0/0")
        size = -1 if shard is None else len(shard)
        stored = struct.pack(HEADER, len(document), size) + document + (shard or b"")
        refs = [self.ray.put(np.frombuffer(stored, np.uint8))]
        self._change(path, lambda trace: trace.segments.update({segment: (document, size, refs)}))

    def remove(self, path: str, name: str) -> None:
        if name.count("/") < 2:
            self._change(path, lambda trace: trace.files.pop(name) and None)
        elif name.endswith("/zarr.json"):
            self._change(path, lambda trace: trace.segments.pop(name.split("/")[1]) and None)
        else:
            self._replace(path, name.split("/")[1], shard=None)
