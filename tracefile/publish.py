"""Making things visible: a trace, and in it a segment that is built first, and appears whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import time
import uuid as uuid_module
from typing import TYPE_CHECKING, Any

from tracefile import documents
from tracefile._version import __version__
from tracefile.errors import ConfigurationMismatchError, NotATraceError, PublishError, TraceError, TraceNotFoundError
from tracefile.format import METADATA_NAME, SEGMENTS_NAME
from tracefile.local_store import write_file
from tracefile.metadata import TraceHeader
from tracefile.store import read_trace_header, store_for

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tracefile.format import ModelConfig
    from tracefile.metadata import SegmentHeader


def _existing_header(path: str) -> TraceHeader | None:
    """The header of the trace at ``path``; ``None`` where one can be created."""
    try:
        return read_trace_header(path)
    except TraceNotFoundError:
        return None
    except NotATraceError:
        if store_for(path).is_vacant(path):
            return None
        return read_trace_header(path)  # another writer may have made it one since


def create_trace(path: str, config: ModelConfig, *, durable: bool) -> TraceHeader:
    """Create the trace at ``path``, or join the one that is there.

    Any number of processes may do this at once: it becomes visible whole, and who comes second finds the first one's.

    Raises
    ------
    ConfigurationMismatchError
        The trace that is there has another model configuration.
    NotATraceError
        Something else is at the path.
    PublishError
        The store refused.
    """
    header = _existing_header(path)
    if header is None:
        header = TraceHeader(uuid_module.uuid4().hex, config)
        files = {
            METADATA_NAME: documents.encode(documents.group_document(header)),
            f"{SEGMENTS_NAME}/{METADATA_NAME}": documents.encode(documents.group_document()),
        }
        with refusals(path):
            if not store_for(path).create(path, files, durable=durable):
                header = read_trace_header(path)
    if header.config != config:
        raise ConfigurationMismatchError(
            f"{path} holds {header.config}; this writer was opened with {config}. Write another configuration to"
            " another path",
            path=path,
            ours=config,
            theirs=header.config,
        )
    return header


@contextlib.contextmanager
def building(trace: str, segment: str) -> Iterator[str]:
    """A new local directory to build a segment in, and to publish within the block.

    What is raised there is raised, an ``OSError`` as what it means for who writes; nothing of the segment is left then.

    Raises
    ------
    PublishError
        The store refused.
    """
    store, build = store_for(trace), ""
    try:
        with refusals(trace):
            build = store.begin(trace, segment)
            yield build
    except BaseException:
        if build:
            store.discard(build)
            store.leave(trace)
        raise


def this_writer() -> dict[str, Any]:
    """What a segment says of who wrote it."""
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "version": __version__,
        "created": time.time_ns() // 1000 / 1e6,
    }


def write_document(build: str, header: SegmentHeader, *, durable: bool) -> None:
    """Write the document of a segment to the directory in which it is built."""
    document = documents.encode(documents.segment_document(header))
    write_file(os.path.join(build, METADATA_NAME), document, durable)


@contextlib.contextmanager
def refusals(path: str) -> Iterator[None]:
    """Raise an ``OSError`` that says no more than that as a :class:`PublishError` about a trace."""
    try:
        yield
    except OSError as error:
        if isinstance(error, TraceError):
            raise
        raise _publish_error(path, error) from error


def _publish_error(path: str, error: OSError) -> PublishError:
    remedy = {
        errno.ENOSPC: "free space or write elsewhere",
        errno.EDQUOT: "the quota is used up",
        errno.EACCES: "the trace's parent directory must be writable too, because segments are built beside it",
        errno.EROFS: "the file system is mounted read-only",
    }.get(error.errno or 0, "nothing of this segment was published; append again once that is mended")
    message = f"cannot write to {path}: {error.strerror or error}; {remedy}"
    return PublishError(message, path=path, errno=error.errno)  # a detail, so that it survives pickling
