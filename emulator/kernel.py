"""Compiled kernels as functions of CPU tensors."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import itertools
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from emulator import ptx
from sage_cute.compile.kernel import ARCH_VARIABLE, DEFAULT_ARCH

HERE = Path(__file__).parent
_FOLDER = tempfile.TemporaryDirectory(prefix="sage-cute-emulator-", ignore_cleanup_errors=True)
_modules = itertools.count(1)
_seed = 0


class EmulatorError(RuntimeError):
    """A kernel did what it must not do; the message says which line of its PTX, and why."""


def _compile(sources: list[str], target: Path, *options: str) -> None:
    command = [os.environ.get("CXX", "g++"), "-std=c++20", "-shared", "-fPIC", *options]
    done = subprocess.run([*command, "-o", str(target), *sources], capture_output=True, text=True)
    if done.returncode:
        raise EmulatorError(f"{' '.join(command)}: {done.stderr}")


@functools.cache
def machine() -> ctypes.CDLL:
    """The machine, compiled for this computer: once a version and user."""
    source = HERE / "machine.cpp"
    key = hashlib.sha256(source.read_bytes()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"sage-cute-emulator-{os.geteuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.geteuid():
        folder = Path(_FOLDER.name)
    library = folder / f"libemulator-{key}.so"
    if not library.exists():
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            new = Path(scratch) / library.name
            # No contraction: what is two roundings on the GPU is two here.
            _compile([str(source)], new, "-O2", "-march=native", "-ffp-contract=off")
            os.replace(new, library)
    loaded = ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
    loaded.emulator_error.restype = ctypes.c_char_p
    return loaded


def keep_ptx() -> None:
    """Has the DSL compile for Hopper, and keep the PTX of what it compiles from now on."""
    os.environ.setdefault(ARCH_VARIABLE, DEFAULT_ARCH)
    from cutlass.cutlass_dsl import CuTeDSL

    variables = CuTeDSL._get_dsl().envar
    variables.keep_ptx = True
    variables._arch = DEFAULT_ARCH  # read at the import, which may have been earlier
    variables.dump_dir = _FOLDER.name


class Emulated:
    """A function that the DSL has compiled, on CPU tensors."""

    def __init__(self, function: Any, text: str | None = None) -> None:
        """Takes what ``cute.compile`` returned, with its PTX (see :func:`keep_ptx`) or another."""
        import tvm_ffi

        from sage_cute.compile.binary import runtime_libraries

        number = next(_modules)
        folder = Path(_FOLDER.name)
        module, library = folder / f"{number}.o", folder / f"{number}.so"
        function.export_to_c(str(module), "kernel")
        runtime = list(map(str, runtime_libraries()))
        for path in runtime:
            ctypes.CDLL(path)
        _compile(
            [str(HERE / "host.cpp"), str(module), machine()._name, *runtime],
            library,
            f"-DEMULATOR_MODULE={number}",
            "-Wl,-Bsymbolic",
        )
        self.ptx = function.__ptx__ if text is None else text
        for program in ptx.programs(self.ptx, lambda name: machine().emulator_op(name.encode())):
            register(number, program)
        self.call = tvm_ffi.load_module(str(library))["kernel"]

    def __call__(self, *args: Any, seed: int | None = None) -> None:
        """Runs to its end.

        Args:
            args: as for the function; tensors on the CPU.
            seed: of the order in which warps run and asynchronous work completes; 0: all at once.
                Default: one after another from that of :func:`seeded` on.

        Raises:
            EmulatorError: an access outside of the tensors, a deadlock, ...
        """
        tensors = [x for x in args if isinstance(x, Tensor)]
        bounds = sorted(set(map(_bounds, tensors)))
        flat = (ctypes.c_uint64 * (2 * len(bounds)))(*itertools.chain(*bounds))
        machine().emulator_ranges(flat, ctypes.c_int64(len(bounds)))
        machine().emulator_start(ctypes.c_uint32(_next_seed() if seed is None else seed))
        keep: list[Any] = []
        converted = [_as_cuda(x, keep) if isinstance(x, Tensor) else x for x in args]
        try:
            self.call(*converted)
        except Exception as error:
            if not machine().emulator_error():
                raise EmulatorError(str(error)) from error
        if message := machine().emulator_error().decode():
            raise EmulatorError(self.explain(message))

    def explain(self, message: str) -> str:
        """The message with the lines of PTX that it names."""
        lines = self.ptx.splitlines()
        named = dict.fromkeys(int(n) for n in re.findall(r"line (\d+)", message))
        return "\n".join([message, *(f"    {n}: {lines[n - 1].strip()[:200]}" for n in named)])


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Calls that name no seed have this one and, unless it is 0, those behind it; 0 without."""
    global _seed
    before, _seed = _seed, seed
    try:
        yield
    finally:
        _seed = before


def _next_seed() -> int:
    global _seed
    seed = _seed
    _seed += bool(seed)
    return seed


def register(module: int, program: ptx.Program) -> None:
    """Gives a program to the machine."""

    def pointer(array: Any) -> ctypes.c_void_p:
        return ctypes.c_void_p(array.ctypes.data)

    size = ctypes.c_int64
    machine().emulator_program(
        module, program.name.encode(), pointer(program.instructions),
        size(len(program.instructions)), pointer(program.lists), size(len(program.lists)),
        pointer(program.values), size(len(program.values)), pointer(program.params),
        size(len(program.params)), ctypes.c_int32(program.units),
    )  # fmt: skip


def _bounds(x: Tensor) -> tuple[int, int]:
    storage = x.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()


class _DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int),
        ("device_id", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _DLManagedTensor(ctypes.Structure):
    _fields_ = [("tensor", _DLTensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


_DLPACK_CODES = {
    torch.int8: 0, torch.int32: 0, torch.int64: 0, torch.uint8: 1, torch.float16: 2,
    torch.float32: 2, torch.float64: 2, torch.bfloat16: 4,
}  # fmt: skip
_CUDA = 2
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype, _new_capsule.argtypes = (
    ctypes.py_object,
    [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p],
)


def _as_cuda(x: Tensor, keep: list[Any]) -> Any:
    """A CPU tensor as TVM-FFI has it, said to be on a GPU: the host code asks for one."""
    import tvm_ffi

    sizes = (ctypes.c_int64 * x.dim())(*x.shape)
    strides = (ctypes.c_int64 * x.dim())(*x.stride())
    managed = _DLManagedTensor(
        _DLTensor(
            x.data_ptr(), _CUDA, 0, x.dim(), _DLPACK_CODES[x.dtype], 8 * x.element_size(), 1,
            sizes, strides, 0,
        ),
        None,
        None,
    )  # fmt: skip
    keep.append((managed, x))

    class Holder:
        def __dlpack_device__(self) -> tuple[int, int]:
            return _CUDA, 0

        def __dlpack__(self, **_: Any) -> Any:
            return _new_capsule(ctypes.addressof(managed), b"dltensor", None)

    return tvm_ffi.from_dlpack(Holder())


def emulate(build: Callable[[Any], Any], plan: Any) -> Emulated:
    """The kernel of a plan on the CPU: ``build`` compiles it (see ``compile.kernel.Kernel``)."""
    keep_ptx()
    return Emulated(build(plan))
