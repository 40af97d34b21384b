"""Shared fixtures. Collection needs neither a GPU nor the CuTe DSL."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # bench, emulator

if "PYTEST_XDIST_WORKER" not in os.environ:  # workers inherit, and share what they compile
    # Caches of an earlier version of the ops must not answer for this one.
    _CACHE = tempfile.TemporaryDirectory(prefix="sage-cute-", ignore_cleanup_errors=True)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = _CACHE.name
    # Neither kernels nor tuning tables of the user's, nor tests' in the user's folder.
    os.environ["SAGE_CUTE_CACHE_DIR"] = os.path.join(_CACHE.name, "sage_cute")
for _name in ("SAGE_CUTE_KERNELS", "SAGE_CUTE_TUNE", "SAGE_CUTE_TRACE"):
    os.environ.pop(_name, None)


HAS_GPU = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Without a GPU, ``emulated(slow=True)`` tests run on demand: they take an hour."""
    parser.addoption("--emulate", action="store_true", help="run slow emulated tests as well")


def _emulated(item: pytest.Item) -> bool:
    mark = item.get_closest_marker("emulated")
    if HAS_GPU or mark is None:
        return False
    return not mark.kwargs.get("slow") or item.config.getoption("--emulate")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what needs a GPU where there is none, and says so."""
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU with compute capability 9.0 (sm_90a)")
    for item in items:
        if "gpu" in item.keywords and not HAS_GPU and not _emulated(item):
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def _gpu(request: pytest.FixtureRequest) -> Iterator[None]:
    """Stands in for the GPU in tests that run on the emulator."""
    if not _emulated(request.node):
        yield
        return
    import emulator

    with emulator.emulated_gpu(ops=False), emulator.seeded(1):
        yield


@pytest.fixture(autouse=True)
def _fresh_state() -> None:
    """The same random numbers and no compiled graphs, whatever ran before."""
    torch.manual_seed(0)
    torch._dynamo.reset()
