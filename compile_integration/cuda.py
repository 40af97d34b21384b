"""The ops on CUDA tensors: quantization and attention kernels on the current stream.

A forward allocates its outputs and a workspace, nothing else: V^T in INT8 (one byte an element,
keys padded to 128) with its scales, the partial sums of K's mean, and in ``attn_infer``, which
returns no codes, the codes of Q and K. A backward allocates its outputs and the workspace that
``sage_cute.compile.bwd_launch.workspace_shapes`` lists. No data is read on the host: a CUDA graph
can capture it. Of a packed batch, tokens of no sequence are zeros before the kernels run (-inf in
lse), which do not write them.
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
    window_of,
)
from sage_cute.compile_integration.schema import LIB
from sage_cute.numerics.visibility import Visibility, only
from sage_cute.policies import resolve

_CODES = ("q_codes", "q_scale", "k_codes", "k_scale", "k_mean")


def _on_device_of(x: Tensor) -> contextlib.AbstractContextManager[None]:
    """Ops get no device guard from torch: the current stream must be that of x's device."""
    elsewhere = x.device.index != torch.cuda.current_device()
    return torch.cuda.device(x.device) if elsewhere else contextlib.nullcontext()


def _int32(x: Tensor) -> Tensor:
    return x.to(torch.int32).contiguous()


def _sight(x: Any, rows: Tensor, columns: Tensor) -> dict[str, Any]:
    """Which keys queries see, as launches take it. rows and columns: of Q and of K or V."""
    from sage_cute.compile.visibility import Packed

    packed = lengths = None
    if isinstance(x, (varlen.Forward, varlen.Backward)):
        longest_q = rows.shape[2] if x.max_seqlen_q is None else x.max_seqlen_q
        longest_k = columns.shape[2] if x.max_seqlen_k is None else x.max_seqlen_k
        cu_q, cu_k = _int32(x.cu_seqlens_q), _int32(x.cu_seqlens_k)
        packed = Packed(cu_q, cu_k, longest_q, longest_k)
    elif x.key_lengths is not None:
        lengths = _int32(x.key_lengths)
    return {
        "is_causal": x.is_causal,
        "window": window_of(x.window_left, x.window_right),
        "key_lengths": lengths,
        "packed": packed,
    }


def _batched(x: Tensor) -> Tensor:
    """(total, heads, head_dim) or (heads, total) as a batch of one: (1, heads, total, ...)."""
    return (x.transpose(0, 1) if x.dim() == 3 else x).unsqueeze(0)


