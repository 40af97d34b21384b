"""Online softmax of quantized scores, with P quantized against its block's own maximum.

Domains. A score S is in log2 units: ``S = acc * q * k`` with q the row's ``q_scale * scale * log2
e`` and k the key's (or block's) ``k_scale``. The reference m of a row is any number near its
running maximum: P~ = exp2(S - m) and everything that accumulates (l, O, their pending factor b)
are relative to it, and a new reference multiplies them all. How far m lags behind the maximum
changes nothing but rounding, as long as nothing overflows. So m is set exactly where a mask is
applied and at the first block, HEADROOM above the maximum, and then stays unless a block could
exceed it by LIMIT: by a bound that costs nothing (|acc| <= 127 * sum |q codes|), then by the
largest integer score, then in fact.

P' = P~ * v (the key's v_scale; 1 if V has one a block) has codes ``round(p_max * P' / max P')`` and
the block contributes ``b * codes V^`` with ``b = max P' / p_max`` (times V's block scale).

Scores of a block come in column slices (a list of accumulators); element ``c + 2 r + 4 j`` of one
is column 8 j + 2 q + c, q the thread's place in its quad.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from sage_cute.templates.blocks import ptx
from sage_cute.templates.blocks.magic import MAGIC, MAGIC_BITS
from sage_cute.templates.params import Rows

LIMIT, HEADROOM = 64.0, 32.0
TINY = 2.0**-118  # p_max / TINY is finite
NEG_INF = float("-inf")
EXP2_COEFFICIENTS = (0.99999926, 0.69312181, 0.24024745, 0.05591786, 0.0095701)  # of x^0 .. x^4


def make_rows(q_scale):
    """Fresh state of a thread's two rows."""
    kinds = {"sign": Int32}
    rows = Rows(*(cute.make_rmem_tensor(2, kinds.get(n, Float32)) for n in Rows._fields))
    for r in range(2):
        rows.q[r] = ptx.round22(q_scale[r])
        rows.q_bias[r] = rows.q[r] * -MAGIC
        rows.limit[r] = Float32(float("inf"))
        rows.m[r] = Float32(NEG_INF)
        rows.l[r] = rows.b[r] = rows.bias[r] = rows.level[r] = Float32(0.0)
        rows.sign[r] = Int32(1)
    return rows


def limit_row(rows, r, words):
    """Bounds the scores of row r: |acc| <= 127 * sum |q codes|; words: a quarter of the codes."""
    total = Int32(0)
    for word in words:
        total = ptx.dp4a(word, ptx.sign_bytes(word), total)
    total = total + cute.arch.shuffle_sync_bfly(total, 1)
    total = total + cute.arch.shuffle_sync_bfly(total, 2)
    rows.limit[r] = Float32(total) * 127.0 * cute.arch.fmax(rows.q[r], -rows.q[r])


def block_factors(rows, block, k_per_token: bool):
    """The rows' factors for one key block: the block scale of K goes in here if K has one."""
    if const_expr(k_per_token):
        return rows.q, rows.q_bias
    factor, bias = cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, Float32)
    for r in range(2):
        factor[r] = ptx.round22(rows.q[r] * block.k_block)
        bias[r] = factor[r] * -MAGIC
    return factor, bias


def score(acc, factor, bias):
    """The int32 score times the row factor; exact but for one rounding."""
    return ptx.fma(ptx.as_float(acc + MAGIC_BITS), factor, bias)


def quad_max(x):
    """Largest over the four threads that share a row (floats, or ints)."""
    largest = cute.arch.fmax if isinstance(x, Float32) else cutlass.max
    x = largest(x, cute.arch.shuffle_sync_bfly(x, 1))
    return largest(x, cute.arch.shuffle_sync_bfly(x, 2))


