"""Which tile a CTA of the backward owns, and which tiles of the other side it walks.

Rows are the queries that see any key: query i is row i - blind. Row r sees key j iff j < seqlen_k
and, causal, j <= r + offset, with offset >= 0.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from sage_cute.templates.blocks import ptx

BEYOND = 1 << 23
"""A tile behind the end of any tensor, whose rows have 32 bits: TMA fills zeros."""


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
    tail: Int32 | int = 0  # of them the last ones; the others are the first


def group_at(span: Span, step):
    """The group of a step: first those that need a mask, from both ends, then the others."""
    if const_expr(isinstance(span.tail, int)):
        return step
    back = step + span.num_groups - span.num_masked
    masked = ptx.select(step < span.num_masked - span.tail, step, back)
    return ptx.select(step < span.num_masked, masked, step - span.tail)


def tile_at(span: Span, i, stages: int):
    """The i-th tile that is walked, counted from the first of the span (upwards or downwards)."""
    if const_expr(isinstance(span.tail, int)):
        return i
    return group_at(span, i // stages) * stages + i % stages


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


def ragged_query_span(n_block, seq, *, tile_m: int, tile_n: int, stages: int):
    """``query_span`` for any mask and length; there may be no tile at all."""
    key, offset = n_block * tile_n, seq.seqlen_k - seq.seqlen_q
    first, whole, end = Int32(0), Int32(0), seq.seqlen_q
    if const_expr(seq.right is not None):
        first = cutlass.max(key - offset - seq.right, 0) // tile_m
        whole = cute.ceil_div(cutlass.max(key + tile_n - 1 - offset - seq.right, 0), tile_m)
    if const_expr(seq.left is not None):
        end = cutlass.min(end, cutlass.min(key + tile_n, seq.keys) - offset + seq.left)
    end = ptx.select(key < seq.keys, cutlass.max(end, 0), Int32(0))
    num_groups = cute.ceil_div(cutlass.max(cute.ceil_div(end, tile_m) - first, 0), stages)
    front = cutlass.max(cute.ceil_div(cutlass.max(whole - first, 0), stages), 1)
    front = ptx.select(key + tile_n > seq.keys, num_groups, cutlass.min(front, num_groups))
    tail = 0
    if const_expr(seq.left is not None):
        partly = cutlass.max(cutlass.max(key - offset + seq.left + 1, 0) // tile_m - first, 0)
        tail = num_groups - cutlass.min(cutlass.max(partly // stages, front), num_groups)
    return Span(first, num_groups * stages, num_groups, front + tail, tail)


def ragged_key_span(m_block, seq, *, tile_m: int, tile_n: int, stages: int):
    """``key_span`` for any mask and length; there may be no tile at all."""
    row, offset = m_block * tile_m, seq.seqlen_k - seq.seqlen_q
    end, whole, low = seq.keys, seq.keys, Int32(0)
    if const_expr(seq.right is not None):
        end = cutlass.min(row + tile_m + offset + seq.right, end)
        whole = cutlass.min(row + 1 + offset + seq.right, whole)
    if const_expr(seq.left is not None):
        low = cutlass.max(row + offset - seq.left, 0) // tile_n
    end = ptx.select(row < seq.seqlen_q, cutlass.max(end, 0), Int32(0))
    num_groups = cute.ceil_div(cutlass.max(cute.ceil_div(end, tile_n) - low, 0), stages)
    num_tiles = num_groups * stages
    partly = low + num_tiles - cutlass.max(whole, 0) // tile_n
    front = cutlass.min(cute.ceil_div(cutlass.max(partly, 1), stages), num_groups)
    tail = 0
    if const_expr(seq.left is not None):
        partly = cute.ceil_div(cutlass.max(row + tile_m - 1 + offset - seq.left, 0), tile_n) - low
        tail = cutlass.min(cute.ceil_div(cutlass.max(partly, 0), stages), num_groups - front)
    return Span(low + num_tiles - 1, num_tiles, num_groups, front + tail, tail)


def visible_rows(seqlen_q, seqlen_k, *, causal: bool):
    """How many queries see a key."""
    return cutlass.min(seqlen_q, seqlen_k) if const_expr(causal) else seqlen_q


def first_query(key, seq, offset):
    """Rows from this one on see a key (below query_end); one that does not exist is not seen."""
    first = Int32(0)
    if const_expr(seq.right is not None):
        first = key - offset
        if const_expr(not isinstance(seq.right, int)):
            first = first - seq.right
    return ptx.select(key >= seq.keys, Int32(1 << 30), first)


def query_end(key, seq, offset):
    """Rows below this one see a key, of a window."""
    return key - offset + seq.left + 1


def key_end(row, seq, offset):
    """Keys below this one are seen by a row."""
    if const_expr(seq.right is None):
        return seq.keys
    end = row + 1 + offset
    if const_expr(not isinstance(seq.right, int)):
        end = end + seq.right
    return cutlass.min(end, seq.keys)


def key_start(row, seq, offset):
    """The first key that a row sees, of a window."""
    return row + offset - seq.left
