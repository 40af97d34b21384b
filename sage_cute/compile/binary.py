"""A compiled kernel as a file: a shared library that says what it is and whether it is whole.

The DSL exports a TVM-FFI function as an object file; a linker makes a shared library of it, which
TVM-FFI loads without the DSL's Python package (``import cutlass`` takes seconds). What the library
calls is the DSL's runtime, ``libcute_dsl_runtime.so`` of ``nvidia-cutlass-dsl-libs-cu13``.

Behind the library, where loaders do not look, lie a description (JSON), a SHA-256 over all before
it, and the description's length: a file that was cut short or changed is never loaded.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from sage_cute.compile.kernel import Kernel, runtime_version, sources_hash, toolchain
from sage_cute.errors import KernelError

SUFFIX = ".so"
_MAGIC = b"sagecute"
_TRAILER = 32 + 8 + len(_MAGIC)
_LINKERS = ("cc", "gcc", "clang", "ld")
_RUNTIME = "libcute_dsl_runtime.so"


def linker() -> list[str] | None:
    """The command that links shared libraries, ``$CC`` first; None if there is none."""
    for command in (os.environ.get("CC", ""), *_LINKERS):
        words = shlex.split(command)
        if words and shutil.which(words[0]):
            return words
    return None


@functools.cache
def runtime_libraries() -> tuple[Path, Path]:
    """The libraries that kernels call: the DSL's runtime and TVM-FFI's.

    Raises:
        KernelError: one is not installed.
    """
    try:
        from tvm_ffi.libinfo import find_libtvm_ffi

        tvm_ffi = Path(find_libtvm_ffi())
    except ImportError as error:
        raise KernelError(f"kernels need TVM-FFI: pip install apache-tvm-ffi ({error})") from None
    for path in _runtime_candidates():
        if path.is_file():
            return path, tvm_ffi
    raise KernelError(
        f"kernels need {_RUNTIME}: pip install --no-deps nvidia-cutlass-dsl-libs-cu13, or name the "
        "file in CUTE_DSL_LIBS"
    )


def _runtime_candidates() -> list[Path]:
    """Where the library may be; the DSL's own variable first, then as its packages install it."""
    given = os.environ.get("CUTE_DSL_LIBS", "").split(os.pathsep)
    found = [Path(path) for path in given if path.endswith(_RUNTIME)]
    spec = importlib.util.find_spec("nvidia_cutlass_dsl")
    for root in (spec and spec.submodule_search_locations) or ():
        found += [Path(root) / folder / _RUNTIME for folder in ("cu13/lib", "cu12/lib", "lib")]
    return found


def package(kernel: Kernel, function: Any) -> bytes:
    """The contents of a file for a function that the DSL has compiled.

    Raises:
        KernelError: there is no linker, or it fails.
    """
    command = linker()
    if command is None:
        raise KernelError(f"no linker ({', '.join(_LINKERS)} or $CC): install a C compiler")
    with tempfile.TemporaryDirectory(prefix="sage-cute-") as folder:
        module, library = Path(folder) / "kernel.o", Path(folder) / "kernel.so"
        function.export_to_c(str(module), kernel.name)
        # Named at the link, so that a missing one is an error when loading and not at a call.
        command += ["-shared", "-o", str(library), str(module), *map(str, runtime_libraries())]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise KernelError(f"{shlex.join(command[:1])} cannot link a kernel: {done.stderr}")
        return seal(library.read_bytes(), about(kernel))


def about(kernel: Kernel) -> dict[str, Any]:
    """What a file says of itself."""
    from sage_cute._version import __version__

    return {
        "sage_cute": __version__,
        "name": kernel.name,
        **kernel.describe(),
        "sources": sources_hash(),
        "toolchain": toolchain(),
    }


def seal(code: bytes, description: dict[str, Any]) -> bytes:
    """``code`` with its description and checksum behind it."""
    text = json.dumps(description, sort_keys=True).encode()
    digest = hashlib.sha256(code + text).digest()
    return code + text + digest + len(text).to_bytes(8, "little") + _MAGIC


def unseal(data: bytes) -> dict[str, Any]:
    """The description of a file's contents.

    Raises:
        KernelError: it is not whole.
    """
    body, trailer = data[:-_TRAILER], data[-_TRAILER:]
    if len(trailer) < _TRAILER or trailer[-len(_MAGIC) :] != _MAGIC:
        raise KernelError("cut short, or no kernel file")
    if hashlib.sha256(body).digest() != trailer[:32]:
        raise KernelError("its checksum does not fit its contents")
    length = int.from_bytes(trailer[32:40], "little")
    description: dict[str, Any] = json.loads(body[len(body) - length :])
    return description


def load(path: Path) -> tuple[Any, dict[str, Any]]:
    """The function in a file, callable with tensors, and the file's description.

    Raises:
        KernelError: the file is not whole, or made for another runtime, or cannot be loaded.
        OSError: the file cannot be read.
    """
    description = unseal(path.read_bytes())
    made, here = description["toolchain"]["runtime"], runtime_version()
    if here is not None and made != here:  # None: a library named by hand, without its package
        raise KernelError(f"made with version {made} of the DSL's runtime, and {here} is installed")
    _load_runtime()
    try:
        import tvm_ffi
    except ImportError as error:
        raise KernelError(f"needs TVM-FFI ({error}): pip install apache-tvm-ffi") from error
    try:
        return tvm_ffi.load_module(str(path))[description["name"]], description
    except (AttributeError, OSError, RuntimeError) as error:
        raise KernelError(f"cannot be loaded: {error}") from error


@functools.cache
def _load_runtime() -> tuple[ctypes.CDLL, ...]:
    """Loads what kernels name as their libraries; kept, so that the loader finds them by name."""
    return tuple(ctypes.CDLL(str(path)) for path in runtime_libraries())
