"""The static facts of an attention problem: with a tile configuration, the key of a kernel."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from sage_cute.policies import Policy

DType = Literal["bfloat16", "float16"]
Granularity = Literal["per_block", "per_token"]
Lengths = Literal["dense", "padded", "packed"]
"""Where sequences end: all alike; at key lengths of a padded batch; at offsets of a packed one."""


@dataclasses.dataclass(frozen=True)
class AttnProblem:
    """Everything about a forward call that is compiled in.

    Lengths, batch, heads, strides and the softmax scale are dynamic. Of the policy, only what the
    forward kernel does differently: two policies with the same forward share a kernel.
    """

    head_dim: int
    dtype: DType  # of the output
    is_causal: bool
    block_q: int
    block_k: int
    v_scale: Granularity
    p_scale: Literal["per_block", "bounded"]
    p_max: Literal[127, 255]
    window: bool = False  # bounds to the left and right of the diagonal, both dynamic
    lengths: Lengths = "dense"

    @property
    def padded_dim(self) -> int:
        """head_dim as the products see it, a multiple of 32; TMA fills up with zeros."""
        return -(-self.head_dim // 32) * 32

    @classmethod
    def of(
        cls,
        policy: Policy,
        *,
        head_dim: int,
        dtype: DType,
        is_causal: bool,
        window: bool = False,
        lengths: Lengths = "dense",
    ) -> AttnProblem:
        """The forward problem of a policy. Ask ``sage_cute.limits`` first.

        A causal mask beside a window is a window whose right bound is 0.
        """
        per_token_q = policy.q_scale == "per_token"
        # With one V scale a block the bound is the largest P'.
        return cls(
            head_dim=head_dim,
            dtype=dtype,
            is_causal=is_causal and not window,
            block_q=1 if per_token_q else policy.block_q,
            block_k=policy.block_k,
            v_scale=policy.v_scale,  # type: ignore[arg-type]
            p_scale="bounded" if policy.v_scale == "per_block" else policy.p_scale,
            p_max=policy.p_max,
            window=window,
            lengths=lengths,
        )
