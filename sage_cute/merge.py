"""Attention over a set of keys out of attention over its parts."""

from __future__ import annotations

import torch
from torch import Tensor

from sage_cute.errors import ShapeError


def merge_attention(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor
) -> tuple[Tensor, Tensor]:
    """Attention over the union of two disjoint sets of keys, from attention over each.

    ``exp(lse) = exp(lse_a) + exp(lse_b)`` and ``out = sum_x exp(lse_x - lse) out_x``: what ring and
    context parallelism do with the parts of K and V that they see one after the other. Plain torch,
    differentiable in all four, associative up to rounding. A part of which a query sees no key
    (lse = -inf) contributes nothing, whatever its out holds, and gets no gradient; with neither,
    out = 0 and lse = -inf.

    Args:
        out_a: (..., seqlen, head_dim), any layout in which lse is out without its last dimension.
        lse_a: (..., seqlen) float32, natural logarithm: ``attention(..., return_lse=True)``.
        out_b: like out_a.
        lse_b: like lse_a.

    Returns:
        out in out_a's dtype (the sum is float32) and lse in float32.

    Raises:
        ShapeError: (a ValueError) shapes do not fit together.
    """
    if out_a.shape != out_b.shape or not out_a.shape[:-1] == lse_a.shape == lse_b.shape:
        raise ShapeError(
            f"merge_attention: out {tuple(out_a.shape)} and {tuple(out_b.shape)}, lse "
            f"{tuple(lse_a.shape)} and {tuple(lse_b.shape)}: lse must be out without its last "
            "dimension, and both parts alike (layout 'bshd': transpose lse)"
        )
    with torch.no_grad():  # cancels: any reference gives the same sums
        reference = torch.maximum(lse_a, lse_b)
        reference = torch.where(reference == -torch.inf, 0.0, reference)
    parts = []
    for out, lse in ((out_a, lse_a), (out_b, lse_b)):
        seen = lse != -torch.inf
        # Twice where: neither a value nor a gradient of an unseen part gets through.
        weight = torch.where(seen, torch.exp(torch.where(seen, lse, 0.0) - reference), 0.0)
        parts.append((weight, torch.where(seen.unsqueeze(-1), out, 0.0)))
    (weight_a, out_a32), (weight_b, out_b32) = parts
    total = weight_a + weight_b
    any_seen = total != 0  # NaN stays NaN
    safe = torch.where(any_seen, total, 1.0)
    merged = (weight_a / safe).unsqueeze(-1) * out_a32 + (weight_b / safe).unsqueeze(-1) * out_b32
    lse = torch.where(any_seen, reference + torch.log(safe), -torch.inf)
    return merged.to(out_a.dtype), lse
