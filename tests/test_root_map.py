"""Handles that come from a node where the file system is mounted elsewhere."""

from __future__ import annotations

import os
import pickle
import sys
from typing import TYPE_CHECKING

import pytest
from support import run_python

import tracefile

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np

_READ = """
import pickle, sys, tracefile
experts = pickle.loads(bytes.fromhex(sys.argv[1]))
print(experts[3:].numpy().sum(), tracefile.settings().root_map)
"""


def test_handles_are_looked_for_where_the_store_is_mounted(tmp_path: Path, rng: np.random.Generator) -> None:
    there, here = tmp_path / "mnt" / "rollout", tmp_path / "data" / "step=1"
    there.mkdir(parents=True)
    here.parent.mkdir()
    ids = rng.integers(0, 64, (10, 3, 2))
    with tracefile.TraceWriter(there / "a.trace", num_layers=3, top_k=2, num_experts=64) as writer:
        handle = pickle.dumps(writer.append("a", ids)).hex()
    os.rename(there, here)
    env = {**os.environ, "TRACEFILE_ROOT_MAP": f"/no=/where:{tmp_path}/mnt={tmp_path}/x:{there}={tmp_path}/data/link/"}
    (tmp_path / "data" / "link").symlink_to(here)
    output = run_python(_READ, handle, env=env).stdout
    assert output.split(" ")[0] == str(ids[3:].sum())
    assert f"'{there}', '{tmp_path}/data/link'" in output
    env["TRACEFILE_ROOT_MAP"] = f"{tmp_path}/mnt/roll={here}"  # no whole directory of the path
    result = run_python(_READ, handle, env=env, check=False)
    assert f"SegmentMissingError: {there}/a.trace" in result.stderr


@pytest.mark.parametrize("wrong", ["/a", "/a=b", "a=/b", "/=/b"])
def test_what_is_no_map(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACEFILE_ROOT_MAP", wrong)
    monkeypatch.setattr(sys.modules["tracefile.settings"], "_current", None)  # as in a new process
    with pytest.raises(tracefile.OptionError, match="root_map"):
        tracefile.settings()
    monkeypatch.undo()
    with pytest.raises(tracefile.OptionError, match="root_map"):
        tracefile.configure(root_map=7)
