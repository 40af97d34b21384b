"""FLOP formulas for FlopCounterMode, and through it for ``activation_memory_budget``.

Counted are multiplications and additions of the products over the keys that a query sees (causal:
about half): 2 products forward, 5 backward. Without a formula the partitioner would take the op to
be free to recompute.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

Shape = tuple[int, ...]


def visible_pairs(seqlen_q: int, seqlen_k: int, is_causal: bool) -> int:
    """Pairs of a query and a key that it sees, bottom-right causal or all."""
    if not is_causal:
        return seqlen_q * seqlen_k
    rows = min(seqlen_q, seqlen_k)  # rows that see a key: the last one sees all, the one before...
    return rows * seqlen_k - rows * (rows - 1) // 2


def _flops(q: Shape, k: Shape, products: int, is_causal: bool) -> int:
    return 2 * products * q[0] * q[1] * q[3] * visible_pairs(q[2], k[2], is_causal)


def _forward(q: Shape, k: Shape, v: Shape, scale: Any, is_causal: bool, *_: Any, **__: Any) -> int:
    return _flops(q, k, 2, is_causal)


def _backward(*shapes_and_static: Any, **_: Any) -> int:
    v, out, is_causal = shapes_and_static[4], shapes_and_static[5], shapes_and_static[-2]
    return _flops(out, v, 5, is_causal)


register_flop_formula([torch.ops.sage.attn_fwd, torch.ops.sage.attn_infer])(_forward)
register_flop_formula(torch.ops.sage.attn_backward)(_backward)
