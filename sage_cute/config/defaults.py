"""The configuration that is used where no tuned one exists."""

from __future__ import annotations

from sage_cute.config.problem import AttnProblem
from sage_cute.config.tile_config import FwdTileConfig


def default_fwd_config(problem: AttnProblem) -> FwdTileConfig:
    """Picked by hand from measurements on an H200 (docs/forward-kernel.md)."""
    if problem.head_dim == 256:
        return FwdTileConfig(
            tile_n=problem.block_k, num_stages=2, overlap=False, pv_slices=2, fold_after=0
        )
    if problem.head_dim != 128:
        return FwdTileConfig(tile_n=problem.block_k, fold_after=4)
    return FwdTileConfig(
        tile_n=problem.block_k,
        pv_slices=2,
        fold_after=4,
        pingpong=not problem.is_causal,
        persistent=problem.is_causal,
        longest_first=problem.is_causal,
    )
