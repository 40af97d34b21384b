"""Device-side bundles, so that device functions take few arguments.

NamedTuples, not namespaces: the DSL rebinds what a dynamic branch or loop may have changed, and
only immutable bundles survive that where one branch's values must not be seen in the other.
"""

from typing import Any, NamedTuple


class FwdTensors(NamedTuple):
    """Whole tensors in global memory; q, k, v as (rows, columns, heads, batch)."""

    q: Any
    k: Any
    v: Any
    q_scale: Any
    k_scale: Any
    v_scale: Any
    out: Any
    lse: Any


class FwdShared(NamedTuple):
    """Tiles in shared memory."""

    q: Any
    k: Any
    v: Any
    keys: Any
    tile: Any


class FwdPipes(NamedTuple):
    """Pipelines, by what they carry."""

    q: Any
    kv: Any


class FwdWork(NamedTuple):
    """Dynamic sizes of the problem."""

    seqlen_q: Any  # of the tensors
    seqlen_k: Any
    num_heads: Any
    batch: Any  # sequences
    group: Any
    num_m_blocks: Any
    num_tiles: Any
    bounds: Any


class FwdOperands(NamedTuple):
    """Fragments of a consumer thread (v in column slices), and where its elements lie."""

    mma_qk: Any
    mma_pv: Any
    q: Any
    k: Any
    v: Any
    p: Any
    p32: Any
    s_shape: Any
    pv_shape: Any
    first: Any  # the thread's first (row, column)
    keys: Any
    tile: Any
    quad: Any


class FwdAccumulators(NamedTuple):
    """Accumulators of a consumer thread: output (float), scores, P V in flight (int)."""

    o: Any
    s: Any
    pv: Any


class FwdMask(NamedTuple):
    """What a thread's rows see."""

    first: Any  # the first key that each of its two rows sees, less its first column; or None
    end: Any  # keys below it are seen, likewise
    start: Any  # steps from here on need no mask: all rows of its warpgroup see the block whole
    stop: Any  # up to here; None: to the end

    def of_block(self, j, tile_n: int):
        """(r, column) -> whether row r sees a column of block j, counted from the thread's."""
        end = [self.end[r] - j * tile_n for r in range(2)]
        if self.first is None:
            return lambda r, column: column < end[r]
        first = [self.first[r] - j * tile_n for r in range(2)]
        return lambda r, column: (column < end[r]) & (column >= first[r])


class Rows(NamedTuple):
    """State of a thread's two rows (g and g + 8 of its warp's 16), registers of two floats."""

    q: Any  # q_scale * scale * log2 e
    m: Any  # reference of the softmax, log2 units; LOWEST before the first visible key
    l: Any  # this thread's part of the row sum  # noqa: E741
    b: Any  # what turns the product that is not folded yet into P V, relative to m
    bias: Any  # this thread's part of what V's 128s have added to O, a 128th of it
    unit: Any  # what V's scales are multiplied with: a power of two, the warp's (one float)


class BlockScales(NamedTuple):
    """Scales of a whole key block."""

    k: Any
    v: Any  # of a token: the largest, negative if some v_scale is far below it; over p_max
