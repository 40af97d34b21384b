"""INT8 attention, backward: the contract in code, and what runs behind the op on CPU tensors.

    P = exp(min(S - L, 0));  dP = dO V^T;  delta = rowsum(dO * O) - dLSE;  dS = P * (dP - delta)
    dV = P^T dO;  dQ = scale dS K;  dK = scale dS^T Q               (K smoothed: rowsum(dS) = 0)

(SageBwd, arXiv 2603.02170.) S exceeds L by rounding only, unless ``qk`` and ``s`` have different
precisions, and a P above 1 is never right. dP and delta take the same dequantized dO and V as far
as the policy quantizes them, so that the errors of the two cancel in dS. Q^T and K^T are quantized
from what the forward saved, its codes. Vectorized over everything but key blocks.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sage_cute.numerics.forward import (
    LOG2_E,
    Saved,
    Scores,
    alike,
    group_heads,
    k_block,
    q_block,
    quantize_q,
    quantize_v,
    round16,
    smooth_keys,
    token_rows,
)
from sage_cute.numerics.quantize import (
    Quantized,
    absmax_scale,
    encode,
    int_matmul,
    num_groups,
    pad_tokens,
    quantize,
)
from sage_cute.numerics.reference import Gradients
from sage_cute.numerics.visibility import EVERYTHING, Visibility, Window, only
from sage_cute.policies import Policy

Observer = Callable[[str, int, slice, Tensor], None]
"""Called as (name, first query, keys, values) with blocks of "p", "dp" and "ds" in float32, each
(batch, kv_heads, group, queries that see one of the keys, keys), before they are quantized."""


@torch.no_grad()
def sage_backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    saved: Saved,
    *,
    scale: float,
    causal: bool,
    policy: Policy,
    window: Window = EVERYTHING,
    key_lengths: Tensor | None = None,
    observe: Observer | None = None,
) -> Gradients:
    """Gradients of :func:`sage_forward` with respect to q, k and v.

    What queries that see no key hold does not matter: their q and dout count as zero.
    ``k_mean`` counts as a constant, which is exact for ``out`` and for the LSE of the original K
    once ``scale * dlse * k_mean`` is added to dq.

    Args:
        dout: like ``out``; any strides.
        dlse: (batch, heads, seqlen_q), the gradient of ``lse``, or None.
        q: the forward's q; not read if the policy saves its codes.
        k: the forward's k; not read if the policy saves its codes.
        v: the forward's v.
        out: the forward's output.
        lse: the forward's LSE, of the smoothed K.
        saved: what the forward saved.
        scale: softmax scale.
        causal: bottom-right causal mask.
        policy: the forward's policy.
        window: the forward's window.
        key_lengths: the forward's key lengths; dk and dv are 0 from them on.
        observe: sees the intermediates, for tests and diagnosis.
    """
    sight = Visibility.of(out.shape[2], v.shape[2], causal, window)
    if key_lengths is None:
        return _backward(dout, dlse, q, k, v, out, lse, saved, sight, scale, policy, observe)
    dq, dk, dv = torch.zeros_like(out), torch.zeros_like(v), torch.zeros_like(v)
    for b, length in enumerate(key_lengths.tolist()):
        one = slice(b, b + 1)
        grads = _backward(
            dout[one],
            None if dlse is None else dlse[one],
            q[one],
            k[one, :, :length],
            v[one, :, :length],
            out[one],
            lse[one],
            Saved(*(x[one] for x in saved))._replace(
                k_codes=saved.k_codes[one, :, :length],
                k_scale=saved.k_scale[one, :, : num_groups(length, k_block(policy))],
            ),
            sight.padded_from(length),
            scale,
            policy,
            observe,
        )
        dq[one], dk[one, :, :length], dv[one, :, :length] = grads
    return Gradients(dq, dk, dv)


def _backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    saved: Saved,
    sight: Visibility,
    scale: float,
    policy: Policy,
    observe: Observer | None,
) -> Gradients:
    """:func:`sage_backward` of sequences that have all their keys."""
    kv_heads, seqlen_k, head_dim = v.shape[1:]
    batch, heads, seqlen_q = out.shape[:3]
    dtype, group = v.dtype, heads // max(kv_heads, 1)
    if 0 in (batch, heads, seqlen_q, seqlen_k):
        return Gradients(torch.zeros_like(out), torch.zeros_like(v), torch.zeros_like(v))
    dout, q, k, v, out = (x.contiguous() for x in (dout, q, k, v, out))  # as the forward does
    seeing = sight.seeing()
    dout, q = only(dout, seeing), only(q, seeing)

    # What the forward's products saw of Q and K, as far as it was saved.
    k_hat = _dequantized(saved.k_codes, saved.k_scale, k_block(policy))
    if k_hat is None:
        k_hat = smooth_keys(k, saved.k_mean, policy)
    q_hat = _dequantized(saved.q_codes, saved.q_scale, q_block(policy))
    q_hat = q.float() if q_hat is None else only(q_hat, seeing)
    q8 = k8 = None
    if policy.s == "int8":
        q8 = Quantized(saved.q_codes, saved.q_scale, q_block(policy))
        k8 = Quantized(saved.k_codes, saved.k_scale, k_block(policy))
        q8 = q8 if policy.saves_q_codes else quantize_q(q, policy)[0]
        k8 = k8 if policy.saves_k_codes else quantize(k_hat, k_block(policy))
    scores = Scores(q_hat.to(dtype), k_hat, q8, k8, saved.q_mean, scale, policy)

    v8, v_mean = quantize_v(v, policy) if policy.dequantized_v_in_dp else (None, None)
    dp = _ScoreGradient(dout.float(), v, v8, kv_heads, policy)
    shifted_out = out.float()
    if v_mean is not None:  # sum_j P dO . mean(V) = dO . mean(V): left out of dP and delta alike
        shifted_out = shifted_out - v_mean.repeat_interleave(group, 1).unsqueeze(2)
    delta = (dp.dout * group_heads(shifted_out, kv_heads)).sum(-1, keepdim=True)
    if dlse is not None:
        delta -= group_heads(dlse.float(), kv_heads).unsqueeze(-1)
    log2_sum = group_heads(lse.float() * LOG2_E, kv_heads).unsqueeze(-1)
    # Large scores and their LSE differ by the roundings of both, which are large too: P = 1 where
    # nothing else is left of their difference, and P <= 1 anywhere.
    log2_sum -= (log2_sum.abs() - 1024).clamp_(min=0.0) * 2.0**-22
    log2_sum = torch.where(log2_sum == -torch.inf, torch.inf, log2_sum)  # rows without keys: P = 0

    dv_operand = _transposed(dout.float(), None, policy.dv, policy.bwd_block_q, policy, dtype)
    dk_operand = _transposed(q_hat, q8, policy.dk, policy.bwd_block_q, policy, torch.bfloat16)
    dq_operand = _transposed(k_hat, k8, policy.dq, policy.bwd_block_k, policy, torch.bfloat16)
    q_mean = None
    if policy.smooth_q:
        q_mean = group_heads(token_rows(saved.q_mean, policy.block_q, seqlen_q), kv_heads)

    dq = dout.new_zeros((batch, kv_heads, group, seqlen_q, head_dim), dtype=torch.float32)
    dk, dv = (dout.new_zeros(v.shape, dtype=torch.float32) for _ in "kv")
    for keys, queries, mask in sight.blocks(policy.bwd_block_k, policy.bwd_block_q):
        exponent = scores(keys, queries).sub_(log2_sum[..., queries, :]).clamp_(max=0.0)
        p = alike(Tensor.exp2_, exponent)
        dpj = dp(keys, queries)
        ds = p * (dpj - delta[..., queries, :])
        if mask is not None:
            p.masked_fill_(~mask, 0.0)
            ds.masked_fill_(~mask, 0.0)
        if observe is not None:
            for name, value in (("p", p), ("dp", dpj), ("ds", ds)):
                observe(name, queries.start, keys, value)

        per_key = policy.p_bwd_scale == "per_key"
        dv[..., keys, :] += _contract_queries(p, dv_operand, queries, per_key, kv_heads, dtype)[0]
        per_key = policy.ds_dk_scale == "per_key"
        dkj, ds_hat = _contract_queries(ds, dk_operand, queries, per_key, kv_heads, torch.bfloat16)
        dk[..., keys, :] += dkj
        if q_mean is not None:
            dk[..., keys, :] += (ds_hat.mT @ q_mean[..., queries, :]).sum(2)
        dq[..., queries, :] += _contract_keys(ds, dq_operand, keys, policy)

    return Gradients((dq.flatten(1, 2) * scale).to(dtype), (dk * scale).to(dtype), dv.to(dtype))


def _dequantized(codes: Tensor, scale: Tensor, block: int) -> Tensor | None:
    """The operand behind saved codes; None where the policy saves none."""
    return Quantized(codes, scale, block).dequantize() if codes.shape[-2] else None


class _ScoreGradient:
    """dP of one block of keys at a time, and the dO that delta must be made of."""

    def __init__(
        self, dout: Tensor, v: Tensor, v8: Quantized | None, kv_heads: int, policy: Policy
    ) -> None:
        self.exact = policy.dp == "int8"
        self.v_scale: Tensor | None = None
        if policy.dp == "int8":
            assert v8 is not None
            block = 1 if policy.do_scale == "per_token" else policy.bwd_block_q
            do8 = quantize(dout, block)
            self.dout = group_heads(do8.dequantize(), kv_heads)
            self.a = group_heads(do8.codes.float(), kv_heads)
            self.a_scale = group_heads(do8.token_scale(), kv_heads)
            self.b, self.v_scale = v8.codes.float().unsqueeze(2), v8.token_scale().unsqueeze(2).mT
        else:
            self.dout = self.a = group_heads(round16(dout, v.dtype), kv_heads)
            values = v8.dequantize() if v8 is not None else v
            self.b = round16(values.to(v.dtype), v.dtype).unsqueeze(2)

    def __call__(self, keys: slice, queries: slice) -> Tensor:
        dp = self.a[..., queries, :] @ self.b[..., keys, :].mT
        if self.v_scale is not None:
            dp.mul_(self.a_scale[..., queries, :] * self.v_scale[..., keys])
        return dp


def _transposed(
    x: Tensor,
    x8: Quantized | None,
    precision: str,
    block: int,
    policy: Policy,
    dtype: torch.dtype,
) -> Quantized | Tensor:
    """Q^T, K^T or dO^T, whose tokens are contracted, so scales may change only between blocks.

    Args:
        x: (batch, heads, seqlen, head_dim), float32.
        x8: codes that exist already, used again if they have one scale a ``block`` of tokens.
        precision: of the product.
        block: tokens per tile of the product.
        policy: for ``transposed_scale``.
        dtype: of a 16-bit operand.
    """
    if precision == "16bit":
        return round16(x, dtype)
    per_channel = policy.transposed_scale == "per_channel"
    if x8 is not None and x8.block == block and not per_channel:
        return x8
    return quantize(x, block, per_channel=per_channel)


def _contract_queries(
    x: Tensor,
    operand: Quantized | Tensor,
    rows: slice,
    per_key: bool,
    kv_heads: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """X^T B over the queries of a head group, for dV (X = P) and dK (X = dS).

    Args:
        x: (batch, kv_heads, group, queries, keys).
        operand: B, all queries: (batch, heads, seqlen_q, head_dim).
        rows: the queries of x, from the start of a tile on.
        per_key: in INT8, one scale of X for each key of a tile; else one for the tile.
        kv_heads: number of key heads.
        dtype: of X in a 16-bit product.

    Returns:
        The product (batch, kv_heads, keys, head_dim), and X as the product used it.
    """
    if isinstance(operand, Tensor):
        x = round16(x, dtype)
        return (x.mT @ group_heads(operand, kv_heads)[..., rows, :]).sum(2), x
    tile, queries = operand.block, x.shape[-2]
    tiles = num_groups(queries, tile)
    x = pad_tokens(x, tile).unflatten(-2, (tiles, tile))
    scale = absmax_scale(x.abs().amax(-2 if per_key else (-2, -1), keepdim=True))
    x = encode(x, scale)
    b = pad_tokens(operand.codes[..., rows, :], tile).unflatten(-2, (tiles, tile))
    b_scale = operand.scale if operand.per_channel else operand.scale.unsqueeze(-1)
    partial = int_matmul(x.mT, group_heads(b, kv_heads))
    # The scales first: a sum of codes times a large one of them may overflow where dK does not.
    first = rows.start // tile
    b_scale = group_heads(b_scale, kv_heads)[..., first : first + tiles, :].unsqueeze(-2)
    partial *= scale.mT * b_scale
    return partial.sum((2, 3)), (x * scale).flatten(-3, -2)[..., :queries, :]


def _contract_keys(ds: Tensor, operand: Quantized | Tensor, keys: slice, policy: Policy) -> Tensor:
    """DS K over one block of keys, for dQ: (batch, kv_heads, group, queries, head_dim).

    Args:
        ds: (batch, kv_heads, group, queries, keys).
        operand: K, all keys: (batch, kv_heads, seqlen_k, head_dim).
        keys: the block's keys.
        policy: for ``ds_dq_rows``.
    """
    if isinstance(operand, Tensor):
        return round16(ds, torch.bfloat16) @ operand[..., keys, :].unsqueeze(2)
    rows, queries = policy.ds_dq_rows or policy.bwd_block_q, ds.shape[-2]
    ds = pad_tokens(ds, rows).unflatten(-2, (num_groups(queries, rows), rows))
    scale = absmax_scale(ds.abs().amax((-2, -1), keepdim=True))
    product = int_matmul(
        encode(ds, scale).flatten(-3, -2), operand.codes[..., keys, :].unsqueeze(2)
    )
    b_scale = operand.scale if operand.per_channel else operand.scale.unsqueeze(-1)
    scale = scale * b_scale[..., keys.start // operand.block, None, None, None, :]
    return product.unflatten(-2, (-1, rows)).mul_(scale).flatten(-3, -2)[..., :queries, :]
