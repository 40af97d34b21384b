"""Symmetric 8-bit quantization: scale = absmax / 127, codes = round-half-even(x / scale).

A scale of 0 gives codes 0 and is never divided by. Where a NaN or an infinity falls into a scale's
group the scale is NaN, so that it reaches every product of that group instead of becoming a finite
number.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

INT8_MAX = 127


class Quantized(NamedTuple):
    """INT8 codes of x (..., seqlen, head_dim) and what turns them back.

    ``scale`` is float32: (..., groups), or (..., groups, head_dim) with one scale a channel; a
    group is ``block`` consecutive tokens.
    """

    codes: Tensor
    scale: Tensor
    block: int

    @property
    def per_channel(self) -> bool:
        """Whether each channel of a group has its own scale."""
        return self.scale.dim() == self.codes.dim()

    def token_scale(self) -> Tensor:
        """The scale of every token: (..., seqlen, 1), or (..., seqlen, head_dim)."""
        scale = self.scale if self.per_channel else self.scale.unsqueeze(-1)
        if self.block == 1:
            return scale
        return scale.repeat_interleave(self.block, -2)[..., : self.codes.shape[-2], :]

    def dequantize(self) -> Tensor:
        """Codes times scale, float32."""
        return self.codes * self.token_scale()


def num_groups(seqlen: int, block: int) -> int:
    """How many scales ``seqlen`` tokens have, one for ``block`` tokens."""
    return -(-seqlen // block)


def absmax_scale(absmax: Tensor, largest: int = INT8_MAX) -> Tensor:
    """The dequantization multiplier for values up to ``absmax``; NaN where absmax is not finite."""
    return torch.where(absmax.isfinite(), absmax / largest, torch.nan)


def encode(x: Tensor, scale: Tensor, largest: int = INT8_MAX) -> Tensor:
    """Integer codes of x, as float32: round-half-even(x / scale), 0 where the scale is 0 or NaN."""
    return torch.where(scale > 0, x / scale, 0.0).round_().clamp_(-largest, largest)


def quantize(x: Tensor, block: int, *, per_channel: bool = False) -> Quantized:
    """Quantizes x (..., seqlen, head_dim), float32, over groups of ``block`` tokens."""
    tokens = x.shape[-2]
    if block == 1 and not per_channel:
        scale = absmax_scale(x.abs().amax(-1))
        return Quantized(encode(x, scale.unsqueeze(-1)).to(torch.int8), scale, 1)
    groups = pad_tokens(x, block).unflatten(-2, (num_groups(tokens, block), block))
    absmax = groups.abs().amax(-2 if per_channel else (-2, -1))
    scale = absmax_scale(absmax)
    wide = scale.unsqueeze(-2) if per_channel else scale[..., None, None]
    codes = encode(groups, wide).flatten(-3, -2)[..., :tokens, :]
    return Quantized(codes.to(torch.int8), scale, block)


def pad_tokens(x: Tensor, block: int, value: float = 0.0) -> Tensor:
    """Fills the token dimension (the second last) up to a multiple of ``block``."""
    short = -x.shape[-2] % block
    return torch.nn.functional.pad(x, (0, 0, 0, short), value=value) if short else x


def int_matmul(a: Tensor, b: Tensor) -> Tensor:
    """The int32 product of integer codes, held in float32.

    Exact in any order of summation, since policies keep every sum below 2^24; and exact whatever
    ``torch.set_float32_matmul_precision`` allows, since 8-bit codes fit bfloat16's significand.
    """
    return a.float() @ b.float()


def block_mean(x: Tensor, block: int) -> Tensor:
    """Float32 means, summed in float64, over groups of tokens of x (..., seqlen, head_dim).

    Values that are not finite are left out of the sums, so that they reach the outputs that they
    belong to and not, through a mean, all others.
    """
    tokens, groups = x.shape[-2], num_groups(x.shape[-2], block)
    finite = pad_tokens(torch.where(x.isfinite(), x, 0.0), block)
    total = finite.unflatten(-2, (groups, block)).sum(-2, dtype=torch.float64)
    counts = torch.full((groups, 1), block, dtype=torch.float64)
    counts[-1:] -= groups * block - tokens
    return (total / counts).float()


def token_mean(x: Tensor) -> Tensor:
    """Mean over all tokens of x (..., seqlen, head_dim): (..., head_dim), as ``block_mean``.

    0 where there is no token.
    """
    if not x.shape[-2]:
        return x.new_zeros((*x.shape[:-2], x.shape[-1]), dtype=torch.float32)
    return block_mean(x, x.shape[-2]).squeeze(-2)
