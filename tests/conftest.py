"""Fixtures that every test file may use."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from object_server import bucket, s3_server  # noqa: F401 - fixtures

import tracefile
from tracefile.read import chunk_observers

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


#: Files that take long begin first, so that none is left to wait for in the end: tools/test gives workers whole files.
_LONG = ("test_ray_store.py", "test_train_r3.py", "test_stores.py", "test_compact.py", "test_ray_cluster.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: _LONG.index(item.path.name) if item.path.name in _LONG else len(_LONG))


@pytest.fixture
def path(tmp_path: Path) -> str:
    """Where a test may put its trace."""
    return str(tmp_path / "step_000001.trace")


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20261130)


@pytest.fixture(autouse=True)
def default_settings() -> Iterator[None]:
    """Each test starts with the default settings and an empty chunk cache, and leaves no others behind."""
    before = tracefile.settings()
    tracefile.clear_cache()
    yield
    tracefile.configure(**{name: getattr(before, name) for name in before.__slots__})
    tracefile.clear_cache()


@pytest.fixture
def decoded() -> Iterator[list[tuple[str, int, int]]]:
    """The chunks decoded during a test: segment id, position along layers, position along rows."""
    chunks: list[tuple[str, int, int]] = []

    def observe(segment: str, positions: list[tuple[int, int]]) -> None:
        chunks.extend((segment, layer, row) for layer, row in positions)

    chunk_observers.append(observe)
    yield chunks
    chunk_observers.remove(observe)


@pytest.fixture(autouse=True)
def threads_for_small_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests read little; what threads do for large reads they are to do here as well."""
    monkeypatch.setattr("tracefile.decode._CHUNKS_PER_THREAD", 4)
    monkeypatch.setattr("tracefile.decode._NATIVE_BYTES_PER_THREAD", 100)
