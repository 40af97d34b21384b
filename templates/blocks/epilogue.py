"""What leaves the kernel: O in 16 bit, the log-sum-exp in natural log."""

import math

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from sage_cute.templates.blocks import ptx
from sage_cute.templates.blocks.softmax import HEADROOM, LOWEST, inverse_power


@cute.jit
def store_output(acc_O, rows, gO, gLSE, first, seqlen_left, dtype: cutlass.Constexpr):
    """O = (acc_O - 128 bias) 2^149 / (unit l), LSE = ln 2 * (m + log2 l); 0 and -inf where l = 0.

    gO (tile_m, head_dim) and gLSE (tile_m) of this tile, first the thread's first (row, column).
    Columns of acc_O behind head_dim, which fill up a product, are left out.
    """
    for r in cutlass.range_constexpr(2):
        total = rows.l[r] + cute.arch.shuffle_sync_bfly(rows.l[r], 1)
        total = total + cute.arch.shuffle_sync_bfly(total, 2)
        seen = rows.m[r] != Float32(LOWEST)
        inverse = ptx.select(seen, 1.0 / total, Float32(0.0))
        scale = inverse * 2.0**49 * inverse_power(rows.unit[0])  # times 2^100 below: all finite
        bias = rows.bias[r] + cute.arch.shuffle_sync_bfly(rows.bias[r], 1)
        bias = (bias + cute.arch.shuffle_sync_bfly(bias, 2)) * 128.0
        row = first[0] + 8 * r
        if row < seqlen_left:
            for j in cutlass.range_constexpr(gO.shape[1] // 8):
                pair = cute.make_rmem_tensor(2, dtype)
                for c in cutlass.range_constexpr(2):
                    value = (acc_O[c + 2 * r + 4 * j] - bias) * 2.0**100 * scale
                    pair[c] = ptx.select(seen, value, Float32(0.0)).to(dtype)
                column = first[1] + 8 * j
                target = cute.local_tile(gO[row, None], (2,), (column // 2,))
                cute.autovec_copy(pair, target)
            if first[1] == 0:
                lse = (rows.m[r] - HEADROOM) + ptx.log2(total * 2.0**HEADROOM)
                lse = lse * math.log(2.0)
                gLSE[row] = ptx.select(seen, lse, Float32(float("-inf")))
