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
    new_saved,
    register,
    window_of,
)
from sage_cute.numerics import (
    Gradients,
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

    def compute(self) -> Gradients:
        """The reference numerics."""
        return sage_backward_varlen(
            self.dout,
            self.dlse,
            self.out if self.q is None else self.q,
            self.v if self.k is None else self.k,
            self.v,
            self.out,
            self.lse,
            Saved(self.q_codes, self.k_codes, self.q_scale, self.k_scale, self.q_mean, self.k_mean),
            self.cu_seqlens_q,
            self.cu_seqlens_k,
            scale=default_scale(self.out, self.scale),
            causal=self.is_causal,
            policy=resolve(self.policy),
            window=window_of(self.window_left, self.window_right),
        )


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


register("attn_varlen", (fwd_fake, infer_fake, backward_fake), Forward, Backward)
