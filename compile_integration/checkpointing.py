"""Selective activation checkpointing: keep attention's outputs, recompute what is cheap."""

from __future__ import annotations

from typing import Any

from torch.utils.checkpoint import CheckpointPolicy

from sage_cute.compile_integration.schema import op

SAVE_OPS = (op("attn_fwd"),)
"""Overloads worth their memory. (Policies are asked about overloads, never about packets.)"""


def save_attention(ctx: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """For ``create_selective_checkpoint_contexts``: attention runs once, all else twice."""
    return CheckpointPolicy.MUST_SAVE if func in SAVE_OPS else CheckpointPolicy.PREFER_RECOMPUTE
