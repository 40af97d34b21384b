"""INT8 dV, dK and dQ: P and dS as INT8 operands in registers, and how their products are added up.

    codes = round(x / scale), scale = (largest |x| of a group) / 127
    gradient += (codes B) scale(row) scale(channel)                 B = dO^T, Q^T or K^T in INT8

The rows of an accumulator of S or dP are not contracted, so that each may have a scale of its own:
a thread's two rows, and the quad that shares them. Larger groups are the paper's. Codes are packed
where they lie: the tokens of each group of 16 of B come in the order that this gives (mma.
int8_sm90). Integers become floats, and floats codes, by one add each (blocks.magic).

Element ``c + 2 r + 4 j`` of a thread is row g + 8 r of its warp's 16, column 8 j + 2 q + c.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from sage_cute.templates.blocks import bwd_scores, ptx
from sage_cute.templates.blocks.magic import MAGIC, MAGIC_BITS
from sage_cute.templates.mma import wgmma

INVERSE_127 = 1.0 / 127.0
TINY = 2.0**-120
"""The smallest maximum whose reciprocal, times 127, is finite."""


class Group(NamedTuple):
    """Who shares a scale."""

    rows: int  # 1, 8 (those of a warp that have r in common) or 0: all of its warpgroups
    wgs: int  # warpgroups
    barrier: Any
    slot: Any  # where this thread leaves a maximum: its warp's, or its first row's
    lane: Any


def group_of(rows: int, wgs: int, tidx) -> Group:
    """The group of a consumer thread."""
    lane, warp = tidx % 32, tidx // 32
    number = warp // (4 * wgs)
    slot = warp if rows == 0 else 16 * (warp % (4 * wgs)) + lane // 4
    return Group(rows, wgs, 1 + number, slot, lane)


class Job(NamedTuple):
    """An INT8 product of a tile that is to be added to a gradient."""

    mma: Any
    acc: Any  # float32
    a: Any  # codes
    b: Any  # (slice) -> fragment of 64 columns
    scales: Any  # of the thread's two rows
    channels: Any  # (head_dim,) float32 of 22 bits in shared memory
    num_k: int


@cute.jit
def probabilities(acc, exponent, visible):
    """Integers of S become P as floats, in place; as ``bwd_scores.probabilities``."""
    f = cute.recast_tensor(acc, Float32)
    for j in cutlass.range_constexpr(cute.size(acc) // 4):
        for r in cutlass.range_constexpr(2):
            z = exponent(r, j)
            for c in cutlass.range_constexpr(2):
                i = c + 2 * r + 4 * j
                p = ptx.exp2(z(c, ptx.as_float(acc[i] + MAGIC_BITS)))
                if const_expr(visible is not None):
                    p = ptx.select(visible(r, j, c), p, Float32(0.0))
                f[i] = p


@cute.jit
def gradients(acc, p, difference, visible):
    """Acc of dP becomes dS = P (dP - delta) as floats, in place; as ``bwd_scores.gradients``."""
    integers = const_expr(acc.element_type is Int32)
    f = cute.recast_tensor(acc, Float32)
    for j in cutlass.range_constexpr(cute.size(acc) // 4):
        for r in cutlass.range_constexpr(2):
            t = difference(r, j)
            for c in cutlass.range_constexpr(2):
                i = c + 2 * r + 4 * j
                d = p[i] * t(c, ptx.as_float(acc[i] + MAGIC_BITS) if integers else acc[i])
                if const_expr(visible is not None):
                    d = ptx.select(visible(r, j, c), d, Float32(0.0))
                f[i] = d


@cute.jit
def pack(f, words, dtype: cutlass.Constexpr):
    """Floats in accumulator order as the A operand of a 16-bit product, flat."""
    for i in cutlass.range_constexpr(cute.size(words)):
        words[i] = bwd_scores.pack(f[2 * i], f[2 * i + 1], dtype)


@cute.jit
def quantize(f, words, group, sMax, again: cutlass.Constexpr[bool]):
    """INT8 codes of f, floats in accumulator order, and the scale of each of the thread's rows.

    Args:
        f: 64 x 32 n floats of a warpgroup.
        words: a quarter as many: the A operand, flat.
        group: who shares a scale.
        sMax: 128 floats where a group of several warps agrees.
        again: whether the next call takes the same.
    """
    top = cute.make_rmem_tensor(2, Float32)
    top.fill(0.0)
    for i in cutlass.range_constexpr(cute.size(f)):
        r = const_expr(i // 2 % 2)
        top[r] = ptx.max_nan(top[r], cute.math.absf(f[i]))
    agree(top, group, sMax)
    if const_expr(again and (group.rows == 0 or group.wgs > 1)):
        cute.arch.barrier(barrier_id=group.barrier, number_of_threads=128 * group.wgs)
    scales = cute.make_rmem_tensor(2, Float32)
    for r in cutlass.range_constexpr(2):
        # an infinity makes the scale NaN: it must not become a finite number
        scales[r] = ptx.fma(top[r], Float32(INVERSE_127), ptx.mul(top[r], Float32(0.0)))
        inverse = 127.0 * ptx.rcp(ptx.max_nan(top[r], Float32(TINY)))
        for j in cutlass.range_constexpr(cute.size(f) // 8):
            code = []
            for i in (8 * j, 8 * j + 1, 8 * j + 4, 8 * j + 5):
                code.append(ptx.as_int(ptx.fma(f[i + 2 * r], inverse, Float32(MAGIC))))
            low, high = ptx.prmt(code[0], code[1], 0x0040), ptx.prmt(code[2], code[3], 0x0040)
            words[r + 2 * j] = ptx.prmt(low, high, 0x5410)
    return scales


@cute.jit
def agree(top, group, sMax):
    """The largest of the thread's two rows becomes that of the group."""
    for r in cutlass.range_constexpr(2):
        for i in cutlass.range_constexpr(2):
            top[r] = ptx.max_nan(top[r], cute.arch.shuffle_sync_bfly(top[r], 1 << i))
    if const_expr(group.rows == 0):
        top[0] = ptx.max_nan(top[0], top[1])
    if const_expr(group.rows != 1):
        for r in cutlass.range_constexpr(2 if group.rows else 1):
            for i in cutlass.range_constexpr(3):
                top[r] = ptx.max_nan(top[r], cute.arch.shuffle_sync_bfly(top[r], 4 << i))
    if const_expr(group.rows == 0):
        exchange_tile(top, group, sMax)
    elif const_expr(group.wgs > 1):
        exchange_rows(top, group, sMax)


