"""Online softmax of INT8 scores, with P quantized block by block.

A score is in log2 units: ``S = acc * factor``, factor = q_scale * scale * log2 e * k_scale. In a
block of keys a row has its own maximum m_blk and ``P~ = exp2(S - m_blk)`` lies in [0, 1], so that
half precision holds it. What accumulates over blocks (l, O) is relative to a reference m that lags
behind the running maximum: each block brings the weight exp2(m_blk - m), and m moves only where
that could overflow, to HEADROOM above the maximum, which multiplies all that has accumulated. How
far m lags changes nothing but rounding. HEADROOM is negative and weights are large, for the fold's
sake (``blocks.fold``).

``P' = P~ * v`` (the key's v_scale; 1 if V has one scale a block) becomes codes ``round(P' *
level)`` and the block contributes ``b * codes V^``. The level is p_max / (largest v_scale of the
block), a bound (P~ <= 1), where the policy allows it and no v_scale of the block is below FLAT of
the largest; else it is p_max / (largest P' of the row).

Element ``c + 2 r + 4 j`` of the scores is column 8 j + 2 q + c, q the thread's place in its quad.
Probabilities are packed in pairs (c = 0, 1): a half2 word each.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from sage_cute.templates.blocks import ptx
from sage_cute.templates.blocks.magic import HALF_MAGIC, MAGIC, MAGIC_BITS
from sage_cute.templates.params import Rows

LIMIT, HEADROOM = 90.0, -66.0
LARGEST_V = 2.0**35  # in rows.unit: what weights of 2^LIMIT leave room for
LOWEST = -3.4028234663852886e38  # finite: exp2(-inf - LOWEST) is 0
FLAT = 0.25
HEAD_LOG2 = 8  # exact blocks keep P~ * 2^8 in halves: 2^8 * p_max is finite, 2^-24 not yet 0
LEAST_TOP = 2.0**-8  # p_max / LEAST_TOP is finite in half precision
NEG_INF = float("-inf")
EXP2_COEFFICIENTS = (0.99999926, 0.69312181, 0.24024745, 0.05591786, 0.0095701)  # of x^0 .. x^4


def make_rows(q_scale):
    """Fresh state of a thread's two rows."""
    rows = Rows(*(cute.make_rmem_tensor(2, Float32) for _ in Rows._fields))
    for r in range(2):
        rows.q[r] = q_scale[r]
        rows.m[r] = Float32(LOWEST)
        for x in (rows.l, rows.b, rows.bias, rows.unit):
            x[r] = Float32(0.0)
    return rows


