"""The ops on CUDA tensors: quantization and attention kernels on the current stream.

A forward allocates its outputs and a workspace, nothing else: V^T in INT8 (one byte an element,
keys padded to 128) with its scales, the partial sums of K's mean, and in ``attn_infer``, which
returns no codes, the codes of Q and K. A backward allocates its outputs and the workspace that
``sage_cute.compile.bwd_launch.workspace_shapes`` lists. No data is read on the host: a CUDA graph
can capture it.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

from sage_cute.compile_integration import varlen
from sage_cute.compile_integration.ops import (
    Backward,
    Forward,
    Tensors3,
    backward_fake,
    default_scale,
    fwd_fake,
    infer_fake,
)
from sage_cute.compile_integration.schema import LIB
from sage_cute.numerics.visibility import Visibility, only
from sage_cute.policies import resolve

_CODES = ("q_codes", "q_scale", "k_codes", "k_scale", "k_mean")


def _on_device_of(x: Tensor) -> contextlib.AbstractContextManager[None]:
    """Ops get no device guard from torch: the current stream must be that of x's device."""
    elsewhere = x.device.index != torch.cuda.current_device()
    return torch.cuda.device(x.device) if elsewhere else contextlib.nullcontext()


def _launch(x: Forward, out: Tensor, lse: Tensor, given: dict[str, Tensor]) -> None:
    """Quantizes and attends into ``out`` and ``lse``; ``given`` are outputs to quantize into."""
    # Here, so that importing the package stays as light as it is without a GPU.
    from sage_cute.compile.launch import V_SCALE_FORM, forward
    from sage_cute.compile.quant_launch import output_shapes, quant_spec, quantize
    from sage_cute.compile.tensors import readable
    from sage_cute.tune.select import tile_config_of

    q, k, v, is_causal = x.q, x.k, x.v, x.is_causal
    config, mix = tile_config_of("fwd", x.policy, q, k, is_causal), resolve(x.policy)
    spec = quant_spec(mix, q.dtype, q.shape[3], V_SCALE_FORM)
    buffers = {
        name: given[name] if name in given else q.new_empty(shape, dtype=dtype)
        for name, (shape, dtype) in output_shapes(spec, q.shape, k.shape).items()
    }
    if mix.q_scale == "per_block":  # as the reference does, see there
        q = only(q, Visibility.of(q.shape[2], k.shape[2], is_causal).seeing())
    with _on_device_of(q):
        quantize(*map(readable, (q, k, v)), policy=mix, v_scale_form=V_SCALE_FORM, **buffers)
        forward(
            buffers["q_codes"],
            buffers["q_scale"],
            buffers["k_codes"],
            buffers["k_scale"],
            buffers["v_t"],
            buffers["v_scale"],
            out,
            lse,
            scale=default_scale(q, x.scale),
            is_causal=is_causal,
            policy=mix,
            config=config,
        )


def fwd_cuda(*inputs: Any) -> tuple[Tensor, ...]:
    """``attn_fwd`` by the kernels."""
    outputs = fwd_fake(*inputs)
    out, lse, q_codes, k_codes, q_scale, k_scale, _, k_mean = outputs
    given = dict(zip(_CODES, (q_codes, q_scale, k_codes, k_scale, k_mean), strict=True))
    _launch(Forward(*inputs), out, lse, given)
    return outputs


def infer_cuda(*inputs: Any) -> Tensors3:
    """``attn_infer`` by the kernels."""
    outputs = infer_fake(*inputs)
    out, lse, k_mean = outputs
    _launch(Forward(*inputs), out, lse, {"k_mean": k_mean})
    return outputs


def backward_cuda(*inputs: Any) -> Tensors3:
    """``attn_backward`` by the kernels, which all work on codes, not on q, k and their means."""
    from sage_cute.compile.bwd_launch import backward
    from sage_cute.tune.select import tile_config_of

    outputs = backward_fake(*inputs)
    x = Backward(*inputs)
    with _on_device_of(x.v):
        backward(
            x.dout.to(x.out.dtype),
            None if x.dlse is None else x.dlse.float(),
            x.v,
            x.out,
            x.lse,
            x.q_codes,
            x.k_codes,
            x.q_scale,
            x.k_scale,
            *outputs,
            scale=default_scale(x.out, x.scale),
            is_causal=x.is_causal,
            policy=resolve(x.policy),
            config=tile_config_of("bwd", x.policy, x.out, x.v, x.is_causal),
        )
    return outputs


LIB.impl("attn_fwd", fwd_cuda, "CUDA")
LIB.impl("attn_infer", infer_cuda, "CUDA")
LIB.impl("attn_backward", backward_cuda, "CUDA")
# Packed batches: their checks refuse every GPU, as long as there are no kernels.
LIB.impl("attn_varlen_fwd", varlen.fwd_fake, "CUDA")
LIB.impl("attn_varlen_infer", varlen.infer_fake, "CUDA")
LIB.impl("attn_varlen_backward", varlen.backward_fake, "CUDA")
