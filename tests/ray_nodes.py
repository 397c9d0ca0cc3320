"""Real Ray, quietly: what test files that start it have in common, and one node for those that need no more."""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

QUIET = {"logging_level": logging.ERROR, "log_to_driver": False}


@contextlib.contextmanager
def quiet_ray() -> Iterator[Any]:
    """The module ``ray``, to be initialized within; its workers import test modules."""
    ray = pytest.importorskip("ray")
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.filterwarnings("ignore", category=FutureWarning, module="ray")  # of its own settings to come
        patch.setenv("PYTHONPATH", os.path.dirname(__file__))
        patch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        yield ray
        ray.shutdown()


@pytest.fixture(scope="module")
def ray_node() -> Iterator[Any]:
    """The module ``ray``, connected to a cluster of one node."""
    with quiet_ray() as ray:
        # A cluster of its own, also where another worker of these tests has one.
        ray.init(
            address="local", num_cpus=2, num_gpus=0, include_dashboard=False, object_store_memory=128 * 2**20, **QUIET
        )
        yield ray
