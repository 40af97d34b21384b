"""INT8 wgmma: both operands K-major, int32 accumulators.

Accumulator of a 64 x N tile, thread (warp w, lane 4g + q): element ``c + 2 r + 4 j`` is row
16 w + g + 8 r, column 8 j + 2 q + c. The 8-bit A operand in registers wants columns 4q .. 4q + 3 of
each 16 where the accumulator has 2q, 2q + 1 of each 8: nothing is shuffled, V^T is stored with
its keys in that order instead (position 4q + 2b + c of a group of 16 holds key 8b + 2q + c).
"""

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Int8, Int32, Uint8
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.tensor_utils import LayoutEnum


def tiled_mma(num_wgs: int, n: int, *, a_in_registers: bool):
    """s8 x s8 from shared memory, or u8 x s8 with A in registers: 64 * num_wgs rows, n columns."""
    k_major = OperandMajorMode.K
    if a_in_registers:
        return hopper.make_trivial_tiled_mma(
            Uint8,
            Int8,
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


def smem_layout(rows: int, contiguous: int, stages: int | None = None):
    """Swizzled layout of an int8 tile (rows, contiguous[, stages])."""
    kind = hopper.get_smem_layout_atom(LayoutEnum.ROW_MAJOR, Int8, contiguous)
    atom = warpgroup.make_smem_layout_atom(kind, Int8)
    if stages is None:
        return cute.tile_to_shape(atom, (rows, contiguous), order=(0, 1))
    return cute.tile_to_shape(atom, (rows, contiguous, stages), order=(0, 1, 2))


@cute.jit
def issue(mma, acc, num_k: cutlass.Constexpr[int], a, b, fence: cutlass.Constexpr[bool] = True):
    """Acc = a b, committed and not waited for.

    Every register operand must be final BEFORE the first wgmma of the stage, or ptxas serializes
    the pipeline (C7513) without a word from the DSL; tests/templates/sm90 looks for it. A second
    product without a fence belongs to the stage of the first: what its operands are made of comes
    before both, not between them.
    """
    if cutlass.const_expr(fence):
        warpgroup.fence()
    atom = cute.make_mma_atom(mma.op)
    atom.set(warpgroup.Field.ACCUMULATE, False)
    for k in cutlass.range_constexpr(num_k):
        cute.gemm(atom, acc, a[None, None, k], b[None, None, k], acc)
        atom.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.commit_group()
