"""TMA copies of tiles, and the pipelines that they fill."""

from functools import partial
from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Int32, pipeline
from cutlass.cute.nvgpu import cpasync

from sage_cute.templates.blocks import ptx


def rows_first(t):
    """(batch, heads, rows, columns) as (rows, columns, heads, batch)."""
    return cute.make_tensor(t.iterator, cute.select(t.layout, mode=[2, 3, 1, 0]))


def tma(tensor, layout, tile):
    """A TMA copy of tiles into one stage of a layout: (atom, tensor)."""
    op = cpasync.CopyBulkTensorTileG2SOp()
    return cpasync.make_tiled_tma_atom(op, tensor, cute.select(layout, mode=[0, 1]), tile)


def partition(atom, smem, gmem):
    """Shared and global side of a TMA copy of whole tiles."""
    return cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(smem, 0, 2), cute.group_modes(gmem, 0, 2)
    )


ARRIVALS = 1
"""Threads of a warp that arrive at a barrier. One stands for all behind a bar.warp.sync; racecheck
does not see that where ptxas has dropped it, so tests with it have all 32 arrive."""


def pipe(barriers, num_stages: int, producers: int, consumers: int, tx_bytes: int):
    """A TMA pipeline whose consumers, and producers beside the first one (TMA), are warps."""
    group = partial(pipeline.CooperativeGroup, pipeline.Agent.Thread)
    return pipeline.PipelineTmaAsync.create(
        barrier_storage=barriers.data_ptr(),
        num_stages=num_stages,
        producer_group=group(1 + (producers - 1) * ARRIVALS),
        consumer_group=group(consumers * ARRIVALS),
        tx_count=tx_bytes,
        cta_layout_vmnk=cute.make_layout((1, 1, 1, 1)),
        defer_sync=True,
    )


def release(pipe, state):
    """Frees a buffer that was read with loads, not only by products.

    The arrival alone does not wait for loads in flight: what fills the buffer next has overtaken
    them on an H200 that processes share.
    """
    cute.arch.fence_acq_rel_cta()
    cute.arch.sync_warp()
    free(pipe, state)


def free(pipe, state):
    """Frees a buffer that only products have read, which have been waited for."""
    if ARRIVALS == 1:
        pipe.consumer_release(state)
    else:
        arrive(pipe.sync_object_empty.get_barrier(state.index))


def arrive(barrier):
    """An arrival of the warp."""
    if ARRIVALS == 1:
        ptx.arrive(barrier)
    else:
        cute.arch.mbarrier_arrive(barrier)


def producer_state(stages: int):
    """Where a producer of a pipeline starts."""
    return pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, stages)


def consumer_state(stages: int):
    """Where a consumer of a pipeline starts."""
    return pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, stages)


class Slot(NamedTuple):
    """A buffer of a pipeline, and the phase that its user waits for: a pipeline state.

    Its index may be known at compile time, and with it all addresses that products take.
    """

    index: Any
    phase: Any


def next_slot(slot, num_stages: int):
    """The one behind."""
    last = slot.index == num_stages - 1
    return Slot(
        ptx.select(last, Int32(0), slot.index + 1), ptx.select(last, slot.phase ^ 1, slot.phase)
    )
