"""Products, layouts and pipelines that the two backward kernels share."""

from functools import partial

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import BFloat16, Float16, Float32, const_expr, pipeline
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.tensor_utils import LayoutEnum

from sage_cute.templates.mma import int8_sm90

DTYPES = {"bfloat16": BFloat16, "float16": Float16}


def scores_mma(num_wgs: int, n: int, dtype):
    """64 rows a warpgroup, n columns, both operands as they lie in shared memory (K-major)."""
    if dtype is cutlass.Int8:
        return int8_sm90.tiled_mma(num_wgs, n, a_in_registers=False)
    k_major = OperandMajorMode.K
    return hopper.make_trivial_tiled_mma(
        dtype, dtype, k_major, k_major, Float32, (num_wgs, 1, 1), (64, n)
    )


def gradient_mma(num_wgs: int, n: int, dtype):
    """A (P or dS) in registers; B lies with its n columns contiguous."""
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


def smem_layout(dtype, contiguous: int, shape):
    """A row-major tile, in swizzled atoms of (at most) ``contiguous`` columns."""
    kind = hopper.get_smem_layout_atom(LayoutEnum.ROW_MAJOR, dtype, contiguous)
    atom = warpgroup.make_smem_layout_atom(kind, dtype)
    return cute.tile_to_shape(atom, shape, order=(0, 1, 2)[: len(shape)])


def turned(t, *shape):
    """A tile (rows, columns[, stages]) with columns first: the operand whose rows are contracted.

    shape is the new one.
    """
    return cute.composition(t, cute.make_ordered_layout(shape, order=(1, 0, 2)[: len(shape)]))


@cute.jit
def issue(
    mma,
    acc,
    num_k: cutlass.Constexpr[int],
    a,
    b,
    fence: cutlass.Constexpr[bool] = False,
    accumulate: cutlass.Constexpr[bool] = False,
):
    """Acc = a b or acc += a b, committed and not waited for. See ``int8_sm90.issue``."""
    if const_expr(fence):
        warpgroup.fence()
    atom = cute.make_mma_atom(mma.op)
    atom.set(warpgroup.Field.ACCUMULATE, accumulate)
    for k in cutlass.range_constexpr(num_k):
        cute.gemm(atom, acc, a[None, None, k], b[None, None, k], acc)
        atom.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.commit_group()


def pipe(barriers, num_stages: int, producers: int, consumers: int, tx_bytes: int):
    """A TMA pipeline whose consumers are warps."""
    group = partial(pipeline.CooperativeGroup, pipeline.Agent.Thread)
    return pipeline.PipelineTmaAsync.create(
        barrier_storage=barriers.data_ptr(),
        num_stages=num_stages,
        producer_group=group(producers),
        consumer_group=group(consumers),
        tx_count=tx_bytes,
        cta_layout_vmnk=cute.make_layout((1, 1, 1, 1)),
        defer_sync=True,
    )


def producer_state(stages: int):
    return pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, stages)


def consumer_state(stages: int):
    return pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, stages)


def rows_first(t):
    """(batch, heads, rows, columns) as (rows, columns, heads, batch)."""
    return cute.make_tensor(t.iterator, cute.select(t.layout, mode=[2, 3, 1, 0]))


def tma(tensor, layout, tile):
    """A TMA copy of tiles into one stage of a layout: (atom, tensor)."""
    load = cpasync.CopyBulkTensorTileG2SOp()
    return cpasync.make_tiled_tma_atom(load, tensor, cute.select(layout, mode=[0, 1]), tile)


def partition(atom, smem, gmem):
    """Shared and global side of a TMA copy of whole tiles."""
    return cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(smem, 0, 2), cute.group_modes(gmem, 0, 2)
    )


def array(dtype, size, align=1024):
    """A field of shared storage."""
    return cute.struct.Align[cute.struct.MemRange[dtype, size], align]
