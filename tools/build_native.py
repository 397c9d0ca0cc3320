"""Hatchling's build hook: compiles ``tracefile/_decode.c``, where there is a C compiler.

Without one the package is built all the same, and decodes in Python. ``CC`` names the compiler (default ``cc``).
"""

from __future__ import annotations

import hashlib
import os
import shlex
import subprocess
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCE = Path("tracefile", "_decode.c")
LIBRARY = Path("tracefile", "_decode.so")
# For any machine of the platform: no -march.
FLAGS = ["-std=c11", "-O3", "-shared", "-fPIC", "-fvisibility=hidden", "-Wall"]


def compile_library(source: Path, target: Path) -> str | None:
    """Compile ``source`` into the shared library ``target``, which is replaced at once; what went wrong, if it did."""
    digest = hashlib.sha256(source.read_bytes()).hexdigest()
    unfinished = target.with_name(f".{target.name}.{os.getpid()}")  # a process may have mapped the one that is there
    compiler = shlex.split(os.environ.get("CC") or "cc")
    command = [*compiler, *FLAGS, f'-DSOURCE_HASH="{digest}"', "-o", str(unfinished), str(source)]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            return (done.stderr.strip() or f"{compiler[0]} exited with {done.returncode}").splitlines()[0]
        unfinished.replace(target)
    except OSError as error:
        return f"cannot run {compiler[0]}: {error.strerror}"
    finally:
        unfinished.unlink(missing_ok=True)
    return None


class NativeBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """Adds the shared library to a wheel; for an editable install, leaves it beside its source."""

    PLUGIN_NAME = "native"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        root = Path(self.root)
        self._built = tempfile.TemporaryDirectory()
        target = root / LIBRARY if version == "editable" else Path(self._built.name, LIBRARY.name)
        error = compile_library(root / SOURCE, target)
        if error is not None:
            self.app.display_warning(f"tracefile is built without its native decoder: {error}")
            return
        if version != "editable":
            build_data["force_include"][str(target)] = LIBRARY.as_posix()
        # It knows nothing of Python, so any version of it will do.
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data |= {"pure_python": False, "tag": f"py3-none-{platform}"}

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        self._built.cleanup()
