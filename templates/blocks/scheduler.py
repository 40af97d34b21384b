"""Which tile of which head a CTA works on."""

from typing import NamedTuple

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
