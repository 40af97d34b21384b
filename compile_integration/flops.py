"""FLOP formulas for FlopCounterMode, and through it for ``activation_memory_budget``.

Counted are multiplications and additions of the products over the keys that a query sees (causal:
about half; padded keys count, lengths are data): 2 products forward, 5 backward. Without a formula
the partitioner would take the op to be free to recompute.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from sage_cute.compile_integration import varlen
from sage_cute.compile_integration.ops import Backward, Forward

Shape = tuple[int, ...]


def visible_pairs(
    seqlen_q: int, seqlen_k: int, is_causal: bool, left: int = -1, right: int = -1
) -> int:
    """Pairs of a query and a key that it sees, bottom-right; a window of -1 is without end."""

    def up_to(reach: int) -> int:
        """Pairs of query i and key j with j <= i + reach: sums of 0 <= i + reach + 1 <= keys."""
        return _staircase(seqlen_q + reach, seqlen_k) - _staircase(reach, seqlen_k)

    offset = seqlen_k - seqlen_q
    right = 0 if is_causal else right
    pairs = up_to(offset + right) if right >= 0 else seqlen_q * seqlen_k
    return pairs - (up_to(offset - left - 1) if left >= 0 else 0)


def _staircase(n: int, height: int) -> int:
    """min(1, height) + min(2, height) + ... up to min(n, height)."""
    low = max(0, min(n, height))
    return low * (low + 1) // 2 + max(0, n - height) * height


def _flops(q: Shape, k: Shape, products: int, is_causal: bool, left: int, right: int) -> int:
    pairs = visible_pairs(q[2], k[2], is_causal, left, right)
    return 2 * products * q[0] * q[1] * q[3] * pairs


def _forward(*arguments: Any, **_: Any) -> int:
    x: Any = Forward(*arguments)  # shapes in the places of tensors
    return _flops(x.q, x.k, 2, x.is_causal, x.window_left, x.window_right)


def _backward(*arguments: Any, **_: Any) -> int:
    x: Any = Backward(*arguments)
    return _flops(x.out, x.v, 5, x.is_causal, x.window_left, x.window_right)


def _packed_flops(q: Shape, k: Shape, products: int, x: Any) -> int:
    """As if all sequences had one length: theirs are data."""
    sequences = max(x.cu_seqlens_q[0] - 1, 1)
    shape = (sequences, q[1], q[0] // sequences, q[2])
    keys = (sequences, k[1], k[0] // sequences, k[2])
    return _flops(shape, keys, products, x.is_causal, x.window_left, x.window_right)


def _packed_forward(*arguments: Any, **_: Any) -> int:
    x: Any = varlen.Forward(*arguments)
    return _packed_flops(x.q, x.k, 2, x)


def _packed_backward(*arguments: Any, **_: Any) -> int:
    x: Any = varlen.Backward(*arguments)
    return _packed_flops(x.out, x.v, 5, x)


register_flop_formula([torch.ops.sage.attn_fwd, torch.ops.sage.attn_infer])(_forward)
register_flop_formula(torch.ops.sage.attn_backward)(_backward)
register_flop_formula([torch.ops.sage.attn_varlen_fwd, torch.ops.sage.attn_varlen_infer])(
    _packed_forward
)
register_flop_formula(torch.ops.sage.attn_varlen_backward)(_packed_backward)
