"""The kernel-level ops of packed batches: ``attn_varlen_fwd``, ``_infer`` and ``_backward``.

As in ``ops``: one allocator for the fake rule and the implementation. Where sequences start is data
on the device: shapes depend on the number of sequences alone.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from sage_cute.compile_integration.ops import (
    Tensors3,
    check_gradient,
    default_scale,
    fill,
    new_saved,
    window_of,
)
from sage_cute.compile_integration.schema import LIB, NAMESPACE
from sage_cute.numerics import (
    SageForward,
    Saved,
    sage_backward_varlen,
    sage_forward_varlen,
    saved_shapes_varlen,
)
from sage_cute.policies import resolve
from sage_cute.support import (
    check_backward,
    check_cu_seqlens,
    check_cu_seqlens_values,
    check_forward,
    check_inputs,
    check_k_mean,
    check_window,
    extras,
)


class Forward(NamedTuple):
    """The arguments of ``attn_varlen_fwd`` and ``attn_varlen_infer``."""

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float | None
    is_causal: bool
    policy: str
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int | None
    max_seqlen_k: int | None
    window_left: int = -1
    window_right: int = -1
    k_mean: Tensor | None = None

    @property
    def saved_shapes(self) -> dict[str, tuple[int, ...]]:
        """What is saved for the backward."""
        sequences = self.cu_seqlens_q.shape[0] - 1
        return saved_shapes_varlen(self.q.shape, self.k.shape, sequences, resolve(self.policy))

    def check(self) -> None:
        """Raises what is wrong with the arguments, or is not implemented on their device."""
        check_inputs(self.q, self.k, self.v, self.scale, packed=True)
        check_cu_seqlens(self.cu_seqlens_q, self.cu_seqlens_k, self.q)
        check_window(self.window_left, self.window_right)
        check_k_mean(self.k_mean, self.k, self.policy, self.cu_seqlens_q.shape[0] - 1)
        more = extras(self.window_left, self.window_right, k_mean=self.k_mean, packed=True)
        check_forward(self.q, self.is_causal, self.policy, more)

    def compute(self) -> SageForward:
        """The reference numerics."""
        check_cu_seqlens_values("q", self.cu_seqlens_q, self.q.shape[0], self.max_seqlen_q)
        check_cu_seqlens_values("k", self.cu_seqlens_k, self.k.shape[0], self.max_seqlen_k)
        return sage_forward_varlen(
            self.q,
            self.k,
            self.v,
            self.cu_seqlens_q,
            self.cu_seqlens_k,
            scale=default_scale(self.q, self.scale),
            causal=self.is_causal,
            policy=resolve(self.policy),
            window=window_of(self.window_left, self.window_right),
            k_mean=self.k_mean,
        )


class Backward(NamedTuple):
    """The arguments of ``attn_varlen_backward``."""

    dout: Tensor
    dlse: Tensor | None
    q: Tensor | None
    k: Tensor | None
    v: Tensor
    out: Tensor
    lse: Tensor
    q_codes: Tensor
    k_codes: Tensor
    q_scale: Tensor
    k_scale: Tensor
    q_mean: Tensor
    k_mean: Tensor
    scale: float | None
    is_causal: bool
    policy: str
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int | None
    max_seqlen_k: int | None
    window_left: int = -1
    window_right: int = -1

    def check(self) -> None:
        """Raises what is wrong with the arguments, or is not implemented on their device."""
        more = extras(self.window_left, self.window_right, packed=True)
        check_backward(self.v, self.is_causal, self.policy, more)
        check_gradient(self.dout, self.out, self.q, self.k, self.policy)


def fwd_fake(*inputs: Any) -> tuple[Tensor, ...]:
    """Outputs of ``attn_varlen_fwd``, not computed."""
    x = Forward(*inputs)
    x.check()
    total, heads, _ = x.q.shape
    out = x.q.new_empty(x.q.shape)
    lse = x.q.new_empty((heads, total), dtype=torch.float32)
    return out, lse, *new_saved(x.q, x.saved_shapes)


def infer_fake(*inputs: Any) -> Tensors3:
    """Outputs of ``attn_varlen_infer``, not computed."""
    x = Forward(*inputs)
    x.check()
    total, heads, _ = x.q.shape
    return (
        x.q.new_empty(x.q.shape),
        x.q.new_empty((heads, total), dtype=torch.float32),
        x.q.new_empty(x.saved_shapes["k_mean"], dtype=torch.float32),
    )


def backward_fake(*inputs: Any) -> Tensors3:
    """Outputs of ``attn_varlen_backward``, not computed."""
    x = Backward(*inputs)
    x.check()
    return x.out.new_empty(x.out.shape), x.v.new_empty(x.v.shape), x.v.new_empty(x.v.shape)


def fwd_cpu(*inputs: Any) -> tuple[Tensor, ...]:
    """``attn_varlen_fwd`` by the reference numerics."""
    outputs = fwd_fake(*inputs)
    out, lse, saved = Forward(*inputs).compute()
    fill(outputs, (out, lse, *saved))
    return outputs


def infer_cpu(*inputs: Any) -> Tensors3:
    """``attn_varlen_infer`` by the reference numerics."""
    outputs = infer_fake(*inputs)
    out, lse, saved = Forward(*inputs).compute()
    fill(outputs, (out, lse, saved.k_mean))
    return outputs


def backward_cpu(*inputs: Any) -> Tensors3:
    """``attn_varlen_backward`` by the reference numerics."""
    outputs = backward_fake(*inputs)
    x = Backward(*inputs)
    grads = sage_backward_varlen(
        x.dout,
        x.dlse,
        x.out if x.q is None else x.q,
        x.v if x.k is None else x.k,
        x.v,
        x.out,
        x.lse,
        Saved(x.q_codes, x.k_codes, x.q_scale, x.k_scale, x.q_mean, x.k_mean),
        x.cu_seqlens_q,
        x.cu_seqlens_k,
        scale=default_scale(x.out, x.scale),
        causal=x.is_causal,
        policy=resolve(x.policy),
        window=window_of(x.window_left, x.window_right),
    )
    fill(outputs, grads)
    return outputs


for _name, _fake, _cpu in (
    ("attn_varlen_fwd", fwd_fake, fwd_cpu),
    ("attn_varlen_infer", infer_fake, infer_cpu),
    ("attn_varlen_backward", backward_fake, backward_cpu),
):
    torch.library.register_fake(f"{NAMESPACE}::{_name}", _fake, lib=LIB)
    LIB.impl(_name, _cpu, "CPU")