def _launch(x: Any, out: Tensor, lse: Tensor, given: dict[str, Tensor]) -> None:
    """Quantizes and attends into ``out`` and ``lse``; ``given`` are outputs to quantize into.

    All as kernels take them: (batch, heads, tokens, ...).
    """
    # Here, so that importing the package stays as light as it is without a GPU.
    from sage_cute.compile.launch import V_SCALE_FORM, forward
    from sage_cute.compile.quant_launch import output_shapes, quant_spec, quantize
    from sage_cute.compile.tensors import new_tensors, readable
    from sage_cute.compile.visibility import Visibility as Sight
    from sage_cute.tune.select import tile_config_of

    q, k, v = x.q, x.k, x.v
    if q.dim() == 3:
        q, k, v = _batched(q), _batched(k), _batched(v)
    mix, how = resolve(x.policy), _sight(x, q, k)
    sight, packed = Sight(**how), how["packed"]
    # Configurations are tuned for dense batches.
    config = tile_config_of("fwd", x.policy, q, k, x.is_causal) if sight.is_dense else None
    mean_given = x.k_mean is not None and mix.smooth_k
    if mean_given:
        given["k_mean"].copy_(x.k_mean)
    spec = quant_spec(mix, q.dtype, q.shape[3], V_SCALE_FORM, sight.static, mean_given=mean_given)
    sizes = () if packed is None else (packed.sequences, packed.max_k)
    shapes = output_shapes(spec, q.shape, k.shape, *sizes)
    missing = {name: shape for name, shape in shapes.items() if name not in given}
    buffers = new_tensors(q, missing) | {name: given[name] for name in shapes if name in given}
    if mix.q_scale == "per_block" and sight.is_dense:  # as the reference does, see there
        q = only(q, Visibility.of(q.shape[2], k.shape[2], sight.static.is_causal).seeing())
    with _on_device_of(q):
        quantize(
            readable(q),
            readable(k),
            readable(v),
            policy=mix,
            v_scale_form=V_SCALE_FORM,
            mean_given=mean_given,
            **how,
            **buffers,
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
            scale=default_scale(q, x.scale),
            policy=mix,
            config=config,
            **how,
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


def varlen_fwd_cuda(*inputs: Any) -> tuple[Tensor, ...]:
    """``attn_varlen_fwd`` by the kernels."""
    outputs = varlen.fwd_fake(*inputs)
    out, lse, q_codes, k_codes, q_scale, k_scale, _, k_mean = outputs
    codes = (q_codes, q_scale, k_codes, k_scale)
    given = dict(zip(_CODES, (*map(_batched, codes), k_mean), strict=True))
    _launch(varlen.Forward(*inputs), _batched(out.zero_()), _batched(_unseen(lse)), given)
    return outputs


def varlen_infer_cuda(*inputs: Any) -> Tensors3:
    """``attn_varlen_infer`` by the kernels."""
    outputs = varlen.infer_fake(*inputs)
    out, lse, k_mean = outputs
    given = {"k_mean": k_mean}
    _launch(varlen.Forward(*inputs), _batched(out.zero_()), _batched(_unseen(lse)), given)
    return outputs


def _unseen(lse: Tensor) -> Tensor:
    return lse.fill_(-torch.inf)


def backward_cuda(*inputs: Any) -> Tensors3:
    """``attn_backward`` by the kernels, which all work on codes, not on q, k and their means."""
    outputs = backward_fake(*inputs)
    _launch_backward(Backward(*inputs), outputs)
    return outputs


def varlen_backward_cuda(*inputs: Any) -> Tensors3:
    """``attn_varlen_backward`` by the kernels."""
    outputs = varlen.backward_fake(*inputs)
    x = varlen.Backward(*inputs)
    names = ("dout", "v", "out", "lse", "q_codes", "k_codes", "q_scale", "k_scale")
    batched: dict[str, Any] = {name: _batched(getattr(x, name)) for name in names}
    batched["dlse"] = None if x.dlse is None else _batched(x.dlse)
    x = x._replace(**batched)
    dq, dk, dv = outputs
    _launch_backward(x, (_batched(dq.zero_()), _batched(dk.zero_()), _batched(dv.zero_())))
    return outputs


def _launch_backward(x: Any, gradients: Tensors3) -> None:
    """Gradients as kernels take them: (batch, heads, tokens, head_dim)."""
    from sage_cute.compile.bwd_launch import backward
    from sage_cute.compile.visibility import Visibility as Sight
    from sage_cute.tune.select import tile_config_of

    how = _sight(x, x.out, x.v)
    dense = Sight(**how).is_dense
    config = tile_config_of("bwd", x.policy, x.out, x.v, x.is_causal) if dense else None
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
            *gradients,
            scale=default_scale(x.out, x.scale),
            policy=resolve(x.policy),
            config=config,
            **how,
        )


IMPLEMENTATIONS = {
    "attn_fwd": fwd_cuda,
    "attn_infer": infer_cuda,
    "attn_backward": backward_cuda,
    "attn_varlen_fwd": varlen_fwd_cuda,
    "attn_varlen_infer": varlen_infer_cuda,
    "attn_varlen_backward": varlen_backward_cuda,
}
for _name, _body in IMPLEMENTATIONS.items():
    LIB.impl(_name, _body, "CUDA")