def row_of(acc, r):
    """The elements of row r."""
    return [acc[c + 2 * r + 4 * j] for j in range(cute.size(acc) // 4) for c in range(2)]


def quad_reduce(x, largest):
    """The largest over the four threads that share a row."""
    x = largest(x, cute.arch.shuffle_sync_bfly(x, 1))
    return largest(x, cute.arch.shuffle_sync_bfly(x, 2))


def int_max(values):
    """Largest of many ints, three at a time in four chains."""
    chains, rest = list(values[:4]), values[4:]
    for n in range(0, len(rest), 2):
        chains[n // 2 % 4] = ptx.max3(chains[n // 2 % 4], rest[n], rest[min(n + 1, len(rest) - 1)])
    return ptx.max3(ptx.max3(chains[0], chains[1], chains[2]), chains[3], chains[3])


@cute.jit
def weights(rows, acc_O, maxima, offsets, v, lazy: cutlass.Constexpr[bool]):
    """The rows' weights exp2(m_blk - m) of a block, m moved before where that is needed.

    Branches are for the warp, but each row moves or not by its own scores: what other rows hold
    never changes a result. ``offsets`` are returned as they are, through the branch: what is made
    of them stays behind it, and mixes with the rest of the step. The third result is the block's
    V scale v in units of ``rows.unit``, which is set by the first block and moves with one that is
    far larger.
    """
    rise, held = (cute.make_rmem_tensor(2, Float32) for _ in range(2))
    scaled = cute.make_rmem_tensor(1, Float32)
    scaled[0] = ptx.mul(v, rows.unit[0])
    large = scaled[0] > LARGEST_V
    moves = []
    for r in cutlass.range_constexpr(2):
        rise[r], held[r] = maxima[r] - rows.m[r], offsets[r]
        stays = rise[r] <= (LIMIT if lazy else -HEADROOM)
        moves.append(stays == False)  # noqa: E712  (NaN moves too)
    if cute.arch.vote_any_sync(moves[0] | moves[1] | large):
        before = rows.unit[0]
        fresh = before == 0.0
        rows.unit[0] = ptx.select(large | fresh, inverse_power(v), before)
        change = ptx.select(fresh, Float32(1.0), rows.unit[0] * ptx.rcp(before))
        scaled[0] = ptx.mul(v, rows.unit[0])
        for r in cutlass.range_constexpr(2):
            m_new = ptx.select(moves[r], maxima[r] + HEADROOM, rows.m[r])
            alpha = ptx.select(moves[r], ptx.exp2(rows.m[r] - m_new), Float32(1.0))
            rows.m[r] = m_new
            rise[r] = maxima[r] - m_new
            held[r] = offsets[r] + (m_new - m_new)  # a zero of which the compiler knows nothing
            rows.l[r] = rows.l[r] * alpha
            alpha = alpha * change
            for x in (rows.b, rows.bias):
                x[r] = x[r] * alpha
            for j in cutlass.range_constexpr(cute.size(acc_O) // 4):
                for c in cutlass.range_constexpr(2):
                    i = c + 2 * r + 4 * j
                    acc_O[i] = acc_O[i] * alpha
    return [ptx.exp2(rise[r]) for r in range(2)], [held[0], held[1]], scaled[0]


def inverse_power(x):
    """2^-e of 2^e <= x < 2^(e + 1); of 0 and of subnormals 2^127."""
    return ptx.as_float((254 << 23) - (ptx.as_int(x) & 0x7F800000))


def scores_in_place(acc, rows, k_block, visible):
    """The scores become floats, masked; returns the rows' maxima.

    visible: (r, column) -> whether row r sees a column, counted from the thread's first one.
    """
    f = cute.recast_tensor(acc, Float32)
    tops = [Float32(NEG_INF)] * 2
    for r in range(2):
        factor = ptx.round22(rows.q[r] * k_block)  # exact times MAGIC
        for j in range(cute.size(acc) // 4):
            for c in range(2):
                i = c + 2 * r + 4 * j
                s = ptx.fma(ptx.as_float(acc[i] + MAGIC_BITS), factor, factor * -MAGIC)
                f[i] = ptx.select(visible(r, 8 * j + c), s, Float32(NEG_INF))
                tops[r] = ptx.max_nan(tops[r], f[i])
    return [quad_reduce(top, ptx.max_nan) for top in tops]


def tops(acc):
    """The rows' largest integer scores."""
    return [quad_reduce(int_max(row_of(acc, r)), cutlass.max) for r in range(2)]


def score_factors(rows, k_block, tops, wide: bool):
    """What turns integers into ``S - m_blk = float(bits of base + acc) * factor - offset``.

    No mask. Returns bases, factors, offsets and the rows' m_blk. Needs factors that are not
    negative. The largest score becomes 0 exactly, however large it is. ``wide``: differences of
    scores do not fit 2^22; then it becomes a little less than 0.
    """
    bases, factors, offsets, maxima = [], [], [], []
    for r, top in enumerate(tops):
        factor, x = rows.q[r] * k_block, ptx.as_float(top + MAGIC_BITS)
        if wide:
            offset = ptx.mul(x, factor)
            offset = ptx.fma(offset, Float32(2.0**-22), offset)
            bases.append(Int32(MAGIC_BITS))
            maxima.append(ptx.fma(Float32(-MAGIC), factor, offset))
        else:
            factor = ptx.as_float(ptx.as_int(factor) & -4)  # 22 bits: exact times MAGIC
            offset = ptx.mul(Float32(MAGIC), factor)
            bases.append(MAGIC_BITS - top)
            maxima.append(ptx.fma(x, factor, -offset))
        factors.append(factor)
        offsets.append(offset)
    return bases, factors, offsets, maxima


def exp2_fma(x):
    """exp2 on the FMA pipe (degree 4, relative error 4e-6) for x <= LIMIT; keeps NaN."""
    x = ptx.max_nan(x, Float32(-126.0))
    shifted = x + MAGIC
    f = x - (shifted - MAGIC)
    p = Float32(EXP2_COEFFICIENTS[4])
    for coefficient in reversed(EXP2_COEFFICIENTS[:4]):
        p = ptx.fma(p, f, Float32(coefficient))
    return p * ptx.as_float(ptx.imad(ptx.as_int(shifted), 1 << 23, 127 << 23))


def bounded_block(acc, rows, p32, bases, factors, offsets, words, exp_fma_of_8: int):
    """Scores to codes, each as soon as its probability is known; returns the rows' sums of P~.

    words[j]: p_max * v_scale / (largest v_scale of the block) of the thread's keys of column group
    j, as half2.
    """
    sums = [None] * 2  # one chain a row: what ptxas makes of two is 3 % slower
    for j in range(0, cute.size(acc) // 4, 2):
        for r in range(2):
            at = [(g, c) for g in (j, j + 1) for c in range(2)]
            x = [ptx.as_float(acc[c + 2 * r + 4 * g] + bases[r]) for g, c in at]
            z = [ptx.fma(value, factors[r], offsets[r]) for value in x]
            take = exp2_fma if j % 8 < exp_fma_of_8 else ptx.exp2
            p = [take(value) for value in z]
            for value in p:
                sums[r] = value if sums[r] is None else sums[r] + value
            halves = [ptx.pack_halves(p[0], p[1]), ptx.pack_halves(p[2], p[3])]
            codes = [
                ptx.half2_fma(half2, words[g], Int32(HALF_MAGIC))
                for half2, g in zip(halves, (j, j + 1), strict=True)
            ]
            p32[r + j] = ptx.prmt(codes[0], codes[1], 0x6420)
    return sums


def exact_block(acc, rows, p32, shifted, words, visible, p_max: int):
    """Scores to codes against the largest P' of each row.

    Args:
        acc: scores.
        rows: state.
        p32: receives the codes, an A operand.
        shifted: (element, row) to S - m_blk + HEAD_LOG2.
        words: as for ``bounded_block``; None: V has one scale a block.
        visible: as for ``scores_in_place``; None: all.
        p_max: largest code.

    Returns:
        The rows' sums of P~ * 2^HEAD_LOG2, and what turns ``codes V^`` into ``P~ * 2^HEAD_LOG2 *
        words V^``.
    """
    groups = cute.size(acc) // 4
    sums, held, inverses = [], [], []
    for r in range(2):
        parts, halves = None, []
        for j in range(groups):
            p = [ptx.exp2(shifted(acc[c + 2 * r + 4 * j], r)) for c in range(2)]
            parts = p if parts is None else [parts[c] + p[c] for c in range(2)]
            half2 = ptx.pack_halves(p[0], p[1])
            if words is not None:
                half2 = ptx.half2_mul(half2, words[j])
                if visible is not None:  # 0 * NaN: a masked key contributes nothing
                    seen = [
                        ptx.select(visible(r, 8 * j + c), Int32(0xFFFF << 16 * c), Int32(0))
                        for c in range(2)
                    ]
                    half2 = half2 & (seen[0] | seen[1])
            halves.append(half2)
        sums.append(parts[0] + parts[1])
        held.append(halves)
    for r in range(2):
        if words is None:
            level = ptx.pack_halves(Float32(p_max / 2**HEAD_LOG2), Float32(p_max / 2**HEAD_LOG2))
            inverses.append(Float32(1.0))
        else:
            # Not negative, so their bits are ordered (NaN above all).
            top = held[r][0]
            for j in range(1, groups - 1, 2):
                top = ptx.half2_max3(top, held[r][j], held[r][j + 1])
            top = ptx.half2_max3(top, held[r][-1], ptx.prmt(top, top, 0x1032))
            top = quad_reduce(top, lambda a, b: ptx.half2_max3(a, b, b))
            top = ptx.half2_max3(top, ptx.prmt(top, top, 0x1032), top)
            top = ptx.max_nan(ptx.low_half(top), Float32(LEAST_TOP))
            level = ptx.rcp(top) * float(p_max)
            level = ptx.pack_halves(level, level)
            inverses.append(ptx.rcp(ptx.low_half(level)))
        for j in range(0, groups, 2):
            codes = [ptx.half2_fma(held[r][g], level, Int32(HALF_MAGIC)) for g in (j, j + 1)]
            p32[r + j] = ptx.prmt(codes[0], codes[1], 0x6420)
    return sums, inverses
