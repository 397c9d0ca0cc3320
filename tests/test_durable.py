"""``durable=True``: all of a segment is flushed before it becomes visible, and its name after."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import numpy as np
import pytest

import tracefile

CONFIG = {"num_layers": 3, "top_k": 2, "num_experts": 16}


def record_calls(calls: list[tuple[str, str]]) -> Any:
    """Note each fsync with the path it flushes, and each rename with its target."""
    fsync, rename = os.fsync, os.rename

    def noted_fsync(fd: int) -> None:
        calls.append(("fsync", os.readlink(f"/proc/self/fd/{fd}")))
        fsync(fd)

    def noted_rename(source: str, target: str, **options: int) -> None:
        calls.append(("rename", target))
        rename(source, target, **options)

    return mock.patch.multiple(os, fsync=noted_fsync, rename=noted_rename)


def test_files_and_directories_are_flushed_before_the_rename(path: str) -> None:
    calls: list[tuple[str, str]] = []
    with tracefile.TraceWriter(path, **CONFIG, durable=True) as writer, record_calls(calls):
        writer.append("a", np.zeros((9, 3, 2), np.int32))
    (at,) = [number for number, (call, _) in enumerate(calls) if call == "rename"]
    segment = os.path.basename(calls[at][1])
    before = [name.partition(segment)[2] for _, name in calls[:at]]
    assert set(before) == {"/c/0/0/0", "/zarr.json", "/c/0/0", "/c/0", "/c", ""}
    assert before.index("/c/0/0/0") < before.index("/c/0/0") < before.index("/c/0") < before.index("/c")
    assert before[-1] == "", "the segment's own directory comes last"
    assert calls[at + 1 :] == [("fsync", f"{path}/segments")]


def test_a_new_trace_is_flushed_too(path: str) -> None:
    calls: list[tuple[str, str]] = []
    with record_calls(calls):
        tracefile.TraceWriter(path, **CONFIG, durable=True).close()
    at = calls.index(("rename", path))
    assert len([call for call, _ in calls[:at] if call == "fsync"]) == 4
    assert calls[at + 1] == ("fsync", os.path.dirname(path))


@pytest.mark.parametrize("rows", [0, 9])
def test_otherwise_nothing_is_flushed(path: str, rows: int) -> None:
    calls: list[tuple[str, str]] = []
    with record_calls(calls), tracefile.TraceWriter(path, **CONFIG) as writer:
        writer.append("a", np.zeros((rows, 3, 2), np.int32))
    assert [call for call, _ in calls] == ["rename", "rename"]
