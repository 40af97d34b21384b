"""INT8 attention, forward: the contract in code, and what runs behind the op on CPU tensors.

    K <- K - mean(K)                                                        (smooth_k)
    S = (Q^ K^T) sQ sK scale;  m = running row max;  P~ = exp(S - m)
    P^ = P~ (times V's token scale) in 8 bits, one scale a query and block of ``block_k`` keys
    O = sum P^ V^ / sum P~;  LSE = m + ln(sum P~)

(SageAttention3 appendix, arXiv 2505.11594; V's per-token scale folded into P is this project's.)
Scores are kept in log2 units, as the kernels keep them. Vectorized over everything but key blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from sage_cute.numerics.quantize import (
    Quantized,
    absmax_scale,
    block_mean,
    encode,
    int_matmul,
    num_groups,
    quantize,
    token_mean,
)
from sage_cute.numerics.visibility import EVERYTHING, Visibility, Window, only
from sage_cute.policies import Policy

LOG2_E = math.log2(math.e)


class Saved(NamedTuple):
    """What the forward leaves to the backward beside q, k, v, out and lse.

    Tensors that a policy does not need have a 0 in their last or second last dimension.
    """

    q_codes: Tensor  # int8 (batch, heads, seqlen_q, head_dim)
    k_codes: Tensor  # int8 (batch, kv_heads, seqlen_k, head_dim), of the smoothed K
    q_scale: Tensor  # float32 (batch, heads, groups of queries)
    k_scale: Tensor  # float32 (batch, kv_heads, groups of keys)
    q_mean: Tensor  # float32 (batch, heads, blocks of queries, head_dim)
    k_mean: Tensor  # float32 (batch, kv_heads, head_dim)


class SageForward(NamedTuple):
    """Output in q's dtype, natural-log LSE over the smoothed K (float32), and what is saved."""

    out: Tensor
    lse: Tensor
    saved: Saved


