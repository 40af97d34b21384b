"""Turns plans into callables: from memory, a folder built ahead, the cache, or by compiling."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from sage_cute.compile import aot
from sage_cute.compile.cache import kernel_cache
from sage_cute.compile.kernel import DEFAULT_ARCH, Kernel
from sage_cute.compile.plan import CompilePlan
from sage_cute.compile.visibility import numbers, vectors

log = logging.getLogger("sage_cute")
_LOCK = threading.Lock()
_LOADED: dict[tuple[str, Any], Any] = {}


def load(kind: str, plan: Any, build: Callable[[Any], Any]) -> Any:
    """The callable of a plan, which takes tensors through TVM-FFI. Cheap after the first call.

    Args:
        kind: of kernel, as in :class:`sage_cute.compile.kernel.Kernel`.
        plan: everything that the kernel is compiled from.
        build: compiles it; of module level.

    Raises:
        KernelError: it was not built ahead of time, and the DSL is not there to compile it.
    """
    function = _LOADED.get((kind, plan))
    if function is None:
        with _LOCK:  # one compilation at a time: the DSL traces with global state
            function = _LOADED.get((kind, plan))
            if function is None:
                function = _LOADED[kind, plan] = _find_or_compile(Kernel(kind, plan, build))
    return function


def _find_or_compile(kernel: Kernel) -> Any:
    function = aot.find(kernel)
    if function is not None:
        return function
    cache = kernel_cache()
    if cache is None:
        return compile_kernel(kernel)
    function = cache.load(kernel)
    if function is not None:
        return function
    with cache.lock(kernel):
        function = cache.load(kernel)  # another process may have been faster
        if function is None:
            function = compile_kernel(kernel)
            cache.store(kernel, function)
    return function


def compile_kernel(kernel: Kernel) -> Any:
    """Compiles a kernel, whatever exists already. One at a time in a process.

    Raises:
        KernelError: the DSL is not installed.
    """
    os.environ.setdefault("CUTE_DSL_ARCH", DEFAULT_ARCH)
    aot.require_compiler(kernel)
    start = time.perf_counter()
    function = kernel.build(kernel.plan)
    log.info("%s: compiled in %.1f s", kernel.name, time.perf_counter() - start)
    return function


def compiled(plan: CompilePlan) -> Any:
    """The callable of a forward plan."""
    return load("fwd", plan, compile_plan)


def compile_plan(plan: CompilePlan) -> Any:
    """Compiles a plan, whatever has been compiled before."""
    os.environ.setdefault("CUTE_DSL_ARCH", plan.arch.name)

    import cutlass
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

    from sage_cute.templates.sm90.fwd import SageFwdSm90

    problem = plan.problem
    d = problem.head_dim
    dtype = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16}[problem.dtype]
    batch, heads, kv_heads = cute.sym_int(), cute.sym_int(), cute.sym_int()
    seqlen_q, seqlen_k = cute.sym_int(), cute.sym_int()

    def fake(element: Any, *shape: Any, divisible: int = 1, align: int = 4) -> Any:
        strides = [cute.sym_int64(divisibility=divisible) for _ in shape[1:]]
        return make_fake_tensor(element, shape, (*strides, 1), assumed_align=align)

    def scales(n_heads: Any) -> Any:
        return fake(cutlass.Float32, batch, n_heads, cute.sym_int())

    int8, uint8 = cutlass.Int8, cutlass.Uint8
    tensors = (
        fake(int8, batch, heads, seqlen_q, d, divisible=16, align=16),
        scales(heads),
        fake(int8, batch, kv_heads, seqlen_k, d, divisible=16, align=16),
        scales(kv_heads),
        fake(uint8, batch, kv_heads, d, cute.sym_int(divisibility=128), divisible=16, align=16),
        scales(kv_heads),
        fake(dtype, batch, heads, seqlen_q, d, divisible=8, align=16),
        fake(cutlass.Float32, batch, heads, seqlen_q),
    )
    max_q, _ = numbers(problem.lengths == "packed")
    return cute.compile(
        SageFwdSm90(problem, plan.config),
        *tensors,
        cutlass.Float32(0.0),
        cutlass.Int32(1),
        *numbers(problem.window),
        *vectors(problem.lengths),
        max_q,
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options="--enable-tvm-ffi",
    )
