"""The kernel-level ops: ``attn_fwd``, ``attn_infer`` and ``attn_backward``.

Each has one allocator, which its fake rule and its implementations share, so that shapes, strides
and dtypes cannot differ between them. Bodies check, allocate and compute, and nothing else.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sage_cute.compile_integration.schema import LIB, NAMESPACE
from sage_cute.errors import ShapeError
from sage_cute.numerics import Saved, sage_backward, sage_forward, saved_shapes
from sage_cute.policies import Policy, resolve
from sage_cute.support import check_backward, check_forward, check_inputs

Tensors3 = tuple[Tensor, Tensor, Tensor]


def default_scale(q: Tensor, scale: float | None) -> float:
    """The softmax scale, head_dim ** -0.5 unless given: None costs no recompile, a float one."""
    return q.shape[-1] ** -0.5 if scale is None else scale


def _dense_like(x: Tensor) -> Tensor:
    """A new dense tensor with the shape of x and its order of heads and tokens in memory.

    Not ``empty_like``: fake and real tensors differ there on the strides of dimensions of size 1.
    """
    b, h, s, d = x.shape
    bshd = 0 < x.stride(1) < x.stride(2)
    strides = (s * h * d, d, h * d, 1) if bshd else (h * s * d, s * d, d, 1)
    return x.new_empty_strided((b, h, s, d), strides)


def _alloc_fwd(q: Tensor, k: Tensor, policy: Policy) -> tuple[Tensor, ...]:
    shapes = saved_shapes(q.shape, k.shape, policy)
    return (
        _dense_like(q),
        q.new_empty(q.shape[:3], dtype=torch.float32),
        q.new_empty(shapes["q_codes"], dtype=torch.int8),
        q.new_empty(shapes["k_codes"], dtype=torch.int8),
        q.new_empty(shapes["q_scale"], dtype=torch.float32),
        q.new_empty(shapes["k_scale"], dtype=torch.float32),
        q.new_empty(shapes["q_mean"], dtype=torch.float32),
        q.new_empty(shapes["k_mean"], dtype=torch.float32),
    )


def _alloc_infer(q: Tensor, k: Tensor, policy: Policy) -> Tensors3:
    head_dim = k.shape[3] if policy.smooth_k else 0
    return (
        _dense_like(q),
        q.new_empty(q.shape[:3], dtype=torch.float32),
        q.new_empty((*k.shape[:2], head_dim), dtype=torch.float32),
    )


def _alloc_backward(out: Tensor, v: Tensor) -> Tensors3:
    return _dense_like(out), _dense_like(v), _dense_like(v)


def _fill(outputs: tuple[Tensor, ...], values: tuple[Tensor, ...]) -> None:
    for output, value in zip(outputs, values, strict=True):
        output.copy_(value)


def fwd_fake(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, is_causal: bool, policy: str
) -> tuple[Tensor, ...]:
    """Outputs of ``attn_fwd``, not computed."""
    check_inputs(q, k, v, scale)
    check_forward(q, is_causal, policy)
    return _alloc_fwd(q, k, resolve(policy))


def infer_fake(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, is_causal: bool, policy: str
) -> Tensors3:
    """Outputs of ``attn_infer``, not computed."""
    check_inputs(q, k, v, scale)
    check_forward(q, is_causal, policy)
    return _alloc_infer(q, k, resolve(policy))


def backward_fake(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor | None,
    k: Tensor | None,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    q_codes: Tensor,
    k_codes: Tensor,
    q_scale: Tensor,
    k_scale: Tensor,
    q_mean: Tensor,
    k_mean: Tensor,
    scale: float | None,
    is_causal: bool,
    policy: str,
) -> Tensors3:
    """Outputs of ``attn_backward``, not computed."""
    check_backward(v, is_causal, policy)
    if dout.shape != out.shape:
        raise ShapeError(
            f"sage.attn_backward: dout {tuple(dout.shape)} must have the shape of out "
            f"{tuple(out.shape)}"
        )
    mix = resolve(policy)
    if (q is None and not mix.saves_q_codes) or (k is None and not mix.saves_k_codes):
        raise ShapeError(
            f"sage.attn_backward: policy {policy!r} does not save codes of q and k: pass q and k"
        )
    return _alloc_backward(out, v)


def fwd_cpu(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, is_causal: bool, policy: str
) -> tuple[Tensor, ...]:
    """``attn_fwd`` by the reference numerics."""
    outputs = fwd_fake(q, k, v, scale, is_causal, policy)
    scale, mix = default_scale(q, scale), resolve(policy)
    out, lse, saved = sage_forward(q, k, v, scale=scale, causal=is_causal, policy=mix)
    _fill(outputs, (out, lse, *saved))
    return outputs


def infer_cpu(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, is_causal: bool, policy: str
) -> Tensors3:
    """``attn_infer`` by the reference numerics."""
    outputs = infer_fake(q, k, v, scale, is_causal, policy)
    scale, mix = default_scale(q, scale), resolve(policy)
    out, lse, saved = sage_forward(q, k, v, scale=scale, causal=is_causal, policy=mix)
    _fill(outputs, (out, lse, saved.k_mean))
    return outputs


def backward_cpu(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor | None,
    k: Tensor | None,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    q_codes: Tensor,
    k_codes: Tensor,
    q_scale: Tensor,
    k_scale: Tensor,
    q_mean: Tensor,
    k_mean: Tensor,
    scale: float | None,
    is_causal: bool,
    policy: str,
) -> Tensors3:
    """``attn_backward`` by the reference numerics."""
    saved = Saved(q_codes, k_codes, q_scale, k_scale, q_mean, k_mean)
    outputs = backward_fake(dout, dlse, q, k, v, out, lse, *saved, scale, is_causal, policy)
    grads = sage_backward(
        dout,
        dlse,
        out if q is None else q,
        v if k is None else k,
        v,
        out,
        lse,
        saved,
        scale=default_scale(out, scale),
        causal=is_causal,
        policy=resolve(policy),
    )
    _fill(outputs, grads)
    return outputs


for _name, _fake, _cpu in (
    ("attn_fwd", fwd_fake, fwd_cpu),
    ("attn_infer", infer_fake, infer_cpu),
    ("attn_backward", backward_fake, backward_cpu),
):
    torch.library.register_fake(f"{NAMESPACE}::{_name}", _fake, lib=LIB)
    LIB.impl(_name, _cpu, "CPU")
