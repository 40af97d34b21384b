"""Compiles plans, once each in a process. Needs no GPU where ``CUTE_DSL_ARCH`` names the target."""

from __future__ import annotations

import os
import threading
from typing import Any

from sage_cute.compile.plan import CompilePlan

_LOCK = threading.Lock()
_COMPILED: dict[CompilePlan, Any] = {}


def compiled(plan: CompilePlan) -> Any:
    """The callable of a plan, compiled at the first call: takes tensors through TVM-FFI.

    One compilation at a time in a process: the DSL traces with global state.
    """
    kernel = _COMPILED.get(plan)
    if kernel is None:
        with _LOCK:
            kernel = _COMPILED.get(plan)
            if kernel is None:
                kernel = _COMPILED[plan] = compile_plan(plan)
    return kernel


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

    int8 = cutlass.Int8
    tensors = (
        fake(int8, batch, heads, seqlen_q, d, divisible=16, align=16),
        scales(heads),
        fake(int8, batch, kv_heads, seqlen_k, d, divisible=16, align=16),
        scales(kv_heads),
        fake(int8, batch, kv_heads, d, cute.sym_int(divisibility=128), divisible=16, align=16),
        scales(kv_heads),
        fake(dtype, batch, heads, seqlen_q, d, divisible=8, align=16),
        fake(cutlass.Float32, batch, heads, seqlen_q),
    )
    return cute.compile(
        SageFwdSm90(problem, plan.config),
        *tensors,
        cutlass.Float32(0.0),
        cutlass.Int32(1),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options="--enable-tvm-ffi",
    )
