"""The truth: softmax attention and its gradients in float64, by the textbook."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Attention(NamedTuple):
    """Output (batch, heads, seqlen_q, head_dim) and natural-log LSE (batch, heads, seqlen_q)."""

    out: Tensor
    lse: Tensor


class Gradients(NamedTuple):
    """Gradients in the shapes of q, k and v."""

    dq: Tensor
    dk: Tensor
    dv: Tensor


class Intermediates(NamedTuple):
    """P, dP and dS (batch, heads, seqlen_q, seqlen_k) and delta (batch, heads, seqlen_q)."""

    p: Tensor
    dp: Tensor
    ds: Tensor
    delta: Tensor


def visible(
    seqlen_q: int,
    seqlen_k: int,
    causal: bool,
    device: torch.device,
    window: tuple[int | None, int | None] = (None, None),
) -> Tensor:
    """Which keys a query sees, (seqlen_q, seqlen_k) bool.

    Masks are aligned bottom-right: query i stands at p = i + seqlen_k - seqlen_q. It sees key j iff
    p - left <= j <= p + right in a window (left, right), where None is without end, and j <= p if
    causal.
    """
    position = torch.arange(seqlen_q, device=device).unsqueeze(-1) + seqlen_k - seqlen_q
    key = torch.arange(seqlen_k, device=device)
    mask = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=device)
    left, right = window
    if left is not None:
        mask &= key >= position - left
    if right is not None:
        mask &= key <= position + right
    return mask & (key <= position) if causal else mask


def _expand_heads(x: Tensor, heads: int) -> Tensor:
    """K or V, float64, with one head for every query head."""
    return x.double().repeat_interleave(heads // x.shape[1], 1) if x.shape[1] else x.double()


class _Problem:
    """What the forward and the backward share: K and V a query head, the mask, P and the LSE."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float | None,
        causal: bool,
        window: tuple[int | None, int | None],
        key_lengths: Tensor | None,
    ) -> None:
        self.scale = q.shape[-1] ** -0.5 if scale is None else scale
        self.k, self.v = _expand_heads(k, q.shape[1]), _expand_heads(v, q.shape[1])
        mask = visible(q.shape[2], k.shape[2], causal, q.device, window)
        if key_lengths is not None:
            there = torch.arange(k.shape[2], device=q.device) < key_lengths[:, None, None, None]
            mask = mask & there
            padded = ~there.mT
            self.k, self.v = self.k.masked_fill(padded, 0), self.v.masked_fill(padded, 0)
        s = (q.double() @ self.k.mT * self.scale).masked_fill(~mask, -torch.inf)
        self.lse = torch.logsumexp(s, -1) if k.shape[2] else s.new_full(s.shape[:-1], -torch.inf)
        self.p = torch.exp(s - self.lse.unsqueeze(-1)).masked_fill(~mask, 0.0)


@torch.no_grad()
def attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] = (None, None),
    key_lengths: Tensor | None = None,
) -> Attention:
    """Attention of q (batch, heads, seqlen_q, head_dim), k and v (batch, kv_heads, seqlen_k, ...).

    Everything is float64. A query that sees no key gets out = 0 and lse = -inf. Of each k and v of
    a batch only the first ``key_lengths`` (batch,) tokens count, if given.
    """
    x = _Problem(q, k, v, scale, causal, window, key_lengths)
    return Attention(x.p @ x.v, x.lse)


@torch.no_grad()
def attention_reference_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    dlse: Tensor | None = None,
    scale: float | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] = (None, None),
    key_lengths: Tensor | None = None,
) -> tuple[Gradients, Intermediates]:
    """Gradients of ``attention_reference`` for dout (as out) and dlse (as lse), float64.

    dS = P * (dP - delta) with delta = rowsum(dO * O) - dLSE; dQ = scale dS K, dK = scale dS^T Q,
    dV = P^T dO; dK and dV are summed over the query heads of a key head.
    """
    x, dout = _Problem(q, k, v, scale, causal, window, key_lengths), dout.double()
    dp = dout @ x.v.mT
    delta = (dout * (x.p @ x.v)).sum(-1)
    if dlse is not None:
        delta = delta - dlse.double()
    ds = x.p * (dp - delta.unsqueeze(-1))

    def over_group(grad: Tensor) -> Tensor:
        return grad.unflatten(1, (k.shape[1], -1)).sum(2) if k.shape[1] else grad

    grads = Gradients(
        ds @ x.k * x.scale, over_group(ds.mT @ q.double()) * x.scale, over_group(x.p.mT @ dout)
    )
    return grads, Intermediates(x.p, dp, ds, delta)
