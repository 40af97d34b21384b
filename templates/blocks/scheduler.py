"""Which tile of which head a CTA works on, and which key blocks the tile sees."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr


class TileCoord(NamedTuple):
    """One tile of work."""

    m_block: Int32
    head: Int32
    batch: Int32


def tile_coord(index, num_m_blocks, num_heads, batch, *, causal: bool, longest_first: bool):
    """The tile of a linear index.

    Head after head (keys and values stay in L2), and under a causal mask each head's longest tile
    first; or, longest_first, all heads' longest tiles first.
    """
    if const_expr(longest_first):
        all_heads = num_heads * batch
        m_block, bh = index // all_heads, index % all_heads
    else:
        bh, m_block = index // num_m_blocks, index % num_m_blocks
    if const_expr(causal):
        m_block = num_m_blocks - 1 - m_block
    return TileCoord(m_block, bh % num_heads, bh // num_heads)


class KeyRange(NamedTuple):
    """Key blocks of a tile, walked from the last to block 0."""

    num_blocks: Int32  # blocks that some query of the tile sees
    num_exact: Int32  # of them, the last ones: all that need a mask, and one that does not


def key_range(m_block, seqlen_q, seqlen_k, *, tile_m: int, tile_n: int, causal: bool):
    """Query i sees key j iff j < seqlen_k and, causal, j <= i + seqlen_k - seqlen_q.

    After the ``num_exact`` blocks every row that sees any key has seen one, so that its softmax
    reference is set; the blocks that remain need no mask.
    """
    last, whole = seqlen_k, seqlen_k
    if const_expr(causal):
        offset = seqlen_k - seqlen_q
        last = _between((m_block + 1) * tile_m + offset, 0, seqlen_k)
        whole = _between(m_block * tile_m + offset + 1, 0, seqlen_k)
    num_blocks = cute.ceil_div(last, tile_n)
    return KeyRange(num_blocks, num_blocks - cutlass.max(whole // tile_n - 1, 0))


def visible_keys(row, seqlen_q, seqlen_k, *, causal: bool):
    """Keys below this index are visible to query ``row``."""
    if const_expr(causal):
        return cutlass.min(row + 1 + seqlen_k - seqlen_q, seqlen_k)
    return seqlen_k


def _between(x, low, high):
    return cutlass.max(cutlass.min(x, high), low)
