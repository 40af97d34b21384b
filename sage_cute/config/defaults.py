"""The configuration that is used where no tuned one exists."""

from __future__ import annotations

from sage_cute.config.problem import AttnProblem
from sage_cute.config.tile_config import FwdTileConfig


def default_fwd_config(problem: AttnProblem) -> FwdTileConfig:
    """Picked by hand from measurements on an H200 (docs/forward-kernel.md)."""
    n = problem.block_k
    if problem.padded_dim > 128:
        stages = 2 if problem.padded_dim == 256 else 3
        return FwdTileConfig(tile_n=n, num_stages=stages, overlap=False, pv_slices=2)
    if problem.padded_dim <= 64:
        return FwdTileConfig(
            tile_m=192, tile_n=n, num_consumer_wgs=3, longest_first=problem.is_causal
        )
    return FwdTileConfig(tile_n=n, longest_first=problem.is_causal)
