"""Which tile a CTA of the backward owns, and which tiles of the other side it walks.

Rows are the queries that see any key: query i is row i - blind. Row r sees key j iff j < seqlen_k
and, causal, j <= r + offset, with offset >= 0.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from sage_cute.templates.blocks import ptx


class BwdTile(NamedTuple):
    """One tile of one head, and which share of the columns of its output."""

    block: Int32
    split: Int32
    head: Int32
    batch: Int32


def bwd_tile(index, num_blocks, splits: int, heads, *, last_first: bool = False):
    """The tile of a linear index: head after head, so that what CTAs read stays in L2."""
    split, index = (index % splits, index // splits) if splits > 1 else (Int32(0), index)
    block, head = index % num_blocks, index // num_blocks
    if last_first:
        block = num_blocks - 1 - block
    return BwdTile(block, split, head % heads, head // heads)


class Span(NamedTuple):
    """Tiles to walk, in groups of as many as there are buffers; the masked groups come first.

    A buffer's index is known at compile time then, and with it all addresses that the products
    take. Tiles that fill up a group lie behind the last row or key, where nothing is visible.
    """

    first: Int32
    num_tiles: Int32
    num_groups: Int32
    num_masked: Int32  # groups that need a mask, and always one


def query_span(n_block, rows, seqlen_k, offset, *, tile_m: int, tile_n: int, stages, causal: bool):
    """Tiles of queries that see some key of a tile, in rising order."""
    first, masked = Int32(0), Int32(0)
    if const_expr(causal):
        first = cutlass.max(n_block * tile_n - offset, 0) // tile_m
        masked = cute.ceil_div(cutlass.max((n_block + 1) * tile_n - 1 - offset, 0), tile_m)
    num_groups = cute.ceil_div(cute.ceil_div(rows, tile_m) - first, stages)
    masked = cutlass.max(cute.ceil_div(masked - first, stages), 1)
    masked = ptx.select((n_block + 1) * tile_n > seqlen_k, num_groups, masked)
    return Span(first, num_groups * stages, num_groups, cutlass.min(masked, num_groups))


def key_span(m_block, seqlen_k, offset, *, tile_m: int, tile_n: int, stages: int, causal: bool):
    """Tiles of keys that some row of a tile sees, in falling order from ``first``."""
    last, whole = seqlen_k, seqlen_k
    if const_expr(causal):
        last = cutlass.min((m_block + 1) * tile_m + offset, seqlen_k)
        whole = cutlass.min(m_block * tile_m + offset + 1, seqlen_k)
    num_groups = cute.ceil_div(cute.ceil_div(last, tile_n), stages)
    num_tiles = num_groups * stages
    masked = cutlass.max(cute.ceil_div(num_tiles - whole // tile_n, stages), 1)
    return Span(num_tiles - 1, num_tiles, num_groups, cutlass.min(masked, num_groups))


class Slot(NamedTuple):
    """A buffer of a pipeline: what a pipeline state is, with an index known at compile time."""

    index: int
    phase: Int32


def visible_rows(seqlen_q, seqlen_k, *, causal: bool):
    """How many queries see a key."""
    return cutlass.min(seqlen_q, seqlen_k) if const_expr(causal) else seqlen_q


def first_query(key, seqlen_k, offset, *, causal: bool):
    """Rows from this one on see a key; a key that does not exist is seen by none."""
    first = key - offset if const_expr(causal) else Int32(0)
    return ptx.select(key >= seqlen_k, Int32(1 << 30), first)


def visible_keys(row, seqlen_k, offset, *, causal: bool):
    """Keys below this one are seen by a row."""
    return cutlass.min(row + 1 + offset, seqlen_k) if const_expr(causal) else seqlen_k
