"""O += b * (P V), the integer product of one key block, in one instruction an element.

The bits of an integer 0 <= n < 2^23, read as float32, are exactly ``n 2^-149``: a subnormal, which
FFMA multiplies as fast as any other number. So that P V is not negative, V comes as codes + 128
(``quant.qkv_prologue``): 255 * 255 * 128 < 2^23. What the 128s add to O is 128 times the row's sum
of codes, counted beside it (``rows.bias``) and taken off at the end. Both grow with the number of
keys, where O's own sum may not: their rounding (2^-24) is 1e-4 of O at 16384 keys and flat
attention.

2^-149 would leave no room for b. So O is counted in units of 2^-149 / ``rows.unit``, a power of two
near the inverse of the blocks' V scale, and the weights of blocks are large (``softmax.LIMIT``).
"""

import cutlass.cute as cute
from cutlass import Int32

from sage_cute.templates.blocks import ptx


def fold(acc_O, acc_PV, factors, groups, first: int = 0):
    """Column groups of acc_PV into acc_O, whose group ``first`` is acc_PV's group 0."""
    for j in groups:
        for r in range(2):
            for c in range(2):
                i = c + 2 * r + 4 * j
                o = i + 4 * first
                acc_O[o] = ptx.fma(ptx.as_float(acc_PV[i]), factors[r], acc_O[o])


def count_bias(rows, p32):
    """Books what the 128s will have added to O, a 128th of it, for the block whose codes p32 are.

    Words 2 j + r of p32 hold codes of row r.
    """
    for r in range(2):
        total = Int32(0)
        for word in range(r, cute.size(p32), 2):
            total = ptx.add_bytes(p32[word], total)
        rows.bias[r] = ptx.fma(ptx.as_float(total), rows.b[r], rows.bias[r])
