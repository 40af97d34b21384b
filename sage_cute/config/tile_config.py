"""Tile configurations: what a tuner may choose, none of which changes the mathematics."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class FwdTileConfig:
    """How the forward kernel walks its problem. ``tile_n`` is the policy's ``block_k``."""

    tile_m: int = 128  # queries of a CTA
    tile_n: int = 128  # keys of an iteration
    num_stages: int = 4  # K, V and scale buffers in shared memory
    num_consumer_wgs: int = 2  # warpgroups that compute, 64 queries each
    overlap: bool = True  # P V of a block is issued with Q K^T of the next one
    pv_slices: int = 1  # P V in column slices, one after the other: fewer registers
    pingpong: bool = False  # warpgroups take turns at issuing their products
    persistent: bool = False  # one CTA a multiprocessor, walking over tiles
    longest_first: bool = False  # tiles of all heads by falling length; else head after head
    exp_fma_of_8: int = 0  # of 8 column groups, how many take exp2 by polynomial on the FMA pipe
    lazy_rescale: bool = True  # move the softmax reference only where something could overflow

    def asdict(self) -> dict[str, Any]:
        """Field names and values, JSON-able."""
        return dataclasses.asdict(self)
