"""Ray: traces in the memory of a cluster, without a file system that its nodes share.

A path ``ray://step_123`` is a trace whose segments are objects in Ray's object stores: compressed, as files would
hold them, brought to a node at most once, and mapped there by all of its processes; Ray moves, spills and frees them.
Everything else is as with files::

    writer = tracefile.TraceWriter("ray://step_123", num_layers=48, top_k=8, num_experts=128)
    experts = writer.append("prompt-7/3", ids)        # on a rollout node
    ray.get(learner.train.remote({"experts": [experts]}))  # reads its rows, on another

**What keeps a segment alive** is the lazy tensors that name it, and objects of Ray's that hold them: when the last one
is gone, Ray frees it. The writer does not keep it, nor does a process that has read from it. Two things follow. Only
Ray's serializer can carry such a tensor; others refuse it. And :func:`tracefile.open` sees what its own process holds.

A trace that is to be opened by name, anywhere in the cluster, is announced with :func:`keep` before it is written, and
lives until :func:`delete`. Its lazy tensors are names, as those of files are, and any pickle carries them.

**What is lost when a node dies** is what no other node had a copy of; reading it raises
:class:`~tracefile.SegmentMissingError`, when Ray has noticed. What has been transferred stays readable, for all
processes, because a small actor on the head node owns the segments, and not the writer (its name is ``tracefile``, in
the namespace ``tracefile``; it stays in the cluster and holds no rows). No wait takes longer than
``TRACEFILE_RAY_TIMEOUT`` seconds, default 120.

Ray does not work in forked processes (those of ``torch.utils.data.DataLoader``, say): what was read from before a fork
can be read there, anything else raises :class:`~tracefile.StoreError`. Nor is Ray Client (``ray.init("ray://...")``)
part of a cluster; submit jobs instead.
"""

from __future__ import annotations

from tracefile.integrations.ray.store import RayStore, store

__all__ = ["RayStore", "delete", "keep"]


def keep(path: str) -> None:
    """Have a trace kept by name, until :func:`delete`. To be called before its first segment is written.

    Parameters
    ----------
    path : str
        ``ray://name``.

    Raises
    ------
    OptionError
        Not such a path, or this process is not connected to a Ray cluster.
    StoreError
        The cluster does not answer.
    """
    store.call("keep", store.absolute(path))


def delete(path: str) -> None:
    """Forget a trace: it cannot be opened any more, and what of it nobody else refers to is freed.

    Fine if there is none. Lazy tensors of a trace that was not kept stay good.

    Parameters
    ----------
    path : str
        ``ray://name``.

    Raises
    ------
    OptionError, StoreError
        As for :func:`keep`.
    """
    store.call("forget", store.absolute(path), None)
