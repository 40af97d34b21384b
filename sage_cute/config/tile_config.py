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
    overlap: bool = True  # P V of a block runs during the softmax of the next one
    qk_slices: int = 1  # Q K^T in column slices: the next block's first one starts before P is done
    pv_slices: int = 1  # P V in column slices, one after the other: fewer registers
    pingpong: bool = False  # warpgroups take turns at issuing their products
    persistent: bool = False  # one CTA a multiprocessor, walking over tiles
    longest_first: bool = False  # tiles of all heads by falling length; else head after head
    exp_fma_of_8: int = 0  # of 8 column groups, how many take exp2 by polynomial on the FMA pipe
    lazy_rescale: bool = True  # look at the scores' maximum only where one could overflow
    fold_after: int = 8  # sixteenths of the scores done before the last P V is waited for
    split_groups: int = 0
    """Column groups (8 keys) of scores between two branches that are never taken; 0: no branches.
    ptxas moves exponentials past the wait for P V, to the end of an iteration, where they queue for
    the MUFU; it does not move them past a branch."""

    def asdict(self) -> dict[str, Any]:
        """Field names and values, JSON-able."""
        return dataclasses.asdict(self)
