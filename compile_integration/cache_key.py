"""Inductor's caches on disk must not outlive our registrations.

They key on an op's name, not on its schema, fake rule, decomposition or backward: after an update
of this package they would silently serve graphs of the old one (reproduced on torch 2.11, 2.13).
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch.compiler.config

import sage_cute
from sage_cute._version import __version__


def abi_sources() -> list[Path]:
    """Every source that shapes a graph: registrations, policies, saved tensors."""
    root = Path(sage_cute.__file__).parent
    folders = (Path(__file__).parent, root / "policies", root / "numerics")
    return [path for folder in folders for path in sorted(folder.glob("*.py"))]


def abi() -> str:
    """A hash over those sources, so that no one has to remember to raise a number."""
    digest = hashlib.sha256()
    for path in abi_sources():
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def extend_cache_key() -> None:
    """Adds our version and ABI to the tag that is part of every key; once."""
    tag = f"sage_cute-{__version__}-{abi()}"
    if tag not in torch.compiler.config.cache_key_tag:
        torch.compiler.config.cache_key_tag += f"|{tag}"
