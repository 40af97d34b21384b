"""A simulated GPU, and a cache folder of the test's own."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from sage_cute.tune import select, table
from sage_cute.tune.key import Gpu

_spec = importlib.util.spec_from_file_location(
    "simulated", Path(__file__).with_name("simulated.py")
)
assert _spec is not None and _spec.loader is not None
sys.modules["simulated"] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(sys.modules["simulated"])


@pytest.fixture
def gpu() -> Gpu:
    return Gpu("NVIDIA H200", 132, "sm90")


@pytest.fixture(autouse=True)
def _own_state(tmp_path, monkeypatch, gpu) -> None:
    monkeypatch.setenv("SAGE_CUTE_CACHE_DIR", str(tmp_path / "cache"))
    for name in ("SAGE_CUTE_TUNE", "SAGE_CUTE_TRACE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(select, "_chosen", {})
    monkeypatch.setattr(select, "_mode", None)
    monkeypatch.setattr(select, "gpu_of", lambda device: gpu)
    monkeypatch.setattr(select, "_capturing", lambda: False)
    monkeypatch.setattr(table, "SHIPPED", tmp_path / "shipped")
