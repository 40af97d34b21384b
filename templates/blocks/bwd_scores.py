"""P and dS of a tile, out of the accumulators of S and dP (or of their transposes).

    P  = exp2(S - L)            S = acc q_scale k_scale scale log2 e
    dS = P (dP - delta)         dP = acc v_scale do_scale

Integers become floats by one add (blocks.magic), whose bias is folded into the FFMA that scales.
do_scale is left out of dS: it is a factor of the query's row, in Q^ for dK and in the output for
dQ; delta is divided by it. P is rounded to 16 bits as soon as it is there, which frees half of its
registers. dS is then either the product of two packed numbers, or, with fewer roundings and three
instructions more for two scores, of two floats.

Element ``c + 2 r + 4 j`` of a thread is row g + 8 r of its warp's 16, column 8 j + 2 q + c.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, const_expr

from sage_cute.templates.blocks import ptx
from sage_cute.templates.blocks.magic import MAGIC, MAGIC_BITS

HIGH_HALF = -(1 << 16)


def pack(low, high, dtype):
    """Two floats as 16-bit numbers in one word."""
    return (ptx.pack_halves if dtype is Float16 else ptx.pack_bfloats)(low, high)


def as_words(x):
    """A register tensor in 32-bit words, flat."""
    words = cute.recast_tensor(x, Int32)
    return cute.make_tensor(words.iterator, cute.make_layout(cute.size(words)))


@cute.jit
def probabilities(acc, words, exponent, visible, targets: cutlass.Constexpr):
    """Acc of S becomes P, packed.

    Args:
        acc: integers.
        words: for each of ``targets`` a flat tensor of half as many words.
        exponent: (r, j) -> function of (c, integer + MAGIC as float): S - L.
        visible: (r, j, c) -> whether the query sees the key; None: all do.
        targets: 16-bit types.
    """
    for j in cutlass.range_constexpr(cute.size(acc) // 4):
        for r in cutlass.range_constexpr(2):
            z = exponent(r, j)
            pair = []
            for c in cutlass.range_constexpr(2):
                p = ptx.exp2(z(c, ptx.as_float(acc[c + 2 * r + 4 * j] + MAGIC_BITS)))
                if const_expr(visible is not None):
                    p = ptx.select(visible(r, j, c), p, Float32(0.0))
                pair.append(p)
            for t, dtype in enumerate(targets):
                words[t][r + 2 * j] = pack(pair[0], pair[1], dtype)


@cute.jit
def gradients(acc, words, difference, visible):
    """Acc of dP becomes dP - delta; 0 where the query does not see the key: 0 * NaN is not 0.

    Args:
        acc: integers, or floats of a 16-bit product.
        words: a flat tensor of half as many words for the packed result; None: it replaces acc.
        difference: (r, j) -> function of (c, acc element as float, + MAGIC if an integer).
        visible: as for ``probabilities``.
    """
    integers = const_expr(acc.element_type is Int32)
    f = cute.recast_tensor(acc, Float32)
    for j in cutlass.range_constexpr(cute.size(acc) // 4):
        for r in cutlass.range_constexpr(2):
            t = difference(r, j)
            pair = []
            for c in cutlass.range_constexpr(2):
                i = c + 2 * r + 4 * j
                d = t(c, ptx.as_float(acc[i] + MAGIC_BITS) if integers else acc[i])
                if const_expr(visible is not None):
                    d = ptx.select(visible(r, j, c), d, Float32(0.0))
                if const_expr(words is None):
                    f[i] = d
                pair.append(d)
            if const_expr(words is not None):
                words[r + 2 * j] = ptx.pack_bfloats(pair[0], pair[1])


@cute.jit
def multiply(p, d, words):
    """Packed dS = P (dP - delta): p packed bfloat16; d likewise, or floats in accumulator order."""
    if const_expr(cute.size(d) == cute.size(p)):
        for i in cutlass.range_constexpr(cute.size(p)):
            words[i] = ptx.bfloat2_mul(p[i], d[i])
    else:
        f = cute.recast_tensor(d, Float32)
        for j in cutlass.range_constexpr(cute.size(p) // 2):
            for r in cutlass.range_constexpr(2):
                i, both = 2 * r + 4 * j, p[r + 2 * j]
                low = ptx.as_float(both << 16) * f[i]
                high = ptx.as_float(both & HIGH_HALF) * f[i + 1]
                words[r + 2 * j] = ptx.pack_bfloats(low, high)


def with_bias(factor):
    """(factor of 22 bits, -MAGIC factor exactly): what a magic number is scaled with."""
    factor = ptx.round22(factor)
    return factor, factor * -MAGIC
