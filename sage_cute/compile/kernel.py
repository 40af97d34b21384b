"""A kernel before it is compiled: what it is, what it is made from, and the names that follow."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.util
import inspect
import json
import os
import platform
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

ARCH_VARIABLE = "CUTE_DSL_ARCH"
DEFAULT_ARCH = "sm_90a"
_OWN_VARIABLES = ("CUTE_DSL_LIBS", "CUTE_DSL_CACHE_DIR", "CUTE_DSL_DUMP_DIR", "CUTE_DSL_LOG_")
"""Variables of the DSL that do not change what it makes of a kernel."""


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One compiled function: its kind, its plan, and the function that compiles such plans.

    A kind of kernel is added by giving it a name and a ``build``: nothing else knows what plans
    hold. Kernels of one kind and plan are equal.
    """

    kind: str  # "fwd", "quantize", ...: one word, part of file names
    plan: Any  # a frozen dataclass: everything that the kernel is compiled from
    build: Callable[[Any], Any] = dataclasses.field(compare=False)
    """Compiles a plan to a TVM-FFI function; of module level, so that a process can be told."""

    def describe(self) -> dict[str, Any]:
        """Kind, target and every field of the plan, JSON-able: the readable key."""
        return {"kind": self.kind, "arch": target_arch(), "plan": dataclasses.asdict(self.plan)}

    @property
    def name(self) -> str:
        """A file and function name: kind and a hash over target, plan and sources."""
        key = {**self.describe(), "sources": sources_hash(inspect.getfile(self.build))}
        text = json.dumps(key, sort_keys=True)
        return f"{self.kind}_{hashlib.sha256(text.encode()).hexdigest()[:24]}"


def target_arch() -> str:
    """What kernels are compiled for: the DSL reads it from the environment, as we do."""
    return os.environ.get(ARCH_VARIABLE, DEFAULT_ARCH)


@functools.cache
def sources_hash(*more: str) -> str:
    """A hash over the sources of templates and configurations, and files beside them."""
    root = Path(__file__).resolve().parents[1]
    folders = [root / "config"]
    if spec := importlib.util.find_spec("sage_cute.templates"):
        folders += map(Path, spec.submodule_search_locations or ())
    files = [(folder.name, path) for folder in folders for path in sorted(folder.rglob("*.py"))]
    digest = hashlib.sha256()
    for top, path in (*files, *((".", Path(name)) for name in more)):
        data = path.read_bytes()
        digest.update(f"{top}/{path.name}:{len(data)}:".encode() + data)
    return digest.hexdigest()


def version(*packages: str) -> str | None:
    """Of the first of these distributions that is installed."""
    for package in packages:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return None


def runtime_version() -> str | None:
    """Of the DSL's runtime library, which kernels call; None if it is not installed."""
    return version(
        "nvidia-cutlass-dsl-libs-cu13", "nvidia-cutlass-dsl-libs-cu12", "nvidia-cutlass-dsl"
    )


def toolchain() -> dict[str, Any]:
    """What compiles: versions that a kernel on disk belongs to, JSON-able."""
    import torch  # the CUDA that the process has loaded

    changed = {
        name: value
        for name, value in os.environ.items()
        if name.startswith("CUTE_DSL_")
        and name != ARCH_VARIABLE
        and not name.startswith(_OWN_VARIABLES)
    }
    return {
        "dsl": version("nvidia-cutlass-dsl"),
        "runtime": runtime_version(),
        "tvm_ffi": version("apache-tvm-ffi"),
        "python": ".".join(map(str, sys.version_info[:2])),
        "cuda": torch.version.cuda,
        "machine": platform.machine(),
        "dsl_variables": changed,
    }
