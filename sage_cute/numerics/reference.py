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


def visible(seqlen_q: int, seqlen_k: int, causal: bool, device: torch.device) -> Tensor:
    """Which keys a query sees, (seqlen_q, seqlen_k) bool.

    Causal is aligned bottom-right: query i sees key j iff j <= i + seqlen_k - seqlen_q.
    """
    mask = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=device)
    return mask.tril(seqlen_k - seqlen_q) if causal else mask


def _expand_heads(x: Tensor, heads: int) -> Tensor:
    """K or V, float64, with one head for every query head."""
    return x.double().repeat_interleave(heads // x.shape[1], 1) if x.shape[1] else x.double()


@torch.no_grad()
def attention_reference(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, causal: bool = False
) -> Attention:
    """Attention of q (batch, heads, seqlen_q, head_dim), k and v (batch, kv_heads, seqlen_k, ...).

    Everything is float64. A query that sees no key gets out = 0 and lse = -inf.
    """
    p, lse = _probabilities(q, k, scale, causal)
    return Attention(p @ _expand_heads(v, q.shape[1]), lse)


def _probabilities(
    q: Tensor, k: Tensor, scale: float | None, causal: bool
) -> tuple[Tensor, Tensor]:
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    s = q.double() @ _expand_heads(k, q.shape[1]).mT * scale
    mask = visible(q.shape[2], k.shape[2], causal, q.device)
    s = s.masked_fill(~mask, -torch.inf)
    lse = torch.logsumexp(s, -1) if k.shape[2] else s.new_full(s.shape[:-1], -torch.inf)
    return torch.exp(s - lse.unsqueeze(-1)).masked_fill(~mask, 0.0), lse


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
) -> tuple[Gradients, Intermediates]:
    """Gradients of ``attention_reference`` for dout (as out) and dlse (as lse), float64.

    dS = P * (dP - delta) with delta = rowsum(dO * O) - dLSE; dQ = scale dS K, dK = scale dS^T Q,
    dV = P^T dO; dK and dV are summed over the query heads of a key head.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    p, _ = _probabilities(q, k, scale, causal)
    dout, heads = dout.double(), q.shape[1]
    keys, values = _expand_heads(k, heads), _expand_heads(v, heads)
    dp = dout @ values.mT
    delta = (dout * (p @ values)).sum(-1)
    if dlse is not None:
        delta = delta - dlse.double()
    ds = p * (dp - delta.unsqueeze(-1))

    def over_group(grad: Tensor) -> Tensor:
        return grad.unflatten(1, (k.shape[1], -1)).sum(2) if k.shape[1] else grad

    grads = Gradients(
        ds @ keys * scale, over_group(ds.mT @ q.double()) * scale, over_group(p.mT @ dout)
    )
    return grads, Intermediates(p, dp, ds, delta)
