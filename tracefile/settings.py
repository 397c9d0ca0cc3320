"""What holds for a whole process: budgets and limits. Environment variables set the defaults."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from tracefile.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Callable


def _available_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of this process.

    Attributes
    ----------
    cache_bytes : int
        Decoded chunks kept for reuse, in bytes, over all traces. Default 64 MiB.
        ``TRACEFILE_CACHE_BYTES``.
    materialize_limit : int or None
        The most bytes that one read may put in memory; ``None`` for no limit. ``TRACEFILE_MATERIALIZE_LIMIT``.
    decode_threads : int
        Threads that decode one read; 1 decodes in the calling thread. They start with the first read that is
        large enough. Default: the cores this process may use, at most 4. ``TRACEFILE_DECODE_THREADS``.
    max_open_segments : int
        Segments kept open (one file descriptor each). Default 128. ``TRACEFILE_MAX_OPEN_SEGMENTS``.
    native : bool
        Whether chunks are decoded by the compiled loop, where tracefile was installed with it. Default true;
        ``TRACEFILE_NATIVE=0`` switches it off.
    root_map : tuple of (str, str)
        For handles that come from nodes where the file system is mounted elsewhere: a trace under the first
        directory of a pair is looked for under the second; the longest that fits counts. In the environment
        ``TRACEFILE_ROOT_MAP``, as ``/mnt/rollout=/data/rollout:/scratch=/mnt/scratch``.
    object_store_options : mapping
        Handed to obstore for every bucket: ``config``, ``client_options``, ``retry_config``, each as obstore's
        ``from_url`` takes them, durations also in seconds. What is not said comes from the environment as obstore
        has it (``AWS_ENDPOINT_URL``, ...). In ``TRACEFILE_OBJECT_STORE_OPTIONS``, as JSON.
    node_cache : str or None
        A directory on this node, shared by its processes, for what was fetched from object stores; default none.
        ``TRACEFILE_NODE_CACHE``.
    node_cache_bytes : int
        What it may hold. Default 16 GiB. ``TRACEFILE_NODE_CACHE_BYTES``.
    quota_bytes : int or None
        What a trace may store; ``quota_bytes`` of :class:`~tracefile.writer.TraceWriter`. Default no limit.
        ``TRACEFILE_QUOTA_BYTES``.
    """

    cache_bytes: int = 64 * 1024 * 1024
    materialize_limit: int | None = None
    decode_threads: int = 1
    max_open_segments: int = 128
    native: bool = True
    root_map: tuple[tuple[str, str], ...] = ()
    object_store_options: Mapping[str, Any] = field(default_factory=dict)
    node_cache: str | None = None
    node_cache_bytes: int = 16 * 1024**3
    quota_bytes: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "root_map", _check_root_map(self.root_map))
        object.__setattr__(self, "object_store_options", _check_options(self.object_store_options))
        if self.node_cache is not None:
            object.__setattr__(self, "node_cache", os.path.abspath(os.fspath(self.node_cache)))
        if self.native not in (0, 1):  # a number in the environment
            raise OptionError(f"native must be true or false (TRACEFILE_NATIVE: 1 or 0), not {self.native!r}")
        object.__setattr__(self, "native", bool(self.native))
        least = {
            "cache_bytes": 0,
            "materialize_limit": 0,
            "decode_threads": 1,
            "max_open_segments": 1,
            "node_cache_bytes": 0,
            "quota_bytes": 0,
        }
        for name, lowest in least.items():
            value = getattr(self, name)
            if value is None and name in ("materialize_limit", "quota_bytes"):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
                raise OptionError(f"{name} must be an integer of at least {lowest}, not {value!r}")


def _check_root_map(pairs: object) -> tuple[tuple[str, str], ...]:
    try:
        checked = tuple((str(there).rstrip("/"), str(here).rstrip("/")) for there, here in pairs)  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        raise OptionError(f"root_map (TRACEFILE_ROOT_MAP) must be pairs of directories, not {pairs!r}") from None
    for pair in checked:
        if not all(directory.startswith("/") for directory in pair):
            raise OptionError(f"root_map must be pairs of absolute directories other than the root, not {pair}")
    return checked


def _check_options(options: object) -> dict[str, Any]:
    known = {"config", "client_options", "retry_config"}
    if not isinstance(options, Mapping) or not all(
        name in known and isinstance(value, Mapping) for name, value in options.items()
    ):
        raise OptionError(
            f"object_store_options (TRACEFILE_OBJECT_STORE_OPTIONS) must map some of {', '.join(sorted(known))} to"
            " mappings, as obstore takes them"  # not shown: there may be secrets among them
        )
    return dict(options)


def mapped_path(path: str) -> str:
    """Where a trace is on this node, by ``root_map``.

    Examples
    --------
    >>> before = configure(root_map=[("/mnt/rollout", "/data/r")])
    >>> mapped_path("/mnt/rollout/step_1.trace"), mapped_path("/mnt/rollouts/step_1.trace")
    ('/data/r/step_1.trace', '/mnt/rollouts/step_1.trace')
    >>> _ = configure(root_map=before.root_map)
    """
    fitting = [pair for pair in settings().root_map if path == pair[0] or path.startswith(pair[0] + "/")]
    if not fitting:
        return path
    there, here = max(fitting, key=lambda pair: len(pair[0]))
    return here + path[len(there) :]


def _from_environment() -> Settings:
    chosen: dict[str, Any] = {"decode_threads": min(4, _available_cores())}
    for item in fields(Settings):
        variable = f"TRACEFILE_{item.name.upper()}"
        text = os.environ.get(variable)
        if text and item.name == "root_map":
            chosen[item.name] = [pair.split("=", 1) for pair in text.split(":") if pair]
        elif text and item.name == "node_cache":
            chosen[item.name] = text
        elif text and item.name == "object_store_options":
            try:
                chosen[item.name] = json.loads(text)
            except ValueError:
                raise OptionError(f"{variable} must be a JSON object") from None
        elif text:
            try:
                chosen[item.name] = int(text)
            except ValueError:
                raise OptionError(f"{variable} must be an integer, not {text!r}") from None
    return Settings(**chosen)


_current: Settings | None = None
_listeners: list[Callable[[], None]] = []


def on_change(listener: Callable[[], None]) -> None:
    """Have ``listener`` called after each change of the settings."""
    _listeners.append(listener)


def settings() -> Settings:
    """The settings in force."""
    global _current
    if _current is None:
        _current = _from_environment()  # not at import, which a mistyped variable must not break
    return _current


def configure(**changes: Any) -> Settings:
    """Change settings of this process; what is not named stays.

    Returns
    -------
    Settings
        The settings that were in force before, so that a caller can restore them.

    Raises
    ------
    OptionError
        An unknown setting, or a value that it cannot have.

    Examples
    --------
    >>> before = configure(cache_bytes=16 * 1024 * 1024)
    >>> settings().cache_bytes
    16777216
    >>> _ = configure(cache_bytes=before.cache_bytes)
    """
    global _current
    before = settings()
    unknown = set(changes) - {item.name for item in fields(Settings)}
    if unknown:
        raise OptionError(f"unknown setting {', '.join(sorted(unknown))}; there are {', '.join(Settings.__slots__)}")
    _current = replace(before, **changes)
    for listener in _listeners:
        listener()
    return before