@cute.jit
def exchange_tile(top, group, sMax):
    """One maximum for all warps of the group."""
    warps = const_expr(4 * group.wgs)
    if group.lane == 0:
        sMax[group.slot] = top[0]
    cute.arch.barrier(barrier_id=group.barrier, number_of_threads=32 * warps)
    first = group.slot // warps * warps
    for w in cutlass.range_constexpr(warps):
        top[0] = ptx.max_nan(top[0], sMax[first + w])
    top[1] = top[0]


@cute.jit
def exchange_rows(top, group, sMax):
    """A maximum a row, of warpgroups that have the same rows."""
    wgs = const_expr(group.wgs)
    if group.lane % 4 == 0:
        for r in cutlass.range_constexpr(2):
            sMax[group.slot + 8 * r] = top[r]
    cute.arch.barrier(barrier_id=group.barrier, number_of_threads=128 * wgs)
    for r in cutlass.range_constexpr(2):
        for w in cutlass.range_constexpr(wgs):
            top[r] = ptx.max_nan(top[r], sMax[group.slot % 64 + 8 * r + 64 * w])


def run(jobs):
    """Products in slices of columns; while one is added up, the next one runs.

    Ends with nothing of them in flight. ``jobs`` have the same number of slices each.
    """
    slices = [(job, n) for job in jobs for n in range(num_slices(job))]
    parts = [None] * len(slices)
    for s in range(len(slices) + 1):
        if s < len(slices):
            job, n = slices[s]
            parts[s] = cute.make_rmem_tensor(part_shape(job), Int32)
            wgmma.issue(job.mma, parts[s], job.num_k, job.a, job.b(n))
        if s:
            warpgroup.wait_group(1 if s < len(slices) else 0)
            fold(*slices[s - 1], parts[s - 1])


def part_shape(job):
    """Registers of a slice."""
    return ((2, 2, cute.size(job.mma.shape_mnk, mode=[1]) // 8), 1, 1)


def num_slices(job):
    """Slices of a gradient."""
    return cute.size(job.acc) // cute.size(part_shape(job))


@cute.jit
def fold(job, n: cutlass.Constexpr[int], part):
    """Slice n of a product, int32, added to the gradient."""
    size = const_expr(cute.size(part))
    quad = cute.arch.lane_idx() % 4
    for j in cutlass.range_constexpr(size // 4):
        channel = cute.make_rmem_tensor(2, Float32)
        at = 4 * (n * size // 4 + j) + quad
        cute.autovec_copy(cute.local_tile(job.channels, (2,), (at,)), channel)
        for c in cutlass.range_constexpr(2):
            bias = channel[c] * -MAGIC  # exact: the scale has 22 bits
            for r in cutlass.range_constexpr(2):
                i = c + 2 * r + 4 * j
                x = ptx.fma(ptx.as_float(part[i] + MAGIC_BITS), channel[c], bias)
                o = i + n * size
                job.acc[o] = ptx.fma(x, job.scales[r], job.acc[o])
