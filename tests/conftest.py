"""Shared fixtures. Collection needs neither a GPU nor the CuTe DSL."""

from __future__ import annotations

import os
import tempfile

import pytest
import torch

# Caches of an earlier version of the ops must not answer for this one.
_CACHE = tempfile.TemporaryDirectory(prefix="sage-cute-inductor-", ignore_cleanup_errors=True)
os.environ["TORCHINDUCTOR_CACHE_DIR"] = _CACHE.name
# Neither kernels nor tuning tables of the user's, nor tests' in the user's folder.
os.environ["SAGE_CUTE_CACHE_DIR"] = os.path.join(_CACHE.name, "sage_cute")
for _name in ("SAGE_CUTE_KERNELS", "SAGE_CUTE_TUNE", "SAGE_CUTE_TRACE"):
    os.environ.pop(_name, None)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what needs a GPU where there is none, and says so."""
    if torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0):
        return
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU with compute capability 9.0 (sm_90a)")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def _fresh_state() -> None:
    """The same random numbers and no compiled graphs, whatever ran before."""
    torch.manual_seed(0)
    torch._dynamo.reset()
