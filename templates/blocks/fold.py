"""O += b * (P V), the integer product of one key block, in two instructions an element.

An integer x becomes MAGIC + x or MAGIC - x (one IMAD with the row's sign) and is multiplied by b of
that sign and added in one FFMA. What the magic numbers add to O, +-b * MAGIC, is kept a row; the
sign is chosen against the sum so far, so that the bias never exceeds one MAGIC * max b, whose
rounding is one unit of the codes' product (1 / (p_max * 127)). It is taken off at the end.
"""

from cutlass import Float32, Int32

from sage_cute.templates.blocks import ptx
from sage_cute.templates.blocks.magic import MAGIC, MAGIC_BITS


def begin_fold(rows):
    """The rows' signs and b with these signs; books the bias."""
    signs, factors = [], []
    for r in range(2):
        down = rows.bias[r] > 0.0
        signs.append(ptx.select(down, Int32(-1), Int32(1)))
        factors.append(ptx.select(down, -rows.b[r], rows.b[r]))
        rows.bias[r] = ptx.fma(factors[r], Float32(MAGIC), rows.bias[r])
    return signs, factors


def fold(acc_O, acc_PV, signs, factors, groups, first: int = 0):
    """Column groups of acc_PV into acc_O, whose group ``first`` is acc_PV's group 0."""
    for j in groups:
        for r in range(2):
            for c in range(2):
                i = c + 2 * r + 4 * j
                x = ptx.as_float(ptx.imad(acc_PV[i], signs[r], MAGIC_BITS))
                o = i + 4 * first
                acc_O[o] = ptx.fma(x, factors[r], acc_O[o])
