"""What a quantization kernel is compiled for, as data. No cutlass here: launchers read it too."""

import dataclasses
from typing import Literal

from sage_cute.config.problem import Lengths
from sage_cute.limits import HOPPER

TILE = 128
"""Tokens of one CTA's tile; also what V^T's token dimension is rounded up to."""
MAX_CHUNKS = 32
BLOCKS = (1, 16, 32, 64, 128)
"""Tokens per scale: 1 (per token), or a divisor of the tile of which no warp holds a fraction."""

VScaleForm = Literal["scale", "log2"]


@dataclasses.dataclass(frozen=True)
class QuantSpec:
    """The static facts of one prologue: everything else is dynamic. It is the compile key.

    ``block_q``, ``block_k`` and ``block_v`` are tokens per scale (1: per token); 0 means that the
    operand is not quantized (Q and K go together). ``lengths`` says where sequences end.
    ``mask_q``: queries that see no key count as zero in the scale of their block; the kernel takes
    the bounds of the mask for it. ``mean_given``: smoothing takes off a mean that the caller has.
    """

    dtype: Literal["bfloat16", "float16"]
    head_dim: int
    block_q: int
    block_k: int
    block_v: int
    smooth_k: bool = True
    v_scale_form: VScaleForm = "scale"
    lengths: Lengths = "dense"
    mask_q: bool = False
    mean_given: bool = False

    @property
    def computes_mean(self) -> bool:
        """Whether the kernels of the mean run."""
        return self.smooth_k and not self.mean_given

    def why_not(self) -> str | None:
        """The reason why no kernel exists for this, with the remedy; None if one does."""
        if reason := HOPPER.why_not_head_dim(self.head_dim):
            return reason
        for name in ("block_q", "block_k", "block_v"):
            if getattr(self, name) not in (0, *BLOCKS):
                return f"{name}={getattr(self, name)}: quantization kernels take {BLOCKS[1:]}"
        if (self.block_q == 0) != (self.block_k == 0):
            return "Q and K are quantized together: one of block_q and block_k is 0"
        if self.block_q == 0 and self.block_v == 0:
            return "nothing to quantize: the policy keeps Q, K and V in 16 bit"
        if self.smooth_k and not self.block_k:
            return "smooth_k without INT8 K: set smooth_k=False"
        if self.v_scale_form == "log2" and self.block_v != 1:
            return "v_scale_form='log2' needs a scale per token of V (block_v=1)"
        return None


def ceil_div(a: int, b: int) -> int:
    """Smallest integer not below a / b."""
    return -(-a // b)


def mean_chunks(batch_heads: int, seqlen: int) -> int:
    """Token chunks per head of the K mean: enough CTAs to fill a GPU, few partial sums to add up.

    A function of shapes alone, so that results never depend on the device.
    """
    fill = ceil_div(384, max(1, batch_heads))
    return max(1, min(fill, ceil_div(seqlen, TILE), MAX_CHUNKS))