def rescale(rows, acc_O, m_new):
    """Moves the references: all that has accumulated shrinks by exp2(m - m_new)."""
    for r in range(2):
        finite = ptx.select(m_new[r] == NEG_INF, Float32(0.0), m_new[r])
        alpha = ptx.exp2(rows.m[r] - finite)
        rows.m[r] = m_new[r]
        rows.l[r] = rows.l[r] * alpha
        rows.bias[r] = rows.bias[r] * alpha
        rows.b[r] = ptx.round22(rows.b[r] * alpha)
        for j in range(cute.size(acc_O) // 4):
            for c in range(2):
                i = c + 2 * r + 4 * j
                acc_O[i] = acc_O[i] * alpha


@cute.jit
def exact_scores(slices, rows, acc_O, columns, factors, visible):
    """The slices become float scores, masked; references rise to HEADROOM above the maximum.

    visible[r]: columns of the block that row r sees, less the thread's first column.
    """
    factor, bias = factors
    top = [Float32(NEG_INF), Float32(NEG_INF)]
    for g, acc, j in groups_of(slices):
        f = cute.recast_tensor(acc, Float32)
        keys = columns(g)
        for r in cutlass.range_constexpr(2):
            for c in cutlass.range_constexpr(2):
                i = c + 2 * r + 4 * j
                s = score(acc[i], factor[r], bias[r])
                if const_expr(keys is not None):
                    s = ptx.mul(s, keys[c])
                f[i] = ptx.select(8 * g + c < visible[r], s, Float32(NEG_INF))
                top[r] = cute.arch.fmax(top[r], f[i])
    m_new = [cute.arch.fmax(rows.m[r], quad_max(top[r]) + HEADROOM) for r in range(2)]
    rescale(rows, acc_O, m_new)


def groups_of(slices):
    """(column group of the block, its slice, column group within the slice) in order."""
    per_slice = cute.size(slices[0]) // 4
    return [(s * per_slice + j, acc, j) for s, acc in enumerate(slices) for j in range(per_slice)]


def row_of(slices, r):
    """The elements of row r."""
    return [acc[c + 2 * r + 4 * j] for _, acc, j in groups_of(slices) for c in range(2)]


def may_exceed(rows, k_max):
    """Whether any score of the warp in a block could exceed its reference by LIMIT."""
    safe = cutlass.Boolean(True)
    for r in range(2):
        safe = safe & (ptx.fma(rows.limit[r], k_max, -rows.m[r]) <= LIMIT)
    return cute.arch.vote_any_sync(safe == False)  # noqa: E712


@cute.jit
def keep_in_range(slices, rows, acc_O, columns, factors, k_max):
    """Moves a row's reference if its scores in this block do exceed it by LIMIT.

    The slices keep their integer scores. Branches are for the warp, but each row moves or not by
    its own scores: what other rows hold never changes a result.
    """
    factor, bias = factors
    safe = cutlass.Boolean(True)
    for r in cutlass.range_constexpr(2):
        bound = Float32(int_max(row_of(slices, r), 0)) * (factor[r] * k_max) - rows.m[r]
        safe = safe & (bound <= LIMIT) & (factor[r] >= 0.0)
    if cute.arch.vote_any_sync(safe == False):  # noqa: E712
        m_new = []
        for r in cutlass.range_constexpr(2):
            top = Float32(NEG_INF)
            for g, acc, j in groups_of(slices):
                keys = columns(g)
                for c in cutlass.range_constexpr(2):
                    s = score(acc[c + 2 * r + 4 * j], factor[r], bias[r])
                    if const_expr(keys is not None):
                        s = ptx.mul(s, keys[c])
                    top = cute.arch.fmax(top, s)
            top = quad_max(top)
            m_new.append(ptx.select(top - rows.m[r] > LIMIT, top + HEADROOM, rows.m[r]))
        rescale(rows, acc_O, m_new)


def int_max(values, least):
    """Largest of many ints and ``least``, three at a time in four chains."""
    chains = [Int32(least)] * 4
    for n in range(0, len(values), 2):
        chains[n // 2 % 4] = ptx.max3(chains[n // 2 % 4], values[n], values[n + 1])
    return ptx.max3(ptx.max3(chains[0], chains[1], chains[2]), chains[3], chains[3])


def exp2_fma(x):
    """exp2 on the FMA pipe (degree 4, relative error 4e-6) for x <= LIMIT; keeps NaN."""
    x = ptx.max_nan(x, Float32(-126.0))
    shifted = x + MAGIC
    f = x - (shifted - MAGIC)
    p = Float32(EXP2_COEFFICIENTS[4])
    for coefficient in reversed(EXP2_COEFFICIENTS[:4]):
        p = ptx.fma(p, f, Float32(coefficient))
    return p * ptx.as_float(ptx.imad(ptx.as_int(shifted), 1 << 23, 127 << 23))


def probabilities(acc, g, j, rows, keys, values, factors, visible, sums, on_fma: bool):
    """Column group j of a slice (g of the block) becomes P'; the row sums take P~ in.

    visible is None for integer scores (no mask); else acc holds the scores of exact_scores.
    """
    factor, bias = factors
    f = cute.recast_tensor(acc, Float32)
    for r in range(2):
        for c in range(2):
            i = c + 2 * r + 4 * j
            m = rows.m[r]
            if const_expr(visible is not None):
                z = f[i] - ptx.select(m == NEG_INF, Float32(0.0), m)
            elif const_expr(keys is None):
                z = score(acc[i], factor[r], bias[r]) - m
            else:
                z = ptx.fma(score(acc[i], factor[r], bias[r]), keys[c], -m)
            p = exp2_fma(z) if const_expr(on_fma) else ptx.exp2(z)
            sums[r] = sums[r] + p
            if const_expr(values is not None):
                p = p * values[c]
                if const_expr(visible is not None):  # 0 * NaN: a masked key contributes nothing
                    p = ptx.select(8 * g + c < visible[r], p, Float32(0.0))
            f[i] = p


def block_levels(slices, rows, p_max: int, v_block):
    """From the block's largest P': what turns P' into codes, and the factor of its P V."""
    for r in range(2):
        # P' >= 0: its bits are ordered as integers (NaN above all), three of them at a time
        top = ptx.as_float(quad_max(int_max(row_of(slices, r), 0)))
        rows.level[r] = ptx.rcp(cute.arch.fmax(top, Float32(TINY))) * float(p_max)
        rows.b[r] = ptx.round22(top * (v_block * (1.0 / p_max)))


def encode(acc, levels):
    """A slice of P' becomes MAGIC + codes."""
    f = cute.recast_tensor(acc, Float32)
    for j in range(cute.size(acc) // 4):
        for r in range(2):
            for c in range(2):
                i = c + 2 * r + 4 * j
                f[i] = ptx.fma(f[i], levels[r], Float32(MAGIC))


def pack(acc, rP, first: int):
    """Low bytes of four codes make one A-operand register (keys permuted, see mma.int8_sm90)."""
    for i in range(cute.size(acc) // 8):
        for r in range(2):
            a = 2 * r + 8 * i
            low = ptx.prmt(acc[a], acc[a + 1], 0x0040)
            high = ptx.prmt(acc[a + 4], acc[a + 5], 0x0040)
            rP[first + r + 2 * i] = ptx.prmt(low, high, 0x5410)
