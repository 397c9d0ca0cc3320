"""obstore, as this process can use it: loaded, and told what the user and the environment say.

obstore runs on threads of its own that do not survive a fork: in a child of a process that has used it, its first
request would wait for ever. A child therefore loads the extension once more, under another name, which gives it
fresh ones (30 ms, 7 MB).
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
import importlib.util
import os
import sys
import tempfile
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

from tracefile.errors import OptionError
from tracefile.settings import settings

if TYPE_CHECKING:
    from collections.abc import Mapping

#: What obstore is told unless the user says otherwise: seconds without an answer, or without more of it, end a try.
_CLIENT_OPTIONS: dict[str, Any] = {"connect_timeout": 5, "read_timeout": 15, "timeout": 60}
_RETRY_CONFIG: dict[str, Any] = {"max_retries": 8, "retry_timeout": 60}
_ENVIRONMENT_OPTIONS = (
    "allow_http", "allow_invalid_certificates", "connect_timeout", "read_timeout", "timeout", "proxy_url",
    "proxy_ca_certificate", "proxy_excludes", "user_agent",
)  # fmt: skip


class Obstore(NamedTuple):
    """obstore's modules, in one copy."""

    package: Any
    store: Any
    exceptions: Any


def load_obstore(*, stale: bool) -> Obstore:
    """obstore's modules.

    Parameters
    ----------
    stale : bool
        Whether those that are imported were used before a fork.

    Raises
    ------
    OptionError
        It is not installed.
    """
    try:
        return _fresh() if stale else _imported()
    except ImportError as error:
        raise OptionError("traces in object stores need obstore: pip install 'tracefile[object-store]'") from error


def _imported() -> Obstore:
    return Obstore(*map(importlib.import_module, ("obstore", "obstore.store", "obstore.exceptions")))


def _fresh() -> Obstore:
    """A copy of obstore that shares nothing with the one that was there before the fork, which stays as it is."""
    original = sys.modules["obstore._obstore"].__file__
    assert original is not None
    mine = {name: module for name, module in sys.modules.items() if f"{name}.".startswith("obstore.")}
    with contextlib.ExitStack() as stack:
        # The loader of libraries tells them apart by their files.
        if hasattr(os, "memfd_create"):
            file = stack.enter_context(open(os.memfd_create("obstore"), "wb"))
            path = f"/proc/self/fd/{file.fileno()}"
        else:
            file = stack.enter_context(tempfile.NamedTemporaryFile(suffix=".so"))  # type: ignore[arg-type]
            path = file.name
        with open(original, "rb") as library:
            while piece := library.read(1024 * 1024):
                file.write(piece)
        file.flush()
        for name in mine:
            del sys.modules[name]
        try:
            loader = importlib.machinery.ExtensionFileLoader("obstore._obstore", path)
            spec = importlib.util.spec_from_loader("obstore._obstore", loader)
            assert spec is not None
            module = importlib.util.module_from_spec(spec)
            loader.exec_module(module)
            sys.modules["obstore._obstore"] = module
            return _imported()
        finally:
            for name in [name for name in sys.modules if f"{name}.".startswith("obstore.")]:
                del sys.modules[name]
            sys.modules.update(mine)


def new_store(obstore: Obstore, bucket: str) -> Any:
    """obstore's client of a bucket, with the options that hold now.

    Raises
    ------
    OptionError
        obstore does not accept them.
    """
    options = settings().object_store_options
    arguments: dict[str, Any] = {
        "client_options": _durations(
            _CLIENT_OPTIONS | _environment_options(bucket) | dict(options.get("client_options", {}))
        ),
        "retry_config": _durations(_RETRY_CONFIG | dict(options.get("retry_config", {}))),
    }
    if not bucket.startswith("http"):
        arguments["config"] = dict(options.get("config", {}))
    try:
        return obstore.store.from_url(bucket, **arguments)
    except (obstore.exceptions.BaseError, TypeError, ValueError) as error:
        raise OptionError(f"obstore does not accept {bucket} ({first_line(error)})") from error


def time_limit() -> float:
    """How long a request may be tried, in seconds."""
    limit = settings().object_store_options.get("retry_config", {}).get("retry_timeout")
    limit = _RETRY_CONFIG["retry_timeout"] if limit is None else limit
    return float(limit.total_seconds() if isinstance(limit, timedelta) else limit)


def _environment_options(bucket: str) -> dict[str, Any]:
    """What obstore would take from the environment, were it not told any client options."""
    scheme = bucket.partition("://")[0]
    if scheme.startswith("http"):
        return {"allow_http": scheme == "http"}
    prefix = {"s3": "AWS", "s3a": "AWS", "gs": "GOOGLE"}.get(scheme, "AZURE")
    found: dict[str, Any] = {}
    for name in _ENVIRONMENT_OPTIONS:
        text = os.environ.get(f"{prefix}_{name.upper()}")
        if text is not None:
            found[name] = text.lower() in ("1", "true", "yes", "on") if name.startswith("allow_") else text
    return found


def _durations(options: Mapping[str, Any]) -> dict[str, Any]:
    """Seconds as obstore wants them."""
    times = {"connect_timeout", "read_timeout", "timeout", "pool_idle_timeout", "retry_timeout"}
    times |= {"init_backoff", "max_backoff"}
    result: dict[str, Any] = {}
    for name, value in options.items():
        if name in times and isinstance(value, int | float):
            result[name] = timedelta(seconds=value)
        else:
            result[name] = _durations(value) if name == "backoff" else value
    return result


def first_line(error: BaseException) -> str:
    """The first line of what an error of obstore says."""
    return str(error).split("\n", 1)[0].strip()
