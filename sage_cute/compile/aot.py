"""Kernels built ahead of time: made where there is no GPU, used where there is no compiler.

A folder holds files of :mod:`sage_cute.compile.binary` by the kernel's name, as the cache does. It
serves any Python version: what must fit is the version of the DSL's runtime library, and the
templates, whose hash is part of the name.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from sage_cute import env
from sage_cute.compile import binary
from sage_cute.compile.kernel import Kernel, sources_hash
from sage_cute.errors import KernelError

log = logging.getLogger("sage_cute")
_chosen: list[Path] = []
_warned: set[tuple[Path, ...]] = set()


def use_kernels(folder: str | os.PathLike[str]) -> int:
    """Uses the kernels of a folder in this process, before those of ``SAGE_CUTE_KERNELS``.

    Kernels that were used already stay as they are.

    Args:
        folder: what ``sage-cute compile --out`` has written.

    Returns:
        How many kernels it has for this version of the package.

    Raises:
        KernelError: there is none.
    """
    path = Path(folder).expanduser().absolute()
    descriptions = list(describe(path))
    fitting = [one for one in descriptions if one["sources"] == sources_hash()]
    if not fitting:
        raise KernelError(f"{path}: {_why_none(descriptions)}")
    if path not in _chosen:
        _chosen.insert(0, path)
    return len(fitting)


def folders() -> tuple[Path, ...]:
    """Where kernels built ahead of time are looked for, in order."""
    return (*_chosen, *env.kernel_folders())


def describe(folder: Path) -> Iterable[dict[str, Any]]:
    """What the files of a folder say of themselves.

    Raises:
        KernelError: one is not whole.
    """
    for path in sorted(folder.glob(f"*{binary.SUFFIX}")):
        try:
            yield binary.unseal(path.read_bytes())
        except KernelError as error:
            raise KernelError(f"{path}: {error}; build it again") from error


def find(kernel: Kernel) -> Any | None:
    """The kernel's function from a folder built ahead of time; None if none has it.

    Raises:
        KernelError: a folder has it, but it cannot be used: someone wanted it to be.
    """
    where = folders()
    for folder in where:
        path = folder / (kernel.name + binary.SUFFIX)
        if path.is_file():
            try:
                function, _ = binary.load(path)
            except KernelError as error:
                raise KernelError(f"{path}: {error}; build it again with sage-cute compile") from (
                    error
                )
            log.info("%s: loaded from %s", kernel.name, path)
            return function
    if where and where not in _warned and _has_compiler():
        _warned.add(where)
        names = ", ".join(map(str, where))
        log.warning("%s is not among the kernels of %s: compiled now", kernel.describe(), names)
    return None


def require_compiler(kernel: Kernel) -> None:
    """Raises KernelError where the DSL cannot compile, saying which kernel is missing and where."""
    try:
        import cutlass  # noqa: F401  what compiling imports anyway
        import tvm_ffi  # noqa: F401
    except ImportError as error:  # not installed, or its own libraries are not
        reason = error
    else:
        return
    where = [f"{folder} ({_why_none(list(describe(folder)))})" for folder in folders()]
    looked = f"not in {', '.join(where)}" if where else "SAGE_CUTE_KERNELS names no folder"
    raise KernelError(
        f"kernel {kernel.describe()} was not built ahead of time ({looked}), and there is no CuTe "
        f"DSL to compile it ({reason}): pip install 'nvidia-cutlass-dsl[cu13]' "
        "apache-tvm-ffi, or build it elsewhere with sage-cute compile"
    ) from reason


def _has_compiler() -> bool:
    return importlib.util.find_spec("cutlass") is not None


def _why_none(descriptions: list[dict[str, Any]]) -> str:
    if not descriptions:
        return "no kernels there"
    if any(one["sources"] == sources_hash() for one in descriptions):
        return f"{len(descriptions)} other kernels there"
    versions = ", ".join(sorted({one["sage_cute"] for one in descriptions}))
    return f"its kernels are of other sources of sage_cute ({versions}): build them again"
