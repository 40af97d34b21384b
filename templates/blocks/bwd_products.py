"""Products and shared storage of the two backward kernels."""

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from sage_cute.config.bwd import SLICE
from sage_cute.templates.mma import int8_sm90


def scores_mma(num_wgs: int, n: int, dtype, *, a_in_registers: bool):
    """64 rows a warpgroup, n columns, both operands K-major; A as ``keep`` has it, or as B."""
    if dtype is cutlass.Int8:
        return int8_sm90.tiled_mma(num_wgs, n, a_in_registers=a_in_registers, a_type=dtype)
    source = warpgroup.OperandSource
    return hopper.make_trivial_tiled_mma(
        dtype,
        dtype,
        OperandMajorMode.K,
        OperandMajorMode.K,
        Float32,
        (num_wgs, 1, 1),
        (64, n),
        a_source=source.RMEM if a_in_registers else source.SMEM,
    )


def fragment_a(mma, thread, shared, *, in_registers: bool):
    """A of a product: where it lies in shared memory, or registers for ``keep`` to fill."""
    if in_registers:
        return mma.make_fragment_A(mma.partition_shape_A(shared.shape))
    return mma.make_fragment_A(thread.partition_A(shared))


def keep(mma, tidx, shared, fragment):
    """Fills the registers of ``fragment_a``: words of four contracted codes, or of two numbers."""
    mine = mma.get_slice(tidx).partition_A(shared)
    for k in range(cute.size(fragment, mode=[2])):
        cute.autovec_copy(mine[None, None, k], fragment[None, None, k])


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
