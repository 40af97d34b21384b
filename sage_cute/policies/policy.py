"""A quantization policy: the precision of each product and the granularity of each scale, as data.

Attention has seven products. Forward: ``qk`` (S = Q K^T) and ``pv`` (O = P V). Backward: ``s``
(S again), ``dv`` (P^T dO), ``dp`` (dO V^T), ``dq`` (dS K) and ``dk`` (dS^T Q).

An INT8 product needs scales that are constant along the contracted index, which is what limits the
granularities below; per-token scales of V and of dO reach contracted tokens only by being folded
into the other operand. Source: SageAttention3 appendix (arXiv 2505.11594), SageBwd
(arXiv 2603.02170) and this project's own simulations.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal, get_args, get_type_hints

from sage_cute.errors import PolicyError

Precision = Literal["int8", "16bit"]
"""``16bit``: operands in the input's dtype (bfloat16 for float32 inputs), float32 accumulation.
Operands that hold dS are bfloat16 always: its range does not fit float16."""

PRODUCTS = ("qk", "pv", "s", "dv", "dp", "dq", "dk")


@dataclasses.dataclass(frozen=True)
class Policy:
    """One explicit mix. The defaults are the paper's (``sagebwd``)."""

    # Precision of the seven products.
    qk: Precision = "int8"
    pv: Precision = "int8"
    s: Precision = "int8"
    dv: Precision = "int8"
    dp: Precision = "16bit"
    dq: Precision = "int8"
    dk: Precision = "int8"

    # Tiles that rounding depends on: part of the mathematics, hence never the tuner's to choose.
    block_q: int = 128  # queries per block scale of Q
    block_k: int = 64  # keys per block scale of K and V, and per scale of the forward's P
    bwd_block_q: int = 128  # queries per backward tile: dO, Q^T, P^T, dS^T
    bwd_block_k: int = 64  # keys per backward tile: K^T, dS

    # Granularity of each scale.
    q_scale: Literal["per_block", "per_token"] = "per_block"
    k_scale: Literal["per_block", "per_token"] = "per_block"
    v_scale: Literal["per_block", "per_token", "per_channel"] = "per_block"
    """``per_token`` is folded into P before P is quantized; ``per_channel`` is per block too."""
    p_max: Literal[127, 255] = 127  # largest code of the forward's P: signed or unsigned 8 bit
    p_scale: Literal["per_block", "bounded"] = "per_block"
    """The forward's P of a query is quantized against its largest value in the block of keys, or
    ``bounded``: where V's token scales, which are folded into P, differ little in a block, against
    the largest P of before the folding times the largest of these scales. Then a kernel needs no
    maximum of the products; ``Visibility.bounded`` and ``flat_bound`` of the numerics say where."""
    p_bwd_scale: Literal["per_tile", "per_key"] = "per_tile"  # P^T: one per tile, or per key row
    ds_dk_scale: Literal["per_tile", "per_key"] = "per_tile"  # dS^T in dK
    ds_dq_rows: int = 0  # queries per scale of dS in dQ; 0: the whole tile
    do_scale: Literal["per_block", "per_token"] = "per_block"  # dO in an INT8 dP
    transposed_scale: Literal["per_block", "per_channel"] = "per_block"
    """Q^T, K^T and dO^T, the operands whose tokens are contracted: one scale a block (then the
    forward's codes serve again where their blocks are the same), or one per block and channel."""
    dp_v: Literal["exact", "dequantized"] = "exact"
    """V in a 16-bit dP: as given, or as the forward's quantization left it. An INT8 dP always takes
    the forward's V and makes delta from the dequantized dO, so that their errors cancel."""

    # Smoothing: what is subtracted before quantization and put back exactly.
    smooth_k: bool = True  # K - mean over tokens
    smooth_q: bool = False  # Q - mean over its block
    smooth_v: bool = False  # V - mean over tokens

    def __post_init__(self) -> None:
        for name, choices in _choices().items():
            if getattr(self, name) not in choices:
                raise PolicyError(
                    f"policy field {name}={getattr(self, name)!r}: choose one of "
                    + ", ".join(map(str, choices))
                )
        for name in ("block_q", "block_k", "bwd_block_q", "bwd_block_k"):
            # 255 * 127 * 512 < 2^24: every partial sum of a tile stays exact in float32.
            if not 1 <= getattr(self, name) <= 512:
                raise PolicyError(f"policy field {name}={getattr(self, name)}: 1 to 512")
        if self.ds_dq_rows < 0 or (self.ds_dq_rows and self.bwd_block_q % self.ds_dq_rows):
            raise PolicyError(
                f"policy field ds_dq_rows={self.ds_dq_rows} must divide "
                f"bwd_block_q={self.bwd_block_q} (0: one scale a tile)"
            )
        if self.smooth_q and self.qk != "int8":
            raise PolicyError("smooth_q only changes an INT8 qk: set qk=int8 or smooth_q=false")
        if self.smooth_v and self.pv != "int8":
            raise PolicyError("smooth_v only changes an INT8 pv: set pv=int8 or smooth_v=false")
        if self.dp == "int8" and self.v_scale == "per_channel":
            raise PolicyError(
                "an INT8 dp contracts over channels, so V's scale may not vary over them: "
                "set v_scale=per_token or per_block, or dp=16bit"
            )

    @property
    def dequantized_v_in_dp(self) -> bool:
        """Whether dP takes the V that the forward's INT8 product used."""
        return self.dp == "int8" or (self.dp_v == "dequantized" and self.pv == "int8")

    @property
    def saves_q_codes(self) -> bool:
        """Whether the backward gets INT8 codes of Q (else Q itself)."""
        return self.qk == "int8"

    @property
    def saves_k_codes(self) -> bool:
        """Whether the backward gets INT8 codes of K. Smoothing Q needs the exact K for its bias."""
        return self.qk == "int8" and not self.smooth_q

    def replace(self, **overrides: Any) -> Policy:
        """This policy with some fields changed, validated again."""
        return dataclasses.replace(self, **overrides)

    def asdict(self) -> dict[str, Any]:
        """Field names and values, JSON-able."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        products = " ".join(f"{name}={getattr(self, name)}" for name in PRODUCTS)
        scales = (
            f"Q {self.q_scale}, K {self.k_scale}, V {self.v_scale}, "
            f"P {self.p_scale} {self.p_max} levels, "
            f"P^T {self.p_bwd_scale}, dS^T {self.ds_dk_scale}, dS per "
            f"{self.ds_dq_rows or self.bwd_block_q}x{self.bwd_block_k}, dO {self.do_scale}, "
            f"transposed copies {self.transposed_scale}"
        )
        smooth = "".join(x for x in "kqv" if getattr(self, f"smooth_{x}")) or "none"
        return f"{products}; scales: {scales}; smoothing: {smooth}"


@functools.cache
def _choices() -> dict[str, tuple[Any, ...]]:
    """The allowed values of each field that has a closed set of them."""
    hints = get_type_hints(Policy)
    return {
        f.name: (True, False) if hints[f.name] is bool else get_args(hints[f.name])
        for f in dataclasses.fields(Policy)
        if hints[f.name] is not int
    }
