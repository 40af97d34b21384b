"""What all Hopper products share: layouts in shared memory, and how a product is started."""

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import BFloat16, Float16
from cutlass.cute.nvgpu import warpgroup
from cutlass.tensor_utils import LayoutEnum

DTYPES = {"bfloat16": BFloat16, "float16": Float16}


def smem_layout(dtype, contiguous: int, shape):
    """A row-major tile, in swizzled atoms of (at most) ``contiguous`` columns."""
    kind = hopper.get_smem_layout_atom(LayoutEnum.ROW_MAJOR, dtype, contiguous)
    atom = warpgroup.make_smem_layout_atom(kind, dtype)
    return cute.tile_to_shape(atom, shape, order=(0, 1, 2)[: len(shape)])


@cute.jit
def issue(
    mma,
    acc,
    num_k: cutlass.Constexpr[int],
    a,
    b,
    fence: cutlass.Constexpr[bool] = True,
    accumulate: cutlass.Constexpr[bool] = False,
):
    """Acc = a b or acc += a b, committed and not waited for.

    Every register operand must be final BEFORE the first wgmma of the stage, or ptxas serializes
    the pipeline (C7513) without a word from the DSL; tests/templates/sm90 looks for it. A second
    product without a fence belongs to the stage of the first: what its operands are made of comes
    before both, not between them.
    """
    if cutlass.const_expr(fence):
        warpgroup.fence()
    atom = cute.make_mma_atom(mma.op)
    atom.set(warpgroup.Field.ACCUMULATE, accumulate)
    for k in cutlass.range_constexpr(num_k):
        cute.gemm(atom, acc, a[None, None, k], b[None, None, k], acc)
        atom.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.commit_group()
