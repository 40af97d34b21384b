"""INT8 wgmma: both operands K-major, int32 accumulators.

Accumulator of a 64 x N tile, thread (warp w, lane 4g + q): element ``c + 2 r + 4 j`` is row
16 w + g + 8 r, column 8 j + 2 q + c. The 8-bit A operand in registers wants columns 4q .. 4q + 3 of
each 16 where the accumulator has 2q, 2q + 1 of each 8: nothing is shuffled, V^T is stored with
its keys in that order instead (position 4q + 2b + c of a group of 16 holds key 8b + 2q + c).
"""

import cutlass.utils.hopper_helpers as hopper
from cutlass import Int8, Int32, Uint8
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup


def tiled_mma(num_wgs: int, n: int, *, a_in_registers: bool, a_type=Uint8, b_type=Int8):
    """s8 x s8 from shared memory, or A of ``a_type`` in registers and B of ``b_type``.

    64 * num_wgs rows, n columns.
    """
    k_major = OperandMajorMode.K
    if a_in_registers:
        return hopper.make_trivial_tiled_mma(
            a_type,
            b_type,
            k_major,
            k_major,
            Int32,
            (num_wgs, 1, 1),
            (64, n),
            a_source=warpgroup.OperandSource.RMEM,
        )
    return hopper.make_trivial_tiled_mma(
        Int8, Int8, k_major, k_major, Int32, (num_wgs, 1, 1), (64, n)
    )
