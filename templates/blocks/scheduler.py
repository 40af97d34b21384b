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


def visible_blocks(last_row, seqlen_q, seqlen_k, *, tile_n: int, causal: bool):
    """Key blocks of which query ``last_row`` sees a key; they are walked from the last to 0.

    Query i sees key j iff j < seqlen_k and, causal, j <= i + seqlen_k - seqlen_q.
    """
    keys = visible_keys(last_row, seqlen_q, seqlen_k, causal=causal)
    return cute.ceil_div(cutlass.max(keys, 0), tile_n)


def whole_blocks(first_row, seqlen_q, seqlen_k, *, tile_n: int, causal: bool):
    """Key blocks that ``first_row`` and all later queries see whole: they need no mask."""
    return cutlass.max(visible_keys(first_row, seqlen_q, seqlen_k, causal=causal), 0) // tile_n


def visible_keys(row, seqlen_q, seqlen_k, *, causal: bool):
    """Keys below this index are visible to query ``row``."""
    if const_expr(causal):
        return cutlass.min(row + 1 + seqlen_k - seqlen_q, seqlen_k)
    return seqlen_k