def saved_shapes(
    q_shape: tuple[int, ...], k_shape: tuple[int, ...], policy: Policy
) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor of :class:`Saved`."""
    batch, heads, seqlen_q, head_dim = q_shape
    _, kv_heads, seqlen_k, _ = k_shape
    q_codes, k_codes = policy.saves_q_codes, policy.saves_k_codes
    q_groups = num_groups(seqlen_q, q_block(policy)) if q_codes else 0
    k_groups = num_groups(seqlen_k, k_block(policy)) if k_codes else 0
    q_blocks = num_groups(seqlen_q, policy.block_q) if policy.smooth_q else 0
    return {
        "q_codes": (batch, heads, seqlen_q if q_codes else 0, head_dim),
        "k_codes": (batch, kv_heads, seqlen_k if k_codes else 0, head_dim),
        "q_scale": (batch, heads, q_groups),
        "k_scale": (batch, kv_heads, k_groups),
        "q_mean": (batch, heads, q_blocks, head_dim),
        "k_mean": (batch, kv_heads, head_dim if policy.smooth_k else 0),
    }


def q_block(policy: Policy) -> int:
    """Queries per scale of Q."""
    return 1 if policy.q_scale == "per_token" else policy.block_q


def k_block(policy: Policy) -> int:
    """Keys per scale of K."""
    return 1 if policy.k_scale == "per_token" else policy.block_k


def round16(x: Tensor, dtype: torch.dtype) -> Tensor:
    """X as an operand of a 16-bit product: rounded to dtype (bfloat16 for float32), in float32."""
    return x.to(torch.bfloat16 if dtype == torch.float32 else dtype).float()


def alike(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """An elementwise function, in place, that gives a value the same result wherever it lies in x.

    At the ends of its threads' shares torch takes instructions that round otherwise than the
    vectorized ones. Here all elements are vectorized, so that a row depends on no number of rows.
    """
    flat = x.flatten()
    if short := -flat.numel() % 64:
        flat = torch.nn.functional.pad(flat, (0, short))
    for share in flat.split(1 << 14):  # of one thread
        function(share)
    return flat[: x.numel()].view(x.shape)


def group_heads(x: Tensor, kv_heads: int) -> Tensor:
    """(batch, heads, ...) as (batch, kv_heads, query heads of a key head, ...)."""
    return x.unflatten(1, (kv_heads, -1))


def flat_bound(v_scale: Tensor) -> tuple[Tensor, Tensor]:
    """The largest of a block's token scales of V (..., keys, 1), and whether the block is flat.

    Flat: none is NaN or below a quarter of the largest, so that a bound made of it wastes at most
    two of P's eight bits. Of all keys of the block, whichever a query sees.
    """
    largest = v_scale.amax(-2, keepdim=True)
    return largest, (v_scale >= largest / 4).all(-2, keepdim=True)


def smooth_keys(k: Tensor, k_mean: Tensor, policy: Policy) -> Tensor:
    """K (batch, kv_heads, seqlen_k, head_dim) in float32, less its mean if the policy says so."""
    return k.float() - k_mean.unsqueeze(-2) if policy.smooth_k else k.float()


def quantize_v(v: Tensor, policy: Policy) -> tuple[Quantized, Tensor | None]:
    """V^ of the forward, and the mean that was taken off V (None: nothing was)."""
    values = v.float()
    mean = token_mean(values) if policy.smooth_v else None
    if mean is not None:
        values = values - mean.unsqueeze(-2)
    block = 1 if policy.v_scale == "per_token" else policy.block_k
    return quantize(values, block, per_channel=policy.v_scale == "per_channel"), mean


def quantize_q(q: Tensor, policy: Policy) -> tuple[Quantized, Tensor]:
    """Q^, and the mean of each block of queries (no blocks if Q is not smoothed)."""
    queries = q.float()
    mean = queries.new_empty((*q.shape[:2], 0, q.shape[-1]))
    if policy.smooth_q:
        mean = block_mean(queries, policy.block_q)
        queries = queries - token_rows(mean, policy.block_q, q.shape[-2])
    return quantize(queries, q_block(policy)), mean


def token_rows(blocks: Tensor, block: int, tokens: int) -> Tensor:
    """(..., blocks, x) repeated to (..., tokens, x)."""
    return blocks.repeat_interleave(block, -2)[..., :tokens, :]


@torch.no_grad()
def sage_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    causal: bool,
    policy: Policy,
    window: Window = EVERYTHING,
    key_lengths: Tensor | None = None,
    k_mean: Tensor | None = None,
) -> SageForward:
    """INT8 attention of q (batch, heads, seqlen_q, head_dim), k and v (batch, kv_heads, ...).

    The LSE is that of the smoothed K: add ``scale * q . k_mean`` for the original K's. A query that
    sees no key gets out = 0 and lse = -inf; its q counts as zero in a scale or a mean that it
    shares with others (its own codes are those of q). Keys from a key length on are not looked at:
    their codes, and the scales of blocks of them alone, are 0.

    Args:
        q: queries.
        k: keys.
        v: values, like k.
        scale: softmax scale.
        causal: bottom-right causal mask.
        policy: which products are INT8, and how.
        window: keys before and after its own that a query sees, each at least 0; None: all.
        key_lengths: (batch,) integers of 0 to seqlen_k, the keys that are there; None: all.
        k_mean: (batch, kv_heads, head_dim), what K smoothing takes off K; None: the mean of K.
    """
    sight = Visibility.of(q.shape[2], k.shape[2], causal, window)
    if key_lengths is None or not q.shape[0]:
        return _forward(q, k, v, k_mean, sight, scale, policy)
    parts = []
    for b, length in enumerate(key_lengths.tolist()):
        mean = None if k_mean is None else k_mean[b : b + 1]
        one = q[b : b + 1], k[b : b + 1, :, :length], v[b : b + 1, :, :length], mean
        parts.append(_forward(*one, sight.padded_from(length), scale, policy))
    shapes = saved_shapes(tuple(q.shape), tuple(k.shape), policy)
    saved = {
        name: torch.cat(
            [_zero_padded(getattr(part.saved, name), (1, *shape[1:])) for part in parts]
        )
        for name, shape in shapes.items()
    }
    out, lse = torch.cat([part.out for part in parts]), torch.cat([part.lse for part in parts])
    return SageForward(out, lse, Saved(**saved))


def _zero_padded(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    padded = x.new_zeros(shape)
    padded[tuple(slice(size) for size in x.shape)] = x
    return padded


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_mean: Tensor | None,
    sight: Visibility,
    scale: float,
    policy: Policy,
) -> SageForward:
    """:func:`sage_forward` of sequences that have all their keys."""
    batch, heads, seqlen_q, head_dim = q.shape
    kv_heads, seqlen_k = k.shape[1:3]
    shapes = saved_shapes(tuple(q.shape), tuple(k.shape), policy)
    if policy.smooth_k:
        k_mean = token_mean(k) if k_mean is None else k_mean.float()
    else:
        k_mean = q.new_empty(shapes["k_mean"], dtype=torch.float32)
    if 0 in (batch, heads, seqlen_q, seqlen_k):
        saved = Saved(*(q.new_zeros(s, dtype=torch.float32) for s in shapes.values()))
        return SageForward(
            torch.zeros_like(q),
            q.new_full(q.shape[:3], -torch.inf, dtype=torch.float32),
            saved._replace(
                q_codes=saved.q_codes.char(), k_codes=saved.k_codes.char(), k_mean=k_mean
            ),
        )

    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()  # strides decide how torch sums
    if policy.q_scale == "per_block" or policy.smooth_q:  # blocks share a scale or a mean
        q = only(q, sight.seeing())
    smooth_k = smooth_keys(k, k_mean, policy)
    unused = q.new_empty(0, dtype=torch.int8)
    q8 = k8 = None
    q_mean = q.new_empty(shapes["q_mean"], dtype=torch.float32)
    if policy.qk == "int8":
        q8, q_mean = quantize_q(q, policy)
        k8 = quantize(smooth_k, k_block(policy))
    scores = Scores(q, smooth_k, q8, k8, q_mean, scale, policy)
    saved = Saved(
        q8.codes if q8 else unused.view(shapes["q_codes"]),
        k8.codes if k8 and policy.saves_k_codes else unused.view(shapes["k_codes"]),
        q8.scale if q8 else q_mean.new_empty(shapes["q_scale"]),
        k8.scale if k8 and policy.saves_k_codes else q_mean.new_empty(shapes["k_scale"]),
        q_mean,
        k_mean,
    )

    if policy.pv == "int8":
        v8, v_mean = quantize_v(v, policy)
        v_scale, values = v8.token_scale().unsqueeze(2), v8.codes.unsqueeze(2)
    else:
        v_mean, v_scale, values = None, None, round16(v, v.dtype).unsqueeze(2)

    rows = (batch, kv_heads, heads // kv_heads, seqlen_q)
    row_max = smooth_k.new_full((*rows, 1), -torch.inf)
    row_sum = smooth_k.new_zeros((*rows, 1))
    acc = smooth_k.new_zeros((*rows, head_dim))
    for keys, queries, mask in sight.blocks(policy.block_k):
        s = scores(keys, queries)
        if mask is not None:
            s.masked_fill_(~mask, -torch.inf)
        m, l, o = (x[..., queries, :] for x in (row_max, row_sum, acc))
        block_max = s.amax(-1, keepdim=True)
        m_new = torch.maximum(m, block_max)
        shrink = alike(Tensor.exp2_, m - m_new)
        m.copy_(m_new)
        if v_scale is None:
            p = alike(Tensor.exp2_, s.sub_(m_new))
            l.mul_(shrink).add_(p.sum(-1, keepdim=True))
            o.mul_(shrink).add_(round16(p, v.dtype) @ values[..., keys, :])
            continue
        # Against the block's own max, then moved to the running one: what a kernel does.
        p = alike(Tensor.exp2_, s.sub_(block_max))
        grow = alike(Tensor.exp2_, block_max - m_new)
        l.mul_(shrink).add_(grow * p.sum(-1, keepdim=True))
        per_key = v_scale[..., keys, :]
        if policy.v_scale == "per_token":
            p = p * per_key.mT
            if mask is not None:
                p.masked_fill_(~mask, 0.0)  # 0 * NaN: a key that is not seen contributes nothing
        largest = p.amax(-1, keepdim=True)
        if policy.v_scale == "per_token" and policy.p_scale == "bounded" and scale >= 0:
            # The largest P~ of a query that sees the whole block is 1.
            bound, flat = flat_bound(per_key)
            rows_bounded = sight.bounded(keys, policy.block_k)
            first = queries.start
            bounded = largest[..., rows_bounded.start - first : rows_bounded.stop - first, :]
            bounded.copy_(torch.where(flat, bound, bounded))
        p_scale = absmax_scale(largest, policy.p_max)
        pv = int_matmul(encode(p, p_scale, policy.p_max), values[..., keys, :])
        pv *= p_scale * grow
        if policy.v_scale != "per_token":
            pv *= per_key[..., :1, :]
        o.mul_(shrink).add_(pv)

    seen = row_max != -torch.inf
    out = torch.where(seen, acc / row_sum, 0.0)
    if v_mean is not None:
        out = torch.where(seen, out + v_mean[:, :, None, None], 0.0)
    lse = (row_max + alike(Tensor.log2_, row_sum)) / LOG2_E
    return SageForward(out.flatten(1, 2).to(q.dtype), lse.squeeze(-1).flatten(1, 2), saved)


class Scores:
    """S of one block of keys at a time, in log2 units: the forward's, and the backward's again."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        q8: Quantized | None,
        k8: Quantized | None,
        q_mean: Tensor,
        scale: float,
        policy: Policy,
    ) -> None:
        """Takes INT8 operands where q8 and k8 are given, else q and k rounded to 16 bits.

        Args:
            q: (batch, heads, seqlen_q, head_dim), used without q8 (less its block means, if any).
            k: (batch, kv_heads, seqlen_k, head_dim), smoothed.
            q8: codes of q less its block means.
            k8: codes of k.
            q_mean: (batch, heads, blocks, head_dim); no blocks: Q is not smoothed.
            scale: softmax scale.
            policy: for ``block_q``.
        """
        kv_heads, seqlen_q = k.shape[1], q.shape[2]
        self.factor = scale * LOG2_E
        self.exact = q8 is not None and k8 is not None
        if q8 is not None and k8 is not None:
            self.q = group_heads(q8.codes.float(), kv_heads)
            self.k = k8.codes.float().unsqueeze(2)
            self.q_scale = group_heads(q8.token_scale() * self.factor, kv_heads)
            self.k_scale = k8.token_scale().unsqueeze(2).mT
        else:
            self.q = group_heads(round16(q, q.dtype) * self.factor, kv_heads)
            self.k = round16(k, q.dtype).unsqueeze(2)
        self.q_mean = None
        if q_mean.shape[2]:
            self.q_mean = group_heads(q_mean * self.factor, kv_heads)
            self.smooth_k, self.block, self.seqlen_q = k.unsqueeze(2), policy.block_q, seqlen_q

    def __call__(self, keys: slice, queries: slice) -> Tensor:
        """(batch, kv_heads, group, queries, keys), float32."""
        s = self.q[..., queries, :] @ self.k[..., keys, :].mT
        if self.exact:
            # The scales first: the codes times a large one of them may overflow where S does not.
            s.mul_(self.q_scale[..., queries, :] * self.k_scale[..., keys])
        if self.q_mean is not None:
            bias = self.q_mean @ self.smooth_k[..., keys, :].mT
            s += token_rows(bias, self.block, self.seqlen_q)[..., queries, :]
        return s
