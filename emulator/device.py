"""A GPU that is none: the launches of sage_cute on CPU tensors, their kernels emulated."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

from emulator.kernel import Emulated, emulate

PROPERTIES = SimpleNamespace(
    name="emulated", major=9, minor=0, multi_processor_count=3, total_memory=0
)
"""Few multiprocessors, so that the CTAs of persistent kernels have several tiles each."""
_kernels: dict[tuple[str, Any], Emulated] = {}


def load(kind: str, plan: Any, build: Callable[[Any], Any]) -> Emulated:
    """In the place of ``sage_cute.compile.compiler.load``."""
    if (kind, plan) not in _kernels:
        _kernels[kind, plan] = emulate(build, plan)
    return _kernels[kind, plan]


class _OnCpu(TorchFunctionMode):
    """Who asks for a tensor on a GPU gets one on the CPU."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = "cpu"
        return func(*("cpu" if _is_cuda(x) else x for x in args), **kwargs)


def _is_cuda(x: object) -> bool:
    return (isinstance(x, torch.device) and x.type == "cuda") or (
        isinstance(x, str) and x.split(":")[0] == "cuda"
    )


@contextlib.contextmanager
def emulated_gpu(ops: bool = True) -> Iterator[None]:
    """Within it the launches take CPU tensors, ``"cuda"`` is the CPU, and so do the ops.

    Args:
        ops: ``torch.ops.sage`` on CPU tensors are the CUDA implementations.
    """
    import sage_cute.compile_integration.cuda as cuda
    from sage_cute.compile import compiler

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(compiler, "load", load))
        for name, result in (
            ("current_device", None),  # as CPU tensors' devices have it
            ("get_device_properties", PROPERTIES),
            ("synchronize", None),
        ):
            stack.enter_context(mock.patch.object(torch.cuda, name, lambda *_, r=result: r))
        if ops:
            stack.enter_context(_cuda_ops(cuda))
        stack.enter_context(_OnCpu())
        yield


@contextlib.contextmanager
def _cuda_ops(cuda: Any) -> Iterator[None]:
    from sage_cute.compile_integration.schema import NAMESPACE

    library = torch.library.Library(NAMESPACE, "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Warning only once for all operators", UserWarning)
            for name, body in cuda.IMPLEMENTATIONS.items():
                library.impl(name, body, "CPU", allow_override=True)
        yield
    finally:
        library._destroy()
