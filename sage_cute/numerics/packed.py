"""Packed batches: sequences of different lengths, one after the other along the tokens.

Sequence b is tokens cu_seqlens[b] to cu_seqlens[b + 1], which may be none. Tokens before the first
and after the last sequence belong to nobody. Everything equals running the sequences one by one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from sage_cute.numerics.backward import sage_backward
from sage_cute.numerics.forward import SageForward, Saved, k_block, q_block, sage_forward
from sage_cute.numerics.quantize import num_groups
from sage_cute.numerics.reference import Gradients
from sage_cute.numerics.visibility import EVERYTHING, Window
from sage_cute.policies import Policy


def num_slots(tokens: int, block: int, sequences: int) -> int:
    """Room for the scales of a packed batch, one for ``block`` tokens of a sequence.

    Known without the lengths: each sequence may end in a block that it does not fill.
    """
    return tokens if block == 1 else tokens // block + sequences


def saved_shapes_varlen(
    q_shape: tuple[int, ...], k_shape: tuple[int, ...], sequences: int, policy: Policy
) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor of :class:`Saved`, of a packed batch.

    Scales and means of blocks of sequence b start at cu_seqlens[b] // block + b.
    """
    total_q, heads, head_dim = q_shape
    total_k, kv_heads, _ = k_shape
    q_codes, k_codes = policy.saves_q_codes, policy.saves_k_codes
    q_groups = num_slots(total_q, q_block(policy), sequences) if q_codes else 0
    k_groups = num_slots(total_k, k_block(policy), sequences) if k_codes else 0
    q_blocks = num_slots(total_q, policy.block_q, sequences) if policy.smooth_q else 0
    return {
        "q_codes": (total_q if q_codes else 0, heads, head_dim),
        "k_codes": (total_k if k_codes else 0, kv_heads, head_dim),
        "q_scale": (heads, q_groups),
        "k_scale": (kv_heads, k_groups),
        "q_mean": (heads, q_blocks, head_dim),
        "k_mean": (sequences, kv_heads, head_dim if policy.smooth_k else 0),
    }


class _Sequence(NamedTuple):
    """One sequence of a packed batch."""

    number: int
    queries: slice
    keys: slice

    def saved(self, packed: Saved, policy: Policy) -> Saved:
        """What is saved of it, as views of a batch of one."""

        def slots(tokens: slice, block: int) -> slice:
            start = tokens.start if block == 1 else tokens.start // block + self.number
            return slice(start, start + num_groups(tokens.stop - tokens.start, block))

        return Saved(
            _one(packed.q_codes, self.queries),
            _one(packed.k_codes, self.keys),
            packed.q_scale[None, :, slots(self.queries, q_block(policy))],
            packed.k_scale[None, :, slots(self.keys, k_block(policy))],
            packed.q_mean[None, :, slots(self.queries, policy.block_q)],
            packed.k_mean[None, self.number],
        )


def _sequences(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> Iterator[_Sequence]:
    q, k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for b in range(len(q) - 1):
        yield _Sequence(b, slice(q[b], q[b + 1]), slice(k[b], k[b + 1]))


def _one(x: Tensor, tokens: slice) -> Tensor:
    """Tokens of x (tokens, heads, head_dim) as (1, heads, tokens, head_dim)."""
    return x[tokens].transpose(0, 1).unsqueeze(0)


@torch.no_grad()
def sage_forward_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    scale: float,
    causal: bool,
    policy: Policy,
    window: Window = EVERYTHING,
    k_mean: Tensor | None = None,
) -> SageForward:
    """:func:`sage_forward` of a packed batch.

    Args:
        q: (total_q, heads, head_dim).
        k: (total_k, kv_heads, head_dim).
        v: like k.
        cu_seqlens_q: (sequences + 1,), where the queries of each sequence start and end.
        cu_seqlens_k: the same of keys.
        scale: softmax scale.
        causal: bottom-right causal mask of each sequence.
        policy: which products are INT8, and how.
        window: keys before and after its own that a query sees; None: all.
        k_mean: (sequences, kv_heads, head_dim), what K smoothing takes off K; None: the mean of K.

    Returns:
        out like q (0 for tokens of no sequence), lse (heads, total_q), and what is saved.
    """
    out = torch.zeros_like(q)
    lse = q.new_full((q.shape[1], q.shape[0]), -torch.inf, dtype=torch.float32)
    shapes = saved_shapes_varlen(q.shape, k.shape, cu_seqlens_q.shape[0] - 1, policy)
    saved = Saved(
        **{
            name: q.new_zeros(shape, dtype=torch.int8 if "codes" in name else torch.float32)
            for name, shape in shapes.items()
        }
    )
    for sequence in _sequences(cu_seqlens_q, cu_seqlens_k):
        part = sage_forward(
            _one(q, sequence.queries).contiguous(),
            _one(k, sequence.keys).contiguous(),
            _one(v, sequence.keys).contiguous(),
            scale=scale,
            causal=causal,
            policy=policy,
            window=window,
            k_mean=None if k_mean is None else k_mean[None, sequence.number],
        )
        _one(out, sequence.queries).copy_(part.out)
        lse[None, :, sequence.queries] = part.lse
        for view, value in zip(sequence.saved(saved, policy), part.saved, strict=True):
            view.copy_(value)
    return SageForward(out, lse, saved)


@torch.no_grad()
def sage_backward_varlen(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    saved: Saved,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    scale: float,
    causal: bool,
    policy: Policy,
    window: Window = EVERYTHING,
) -> Gradients:
    """:func:`sage_backward` of a packed batch: gradients in the shapes of q, k and v.

    Args:
        dout: like ``out``; any strides.
        dlse: (heads, total_q), the gradient of ``lse``, or None.
        q: the forward's q; not read if the policy saves its codes.
        k: the forward's k; not read if the policy saves its codes.
        v: the forward's v.
        out: the forward's output.
        lse: the forward's LSE, of the smoothed K.
        saved: what the forward saved.
        cu_seqlens_q: the forward's.
        cu_seqlens_k: the forward's.
        scale: softmax scale.
        causal: bottom-right causal mask.
        policy: the forward's policy.
        window: the forward's window.
    """
    grads = Gradients(torch.zeros_like(out), torch.zeros_like(v), torch.zeros_like(v))
    for sequence in _sequences(cu_seqlens_q, cu_seqlens_k):
        queries, keys = sequence.queries, sequence.keys
        part = sage_backward(
            _one(dout, queries).contiguous(),
            None if dlse is None else dlse[None, :, queries],
            _one(q, queries).contiguous(),
            _one(k, keys).contiguous(),
            _one(v, keys).contiguous(),
            _one(out, queries).contiguous(),
            lse[None, :, queries],
            Saved(*(x.contiguous() for x in sequence.saved(saved, policy))),
            scale=scale,
            causal=causal,
            policy=policy,
            window=window,
        )
        for grad, tokens, value in zip(grads, (queries, keys, keys), part, strict=True):
            _one(grad, tokens).copy_(value)
    return grads
