"""Products and shared storage of the two backward kernels."""

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from sage_cute.config.bwd import SLICE
from sage_cute.templates.mma import int8_sm90


def scores_mma(num_wgs: int, n: int, dtype):
    """64 rows a warpgroup, n columns, both operands as they lie in shared memory (K-major)."""
    if dtype is cutlass.Int8:
        return int8_sm90.tiled_mma(num_wgs, n, a_in_registers=False)
    k_major = OperandMajorMode.K
    return hopper.make_trivial_tiled_mma(
        dtype, dtype, k_major, k_major, Float32, (num_wgs, 1, 1), (64, n)
    )


def gradient_mma(num_wgs: int, n: int, dtype, *, int8: bool = False):
    """A (P or dS) in registers; B lies with its n columns contiguous.

    In INT8 B lies K-major, and n is that of one slice of the columns.
    """
    if int8:
        return int8_sm90.tiled_mma(num_wgs, SLICE, a_in_registers=True, a_type=cutlass.Int8)
    return hopper.make_trivial_tiled_mma(
        dtype,
        dtype,
        OperandMajorMode.K,
        OperandMajorMode.MN,
        Float32,
        (num_wgs, 1, 1),
        (64, n),
        a_source=warpgroup.OperandSource.RMEM,
    )


def turned(t, *shape):
    """A tile (rows, columns[, stages]) with columns first: the operand whose rows are contracted.

    shape is the new one.
    """
    return cute.composition(t, cute.make_ordered_layout(shape, order=(1, 0, 2)[: len(shape)]))


def array(dtype, size, align=1024):
    """A field of shared storage."""
    return cute.struct.Align[cute.struct.MemRange[dtype, size], align]
