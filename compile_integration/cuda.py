"""The forward ops on CUDA tensors: quantization, then attention, on the current stream.

Not part of ``import sage_cute`` yet: importing this module registers the kernels. They passed their
own tests on an H200, tests/compile_integration/test_cuda.py has not run there; see docs/.

A call allocates its outputs and a workspace, nothing else: V^T in INT8 (one byte an element, keys
padded to 128) with its scales, the partial sums of K's mean, and in ``attn_infer``, which returns
no codes, the codes of Q and K. No data is read on the host: a CUDA graph can capture it.
"""

from __future__ import annotations

import contextlib
import warnings

import torch
from torch import Tensor

from sage_cute.compile_integration.ops import (
    Tensors3,
    default_scale,
    fwd_fake,
    infer_fake,
)
from sage_cute.compile_integration.schema import LIB
from sage_cute.policies import Policy, resolve
from sage_cute.support import register_cuda

_CODES = ("q_codes", "q_scale", "k_codes", "k_scale", "k_mean")


def _kernel_ready(x: Tensor) -> Tensor:
    """x, or a copy where the kernels cannot read it: 16 bytes at a time along head_dim."""
    step = 16 // x.element_size()
    strides = (s for s, n in zip(x.stride()[:3], x.shape[:3], strict=True) if n > 1)
    if x.stride(3) == 1 and x.data_ptr() % 16 == 0 and all(s % step == 0 for s in strides):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    is_causal: bool,
    policy: Policy,
    out: Tensor,
    lse: Tensor,
    given: dict[str, Tensor],
) -> None:
    """Quantizes and attends into ``out`` and ``lse``; ``given`` are outputs to quantize into."""
    # Here, so that importing the package stays as light as it is without a GPU.
    from sage_cute.compile.launch import V_SCALE_FORM, forward
    from sage_cute.compile.quant_launch import output_shapes, quant_spec, quantize

    spec = quant_spec(policy, q.dtype, q.shape[3], V_SCALE_FORM)
    buffers = {
        name: given[name] if name in given else q.new_empty(shape, dtype=dtype)
        for name, (shape, dtype) in output_shapes(spec, q.shape, k.shape).items()
    }
    # Ops get no device guard from torch: the current stream must be that of q's device.
    elsewhere = q.device.index != torch.cuda.current_device()
    with torch.cuda.device(q.device) if elsewhere else contextlib.nullcontext():
        quantize(
            *map(_kernel_ready, (q, k, v)), policy=policy, v_scale_form=V_SCALE_FORM, **buffers
        )
        forward(
            buffers["q_codes"],
            buffers["q_scale"],
            buffers["k_codes"],
            buffers["k_scale"],
            buffers["v_t"],
            buffers["v_scale"],
            out,
            lse,
            scale=default_scale(q, scale),
            is_causal=is_causal,
            policy=policy,
        )


def fwd_cuda(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, is_causal: bool, policy: str
) -> tuple[Tensor, ...]:
    """``attn_fwd`` by the kernels."""
    outputs = fwd_fake(q, k, v, scale, is_causal, policy)
    out, lse, q_codes, k_codes, q_scale, k_scale, _, k_mean = outputs
    given = dict(zip(_CODES, (q_codes, q_scale, k_codes, k_scale, k_mean), strict=True))
    _launch(q, k, v, scale, is_causal, resolve(policy), out, lse, given)
    return outputs


def infer_cuda(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, is_causal: bool, policy: str
) -> Tensors3:
    """``attn_infer`` by the kernels."""
    outputs = infer_fake(q, k, v, scale, is_causal, policy)
    out, lse, k_mean = outputs
    _launch(q, k, v, scale, is_causal, resolve(policy), out, lse, {"k_mean": k_mean})
    return outputs


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # that the kernels which only raise are replaced
    LIB.impl("attn_fwd", fwd_cuda, "CUDA", allow_override=True)
    LIB.impl("attn_infer", infer_cuda, "CUDA", allow_override=True)
register_cuda("forward")
