"""INT8 attention backward for Hopper, dK and dV, each product in INT8 or (all but S) 16 bit."""

from functools import partial
from types import SimpleNamespace

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int8, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from sage_cute.config import ARCHS, Status
from sage_cute.config.bwd import (
    SLICE,
    BwdProblem,
    BwdTileConfig,
    operands_in_registers,
    supports_bwd,
)
from sage_cute.config.constraints import PRODUCER_REGISTERS, consumer_registers
from sage_cute.templates.base import AttnTemplate
from sage_cute.templates.blocks import bwd_int8, bwd_scores, loading, ptx, seqlen
from sage_cute.templates.blocks import bwd_products as products
from sage_cute.templates.blocks.bwd_params import (
    BwdInt8Operands,
    BwdKeyOperands,
    BwdPipes,
    BwdShared,
    BwdTensors,
    BwdWork,
)
from sage_cute.templates.blocks.bwd_schedule import (
    BEYOND,
    bwd_tile,
    first_query,
    group_at,
    query_end,
    query_span,
    ragged_query_span,
    tile_at,
    visible_rows,
)
from sage_cute.templates.blocks.magic import MAGIC
from sage_cute.templates.mma import wgmma

ARCH = ARCHS["sm_90a"]
SUMS_BARRIER = 8
"""After those of the groups that share a scale."""


class SageBwdSm90(AttnTemplate):
    """dK and dV, on what ``quant.bwd_prologue`` made.

    dQ has a kernel of its own (``sm90.bwd_dq``): its sum over keys runs across CTAs here. Adding it
    up in global memory costs shared-memory bandwidth and a barrier between warpgroups, more than S
    and dP in INT8 once more (docs/backward-kernel.md).

    Layouts (global memory; rows: the queries that see a key, the last seqlen_k of a longer causal
    seqlen_q, else all; r is query seqlen_q - rows + r)
        q_codes, k_codes  int8 (batch, heads, seqlen, head_dim), contiguous
        v                 (batch, kv_heads, seqlen_k, head_dim): int8 codes, or 16 bit as given
        q_hat             bfloat16 (batch, heads, rows, head_dim): do_scale times dequantized Q
        dout              (batch, heads, seqlen_q, head_dim), head_dim contiguous, rows on 16 bytes
        dout8             int8 (batch, heads, rows, head_dim), if dP is INT8
        stats             float32 (batch, heads, rows padded to 128, 4): q_scale scale log2 e, LSE
                          in log2 units, -delta / do_scale, do_scale; (0, inf, 0, 0) behind the rows
        k_scale, v_scale  float32 (batch, kv_heads, groups of keys)
        q_t, dout_t       int8 (batch, heads, head_dim, rows padded to 128), instead of q_hat and of
                          dout in dV if dK and dV are INT8: ``quant.bwd_transposed``
        q_t_scale, dout_t_scale
                          float32 (batch, heads, padded rows / tile_q, head_dim), of 22 bits
        dk, dv            (batch, kv_heads, seqlen_k, head_dim), head_dim contiguous
        of a ragged problem (a window, key lengths, a packed batch; a causal mask and an INT8 dV or
        dK) rows are all queries, dout a copy in which those that see no key are zeros; of a packed
        batch, what the prologue made has each sequence padded to 128 rows (blocks.seqlen), zeros,
        and so has what TMA brings where a group of tiles ends behind them: what a product contracts
        must be finite

    Roles
        warp 0            TMA: K and V once; for each tile of queries of each head of the group Q
                          and dO of S and dP, then dO and Q^ of dV and dK
        warp 1            statistics of the queries, with the keys' scale, into the stage
        warps 2, 3        nothing (they complete the warpgroup that gives up its registers)
        warps 4 ... 11    two consumer warpgroups, 64 keys each; or both the same 64 keys and each
                          one half of the tile's queries (``query_wgs``)

    Pipelines (producer -> consumer; arrivals on full, on empty)
        kept    warp 0 -> consumers, 1 stage       1 + bytes, -
        codes   warps 0 and 1 -> consumers         2 + bytes, one a consumer warp
        values  warp 0 -> consumers                1 + bytes, one a consumer warp

    Shared memory
        K, V (tile_n, head_dim), on their way into registers where those have room
        (``operands_in_registers``); Q, dO (tile_m, head_dim, stages), Q^, dO (tile_m, columns,
        stages), statistics of pairs of queries (4, tile_m / 2, stages) for S, (2, tile_m / 2,
        stages) for dP (4 where dS must have do_scale in it: an INT8 dK with an INT8 dP). For INT8:
        Q^T, dO^T (columns, tile_m, stages), scales of their channels (1, columns, stages), maxima
        (128, 2, stages). What warpgroups that share keys add up takes the tiles' place at the end.

    The dQ kernel starts beside the last CTAs of this one: it reads nothing that this one writes.

    A consumer's step on tile i: issue S^T = K Q^T, dP^T = V dO^T of i and dK += dS^T Q of i - 1 ->
    wait for S, P -> issue dV += P^T dO -> wait for dP, dP - delta -> wait for dK, dS -> wait for
    dV. Warpgroups share nothing but what they load, so that one computes while the other's products
    run. All products are waited for in the step that issues them: what is in flight around a loop
    is serialized by ptxas. Steps come in groups of ``num_stages``, so that buffers have indices
    known at compile time; the groups that need a mask come first.

    With an INT8 dV or dK the step ends what it begins (``step_int8``): S^T, dP^T -> P, its codes ->
    dS, its codes -> slices of the products, one running while the one before is added up. P and dS
    stay floats until they are quantized, so that codes are those of the CPU but at ties.
    """

    family = "sm90"
    direction = "bwd"
    roles = ("tma", "statistics", "consumer")

    def __init__(self, problem: BwdProblem, config: BwdTileConfig) -> None:
        """Static facts only; ask ``supports`` first."""
        self.problem, self.config = problem, config
        self.dtype = wgmma.DTYPES[problem.dtype]
        self.dim = problem.padded_dim
        self.columns = self.dim // config.column_splits
        self.int8_dp = problem.dp == "int8"
        self.v_type = Int8 if self.int8_dp else self.dtype
        self.k_uniform = problem.block_k % config.tile_n == 0
        self.int8_dv, self.int8_dk = problem.dv_keys > 0, problem.dk_keys > 0
        self.int8_gradients = problem.tile_q > 0
        # dO serves dP and dV alike if both are in 16 bit: then dV takes its columns of it.
        self.one_dout = not (self.int8_dp or self.int8_dv)
        self.dout_columns = self.dim if self.one_dout else self.columns
        self.kept, _ = operands_in_registers(problem, config, ARCH)
        self.true_ds = self.int8_dk and self.int8_dp
        self.query_wgs = config.query_wgs
        self.key_wgs = config.num_consumer_wgs // config.query_wgs
        self.rows = config.tile_m // config.query_wgs  # queries of a warpgroup
        self.threads = 128 * (1 + config.num_consumer_wgs)
        self.consumer_registers = consumer_registers(config.num_consumer_wgs, ARCH)

    @staticmethod
    def supports(problem: BwdProblem, config: BwdTileConfig) -> Status:
        """Whether this template can be built for a problem and a configuration."""
        return supports_bwd(problem, config, ARCH)

    @cute.jit
    def __call__(
        self,
        q_codes: cute.Tensor,
        k_codes: cute.Tensor,
        v: cute.Tensor,
        q_dk: cute.Tensor,
        dout_dv: cute.Tensor,
        dout_dp: cute.Tensor | None,
        stats: cute.Tensor,
        k_scale: cute.Tensor,
        v_scale: cute.Tensor | None,
        q_t_scale: cute.Tensor | None,
        dout_t_scale: cute.Tensor | None,
        dk: cute.Tensor,
        dv: cute.Tensor,
        scale: Float32,
        left: Int32 | None,
        right: Int32 | None,
        key_lengths: cute.Tensor | None,
        cu_q: cute.Tensor | None,
        cu_k: cute.Tensor | None,
        max_k: Int32 | None,
        stream: cuda.CUstream,
    ):
        """Launches the kernel, one CTA a tile of keys (and column split).

        q_dk is q_hat or q_t, dout_dv is dout or dout_t; dout_dp is dout8 or dout, None where dV
        and dP take the same dout.
        """
        c, d, cols = self.config, self.dim, self.columns
        rows_first = loading.rows_first
        layouts = self.layouts()
        q = loading.tma(rows_first(q_codes), layouts.q, (c.tile_m, d))
        k = loading.tma(rows_first(k_codes), layouts.k, (c.tile_n, d))
        v_ = loading.tma(rows_first(v), layouts.v, (c.tile_n, d))
        rows_by_columns = lambda transposed, columns: (
            (columns, c.tile_m) if transposed else (c.tile_m, columns)
        )
        qh = loading.tma(rows_first(q_dk), layouts.q_hat, rows_by_columns(self.int8_dk, cols))
        do = loading.tma(
            rows_first(dout_dv), layouts.dout, rows_by_columns(self.int8_dv, self.dout_columns)
        )
        do8 = None, None
        if const_expr(not self.one_dout):
            do8 = loading.tma(rows_first(dout_dp), layouts.dout_dp, (c.tile_m, d))
        scales = [
            (None, None)
            if const_expr(t is None)
            else loading.tma(rows_first(t), self.channel_layout(), (1, cols))
            for t in (dout_t_scale, q_t_scale)
        ]

        array = products.array

        @cute.struct
        class Storage:
            kept_barriers: cute.struct.MemRange[cutlass.Int64, 2]
            codes_barriers: cute.struct.MemRange[cutlass.Int64, c.num_stages * 2]
            values_barriers: cute.struct.MemRange[cutlass.Int64, c.num_stages * 2]
            k: array(Int8, cute.cosize(layouts.k))
            v: array(self.v_type, cute.cosize(layouts.v))
            q: array(Int8, cute.cosize(layouts.q))
            dout8: array(self.v_type, 0 if self.one_dout else cute.cosize(layouts.dout_dp))
            q_hat: array(Int8 if self.int8_dk else BFloat16, cute.cosize(layouts.q_hat))
            dout: array(Int8 if self.int8_dv else self.dtype, cute.cosize(layouts.dout))
            scores: array(Float32, c.num_stages * c.tile_m * 2, 128)
            gradients: array(Float32, c.num_stages * c.tile_m * (2 if self.true_ds else 1), 128)
            dout_channels: array(Float32, c.num_stages * cols if self.int8_dv else 0, 128)
            q_channels: array(Float32, c.num_stages * cols if self.int8_dk else 0, 128)
            maxima: array(Float32, 256 * c.num_stages if self.int8_gradients else 0, 128)

        self.Storage = Storage
        bounds = seqlen.Bounds(left, right, key_lengths, cu_q, cu_k, None, max_k)
        num_tiles = cute.ceil_div(k_codes.shape[2], c.tile_n) * dk.shape[0] * dk.shape[1]
        if const_expr(max_k is not None):
            num_tiles = cute.ceil_div(max_k, c.tile_n) * (cu_k.shape[0] - 1) * dk.shape[1]
        self.kernel(
            BwdTensors(
                q[0],
                k[0],
                v_[0],
                do8[0],
                (do[0], qh[0]),
                None,
                None,
                None,
                None,
                (scales[0][0], scales[1][0]),
            ),
            BwdTensors(
                q[1],
                k[1],
                v_[1],
                do8[1],
                (do[1], qh[1]),
                stats,
                k_scale,
                v_scale,
                (dk, dv),
                (scales[0][1], scales[1][1]),
            ),
            scale,
            bounds,
            (layouts.q, layouts.k, layouts.v, layouts.dout, layouts.q_hat, layouts.dout_dp),
            self.mmas(),
        ).launch(
            grid=(num_tiles * c.column_splits, 1, 1),
            block=[self.threads, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
        )

    def mmas(self):
        """S, dP, dV and dK."""
        wgs, scores_mma = self.key_wgs, partial(products.scores_mma, a_in_registers=self.kept)
        return (
            scores_mma(wgs, self.rows, Int8),
            scores_mma(wgs, self.rows, self.v_type),
            products.gradient_mma(wgs, self.columns, self.dtype, int8=self.int8_dv),
            products.gradient_mma(wgs, self.columns, BFloat16, int8=self.int8_dk),
        )

    def layouts(self):
        """Layouts in shared memory, all swizzled."""
        c, d, cols = self.config, self.dim, self.columns
        make = wgmma.smem_layout
        return SimpleNamespace(
            q=make(Int8, d, (c.tile_m, d, c.num_stages)),
            k=make(Int8, d, (c.tile_n, d)),
            v=make(self.v_type, d, (c.tile_n, d)),
            q_hat=make(Int8, c.tile_m, (cols, c.tile_m, c.num_stages))
            if self.int8_dk
            else make(BFloat16, cols, (c.tile_m, cols, c.num_stages)),
            dout=make(Int8, c.tile_m, (cols, c.tile_m, c.num_stages))
            if self.int8_dv
            else make(self.dtype, cols, (c.tile_m, self.dout_columns, c.num_stages)),
            dout_dp=make(self.v_type, d, (c.tile_m, d, c.num_stages)),
        )

    def channel_layout(self):
        """Scales of an operand's channels in shared memory."""
        cols = self.columns
        return cute.make_layout((1, cols, self.config.num_stages), stride=(cols, 1, cols))

    @cute.kernel
    def kernel(
        self,
        tma: BwdTensors,
        gmem: BwdTensors,
        scale: Float32,
        bounds: seqlen.Bounds,
        layouts: tuple,
        mmas: tuple,
    ):
        """Allocates, builds the pipelines and dispatches the roles."""
        c, d, stages = self.config, self.dim, self.config.num_stages
        tidx, _, _ = cute.arch.thread_idx()
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        storage = cutlass.memory.SmemAllocator().allocate(self.Storage)
        consumers = 4 * c.num_consumer_wgs
        pipe = partial(loading.pipe, consumers=consumers)
        v_bytes = self.v_type.width // 8
        of_channels = 4 * self.columns
        value_bytes = c.tile_m * self.columns * (1 if self.int8_dk else 2)
        value_bytes += c.tile_m * self.dout_columns * (1 if self.int8_dv else 2)
        value_bytes += of_channels * (self.int8_dk + self.int8_dv)
        code_bytes = c.tile_m * d * (1 if self.one_dout else 1 + v_bytes)
        pipes = BwdPipes(
            kept=pipe(storage.kept_barriers, 1, 1, tx_bytes=c.tile_n * d * (1 + v_bytes)),
            codes=pipe(storage.codes_barriers, stages, 2, tx_bytes=code_bytes),
            values=pipe(storage.values_barriers, stages, 1, tx_bytes=value_bytes),
        )
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        q, k, v, dout, q_hat, dout_dp = layouts
        tensor = lambda memory, layout: memory.get_tensor(layout.outer, swizzle=layout.inner)
        smem = BwdShared(
            q=tensor(storage.q, q),
            k=tensor(storage.k, k),
            v=tensor(storage.v, v),
            dout=None if const_expr(self.one_dout) else tensor(storage.dout8, dout_dp),
            values=(tensor(storage.dout, dout), tensor(storage.q_hat, q_hat)),
            stats=(
                storage.scores.get_tensor(cute.make_layout((4, c.tile_m // 2, stages))),
                storage.gradients.get_tensor(
                    cute.make_layout((4 if self.true_ds else 2, c.tile_m // 2, stages))
                ),
            ),
            channels=(
                storage.dout_channels.get_tensor(self.channel_layout()) if self.int8_dv else None,
                storage.q_channels.get_tensor(self.channel_layout()) if self.int8_dk else None,
            ),
            maxima=self.maxima(storage) if const_expr(self.int8_gradients) else None,
            partial=self.partial_sums(storage) if const_expr(self.query_wgs > 1) else None,
        )
        work = self.work(gmem, bounds)
        cute.arch.griddepcontrol_launch_dependents()  # dQ starts where the last tiles leave room
        if warp_index < 4:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            if warp_index == 0:
                self.load(gmem, smem, pipes, work, tma)
            if warp_index == 1:
                self.load_statistics(gmem, smem, pipes, work)
        else:
            cute.arch.setmaxregister_increase(self.consumer_registers)
            consume = self.consume_int8 if const_expr(self.int8_gradients) else self.consume
            if const_expr(not self.problem.ragged):
                consume(tidx - 128, gmem, smem, pipes, work, scale, mmas)
            else:
                if work.span.num_groups > 0:
                    consume(tidx - 128, gmem, smem, pipes, work, scale, mmas)
                else:
                    self.store_zeros(tidx - 128, gmem, work)

    def maxima(self, storage):
        """Where warps agree on scales: of P and of dS (128), a buffer each."""
        return storage.maxima.get_tensor(cute.make_layout((128, 2, self.config.num_stages)))

    def partial_sums(self, storage):
        """Where warpgroups add up their sums: all the tiles' memory, which is free by then."""
        words = cute.recast_ptr(storage.k.data_ptr(), dtype=Float32)
        return cute.make_tensor(words, cute.make_layout((128, self.columns // 2, 2)))

    def ragged_work(self, gmem, bounds):
        """``work`` for any mask and length."""
        c = self.config
        longest = gmem.k.shape[0] if const_expr(bounds.max_k is None) else bounds.max_k
        num_blocks = cute.ceil_div(longest, c.tile_n)
        heads = gmem.k.shape[2]
        tile = bwd_tile(cute.arch.block_idx()[0], num_blocks, c.column_splits, heads)
        seq = seqlen.sequence(
            self.problem.lengths,
            self.problem.is_causal,
            bounds,
            tile.batch,
            gmem.q.shape[0],
            gmem.k.shape[0],
        )
        span = ragged_query_span(
            tile.block, seq, tile_m=c.tile_m, tile_n=c.tile_n, stages=c.num_stages
        )
        group, offset = gmem.q.shape[2] // heads, seq.seqlen_k - seq.seqlen_q
        return BwdWork(seq.seqlen_q, 0, seq.seqlen_k, seq, offset, group, tile, span)

    def work(self, gmem, bounds):
        """What this CTA works on."""
        if const_expr(self.problem.ragged):
            return self.ragged_work(gmem, bounds)
        c = self.config
        seqlen_k = gmem.k.shape[0]
        if const_expr(self.int8_dk):
            rows = visible_rows(gmem.q.shape[0], seqlen_k, causal=self.problem.is_causal)
        else:
            rows = gmem.values[1].shape[0]
        offset = cutlass.max(seqlen_k - rows, 0)
        tile = bwd_tile(
            cute.arch.block_idx()[0],
            cute.ceil_div(seqlen_k, c.tile_n),
            c.column_splits,
            gmem.k.shape[2],
        )
        span = query_span(
            tile.block,
            rows,
            seqlen_k,
            offset,
            tile_m=c.tile_m,
            tile_n=c.tile_n,
            stages=c.num_stages,
            causal=self.problem.is_causal,
        )
        group = gmem.q.shape[2] // gmem.k.shape[2]
        blind = gmem.q.shape[0] - rows
        seq = seqlen.dense(tile.batch, rows, seqlen_k, causal=self.problem.is_causal)
        return BwdWork(rows, blind, seqlen_k, seq, offset, group, tile, span)

    @cute.jit
    def load(self, gmem, smem, pipes, work, tma):
        """Warp 0: all tiles."""
        if const_expr(not self.problem.ragged):
            self.load_tiles(gmem, smem, pipes, work, tma)
        else:
            if work.span.num_groups > 0:
                self.load_tiles(gmem, smem, pipes, work, tma)

    @cute.jit
    def load_tiles(self, gmem, smem, pipes, work, tma):
        """``load`` where there is a tile."""
        c, d = self.config, self.dim
        tile, span, seq = work.tile, work.span, work.seq
        state = loading.producer_state(1)
        pipes.kept.producer_acquire(state)
        bar = pipes.kept.producer_get_barrier(state)
        v_first = seqlen.padded_k(seq) if const_expr(self.problem.block_v > 0) else seq.first_k
        for atom, shared, tensor, first in (
            (tma.k, smem.k, gmem.k, seq.first_k),
            (tma.v, smem.v, gmem.v, v_first),
        ):
            of_head = seqlen.rows_from(tensor, tile.head, seq.batch, first)
            s, g = loading.partition(
                atom, shared, cute.local_tile(of_head, (c.tile_n, d), (tile.block, 0))
            )
            cute.copy(atom, g, s, tma_bar_ptr=bar)

        state = loading.producer_state(c.num_stages)
        split = tile.split if const_expr(c.column_splits > 1) else 0
        whole = const_expr(self.dout_columns == d)
        for h in cutlass.range(work.group, unroll=1):
            head = tile.head * work.group + h
            of_codes = span.first * c.tile_m
            tiles = partial(self.tiles_of, head=head, batch=seq.batch)
            row, blind = seqlen.behind(seqlen.padded_q(seq), of_codes), work.blind
            of_codes = seqlen.behind(seq.first_q, of_codes)
            sQ, tQ = loading.partition(tma.q, smem.q, tiles(gmem.q, of_codes + blind, d, 0))
            if const_expr(self.int8_dv):
                dout_tiles = self.transposed_tiles(gmem.values[0], row, split, head, seq.batch)
            else:
                dout_tiles = tiles(
                    gmem.values[0], row + blind, self.dout_columns, 0 if whole else split
                )
            sdO, tdO = loading.partition(tma.values[0], smem.values[0], dout_tiles)
            if const_expr(self.int8_dk):
                q_tiles = self.transposed_tiles(gmem.values[1], row, split, head, seq.batch)
            else:
                q_tiles = tiles(gmem.values[1], row, self.columns, split)
            sQh, tQh = loading.partition(tma.values[1], smem.values[1], q_tiles)
            if const_expr(not self.one_dout):
                seen = row if const_expr(self.int8_dp) else row + blind
                sdO8, tdO8 = loading.partition(tma.dout, smem.dout, tiles(gmem.dout, seen, d, 0))
            first_group = span.first
            if const_expr(not isinstance(seq.first_q, int)):
                first_group = span.first + seqlen.padded_q(seq) // c.tile_m
            channels = [
                loading.partition(
                    tma.channels[n],
                    smem.channels[n],
                    self.channel_tiles(gmem.channels[n], first_group, split, head, seq.batch),
                )
                if const_expr(int8)
                else None
                for n, int8 in enumerate((self.int8_dv, self.int8_dk))
            ]
            for i in cutlass.range(span.num_tiles, unroll=1):
                m, at = self.tile_or_nothing(tile_at(span, i, c.num_stages), work), state.index
                pipes.codes.producer_acquire(state)
                bar = pipes.codes.producer_get_barrier(state)
                cute.copy(tma.q, tQ[None, m], sQ[None, at], tma_bar_ptr=bar)
                if const_expr(not self.one_dout):
                    cute.copy(tma.dout, tdO8[None, m], sdO8[None, at], tma_bar_ptr=bar)
                pipes.values.producer_acquire(state)
                bar = pipes.values.producer_get_barrier(state)
                cute.copy(tma.values[0], tdO[None, m], sdO[None, at], tma_bar_ptr=bar)
                cute.copy(tma.values[1], tQh[None, m], sQh[None, at], tma_bar_ptr=bar)
                for n, int8 in enumerate((self.int8_dv, self.int8_dk)):
                    if const_expr(int8):
                        sScale, tScale = channels[n]
                        cute.copy(
                            tma.channels[n], tScale[None, m], sScale[None, at], tma_bar_ptr=bar
                        )
                state.advance()

    def tile_or_nothing(self, m, work):
        """Tile m of the span, or one behind the tensors where it is behind a packed sequence."""
        if const_expr(self.problem.lengths != "packed"):
            return m
        there = (work.span.first + m) * self.config.tile_m < work.rows
        return ptx.select(there, m, Int32(BEYOND))

    def tiles_of(self, tensor, row, columns, split, *, head, batch):
        """Tiles of tile_m rows from ``row`` on, of a share of the columns."""
        behind = cute.domain_offset((row, 0), tensor[None, None, head, batch])
        return cute.local_tile(behind, (self.config.tile_m, columns), (None, split))

    def transposed_tiles(self, tensor, row, split, head, batch):
        """Tiles of tile_m rows from ``row`` on of a transposed copy, of a share of the columns."""
        behind = cute.domain_offset((0, row), tensor[None, None, head, batch])
        return cute.local_tile(behind, (self.columns, self.config.tile_m), (split, None))

    def channel_tiles(self, tensor, first, split, head, batch):
        """Scales of a share of the channels for the tiles from ``first`` on."""
        behind = cute.domain_offset((first, 0), tensor[None, None, head, batch])
        return cute.local_tile(behind, (1, self.columns), (None, split))

    @cute.jit
    def load_statistics(self, gmem, smem, pipes, work):
        """Warp 1: what P and dS need of each query, two queries a lane."""
        c, tile, span = self.config, work.tile, work.span
        lane = cute.arch.lane_idx()
        state = loading.producer_state(c.num_stages)
        k_scale = Float32(1.0)
        seq = work.seq
        if const_expr(self.k_uniform):
            group = tile.block * c.tile_n // self.problem.block_k
            if const_expr(self.problem.ragged):  # of a tile behind the keys: any that is there
                group = cutlass.min(
                    group, cutlass.max(work.seqlen_k - 1, 0) // self.problem.block_k
                )
            group = seqlen.behind(seqlen.group_k(seq, self.problem.block_k), group)
            k_scale = gmem.k_scale[seq.batch, tile.head, group]
        last = work.rows - 1
        for h in cutlass.range(work.group, unroll=1):
            stats = gmem.stats[seq.batch, tile.head * work.group + h, None, None]
            stats = seqlen.from_row(stats, seqlen.padded_q(seq))
            for i in cutlass.range(span.num_tiles, unroll=1):
                row = (span.first + tile_at(span, i, c.num_stages)) * c.tile_m + 2 * lane
                for t in cutlass.range_constexpr(cute.ceil_div(c.tile_m, 64)):
                    loaded = cute.make_rmem_tensor((4, 2), Float32)
                    for n in cutlass.range_constexpr(2):
                        # behind the rows' padding: whatever is there, made invisible below
                        source = cutlass.min(row + 64 * t + n, last)
                        cute.autovec_copy(stats[source, None], loaded[None, n])
                    if const_expr(t == 0):
                        pipes.codes.sync_object_empty.wait(state.index, state.phase)
                    if lane + 32 * t < c.tile_m // 2:
                        at = lane + 32 * t, state.index
                        self.store_statistics(smem.stats, loaded, k_scale, row + 64 * t, last, at)
                cute.arch.sync_warp()
                loading.arrive(pipes.codes.producer_get_barrier(state))
                state.advance()

    @cute.jit
    def store_statistics(self, sStats, loaded, k_scale, row, last, at):
        """(factor, factor, bias, bias) of S and of dP for two queries.

        Of dP only the biases, unless an INT8 dK must have dS with do_scale in it.
        """
        scores = cute.make_rmem_tensor(4, Float32)
        gradients = cute.make_rmem_tensor(4 if const_expr(self.true_ds) else 2, Float32)
        for n in cutlass.range_constexpr(2):
            factor, lse, gradients[n] = loaded[0, n] * k_scale, loaded[1, n], loaded[2, n]
            if row + n > last:
                factor, lse, gradients[n] = Float32(0.0), Float32(float("inf")), Float32(0.0)
            if const_expr(self.true_ds):
                do_scale = ptx.select(row + n > last, Float32(0.0), loaded[3, n])
                gradients[n], gradients[2 + n] = do_scale, gradients[n] * do_scale
            scores[n], scores[2 + n] = factor, -lse
            if const_expr(self.k_uniform):
                scores[2 + n] = ptx.fma(factor, Float32(-MAGIC), -lse)
        cute.autovec_copy(scores, sStats[0][None, at[0], at[1]])
        cute.autovec_copy(gradients, sStats[1][None, at[0], at[1]])

    def operands(self, tidx, wg, gmem, smem, work, mmas):
        """Fragments of the four products, and what belongs to the thread's two keys."""
        c, cols, stages, rows = self.config, self.columns, self.config.num_stages, self.rows
        mma_s, mma_dp, mma_dv, mma_dk = mmas
        slot = cute.make_layout(self.key_wgs, stride=128)(wg)
        s, dp, dv, dk = [m.get_slice(slot) for m in mmas]
        dout, q_hat = smem.values
        dout_dv = dout
        if const_expr(self.dout_columns != cols):
            dout_dv = cute.local_tile(dout, (rows, cols, stages), (0, work.tile.split, 0))
        shape = c.tile_n, rows
        first = mma_s.get_slice(tidx).partition_C(cute.make_identity_tensor(shape))[0]
        k_scale, v_scale = (cute.make_rmem_tensor((2, 2), Float32) for _ in range(2))
        first_seen, seen_end = [], []
        for r in range(2):
            key = work.tile.block * c.tile_n + first[0] + 8 * r
            self.scales_of(key, r, gmem, work, k_scale, v_scale)
            first_seen.append(first_query(key, work.seq, work.offset) - first[1])
            if self.problem.window:
                seen_end.append(query_end(key, work.seq, work.offset) - first[1])
        p = mma_dv.make_fragment_A(mma_dv.partition_shape_A(shape))
        ds = mma_dk.make_fragment_A(mma_dk.partition_shape_A(shape))
        p_words = bwd_scores.as_words(p)
        p_bf16 = p_words
        if const_expr(self.dtype is not BFloat16):
            p_bf16 = cute.make_rmem_tensor(cute.size(p_words), Int32)
        return BwdKeyOperands(
            mmas=mmas,
            k=products.fragment_a(mma_s, s, smem.k, in_registers=self.kept),
            q=mma_s.make_fragment_B(s.partition_B(smem.q)),
            v=products.fragment_a(mma_dp, dp, smem.v, in_registers=self.kept),
            dout=mma_dp.make_fragment_B(dp.partition_B(dout if self.one_dout else smem.dout)),
            p=p,
            dout_t=None
            if self.int8_dv
            else mma_dv.make_fragment_B(
                dv.partition_B(products.turned(dout_dv, cols, rows, stages))
            ),
            ds_t=ds,
            q_t=None
            if self.int8_dk
            else mma_dk.make_fragment_B(dk.partition_B(products.turned(q_hat, cols, rows, stages))),
            p_words=p_words,
            p_bf16=p_bf16,
            ds_words=bwd_scores.as_words(ds),
            s_shape=mma_s.partition_shape_C(shape),
            stats=smem.stats,
            quad=tidx % 4,
            k_scale=None if self.k_uniform else k_scale,
            v_scale=v_scale if self.int8_dp else None,
            first_seen=first_seen,
            seen_end=seen_end if self.problem.window else None,
        )

    @cute.jit
    def scales_of(self, key, r: cutlass.Constexpr[int], gmem, work, k_scale, v_scale):
        """Factors of a key with their bias; 0 where there is no key."""
        k, v = Float32(0.0), Float32(0.0)
        seq, block_v = work.seq, const_expr(max(self.problem.block_v, 1))
        first_k, first_v = seqlen.group_k(seq, self.problem.block_k), seqlen.padded_k(seq)
        if const_expr(not isinstance(first_v, int)):
            first_v = first_v // block_v
        if key < work.seqlen_k:
            if const_expr(not self.k_uniform):
                group = seqlen.behind(first_k, key // self.problem.block_k)
                k = gmem.k_scale[seq.batch, work.tile.head, group]
            if const_expr(self.int8_dp):
                group = seqlen.behind(first_v, key // block_v)
                v = gmem.v_scale[seq.batch, work.tile.head, group]
        k_scale[r, 0], k_scale[r, 1] = bwd_scores.with_bias(k)
        v_scale[r, 0], v_scale[r, 1] = bwd_scores.with_bias(v)

    @cute.jit
    def store_zeros(self, tidx, gmem, work):
        """DK and dV of keys that no query sees, 8 columns of a row at a time."""
        c, tile, head_dim = self.config, work.tile, const_expr(self.problem.head_dim)
        zeros = cute.make_rmem_tensor(8, self.dtype)
        zeros.fill(0.0)
        vectors = const_expr(head_dim // 8)
        first = tile.block * c.tile_n
        rows = cutlass.min(work.seqlen_k - first, c.tile_n)
        for target in gmem.out:
            gX = seqlen.from_row(target[work.seq.batch, tile.head, None, None], work.seq.first_k)
            for i in cutlass.range(tidx, rows * vectors, 128 * c.num_consumer_wgs, unroll=1):
                where = gX[first + i // vectors, None]
                cute.autovec_copy(zeros, cute.local_tile(where, (8,), (i % vectors,)))

    @cute.jit
    def consume(self, tidx, gmem, smem, pipes, work, scale, mmas):
        """A consumer warpgroup: dK and dV of its 64 keys."""
        c, span = self.config, work.span
        wg = cute.arch.make_warp_uniform(tidx // 128)
        ops = self.operands(tidx, wg, gmem, smem, work, mmas)
        out_shape = mmas[2].partition_shape_C((c.tile_n, self.columns))
        acc_dK = cute.make_rmem_tensor(out_shape, Float32)
        acc_dV = cute.make_rmem_tensor(out_shape, Float32)
        acc_dK.fill(0.0)
        acc_dV.fill(0.0)
        phase = Int32(0)
        pipes.kept.consumer_wait(loading.consumer_state(1))
        if const_expr(self.kept):
            products.keep(mmas[0], tidx, smem.k, ops.k)
            products.keep(mmas[1], tidx, smem.v, ops.v)
        walk = partial(self.walk, ops, pipes, acc_dK, acc_dV, span)
        for _ in cutlass.range(work.group, unroll=1):
            walk(Int32(0), phase, True, True)
            phase = phase ^ 1
            for g in cutlass.range(1, span.num_masked, unroll=1):
                walk(g, phase, False, True)
                phase = phase ^ 1
            for g in cutlass.range(span.num_masked, span.num_groups, unroll=1):
                walk(g, phase, False, False)
                phase = phase ^ 1
            warpgroup.fence()
            last = loading.Slot(c.num_stages - 1, phase)
            self.issue_dk(ops, acc_dK, last)
            warpgroup.wait_group(0)
            loading.free(pipes.values, last)
        self.store(gmem, work, mmas[2], acc_dK, gmem.out[0], scale)
        self.store(gmem, work, mmas[2], acc_dV, gmem.out[1], Float32(1.0))

    def walk(self, ops, pipes, acc_dK, acc_dV, span, group, phase, first: bool, masked: bool):
        """Steps on a group of tiles, as many as there are buffers."""
        stages = self.config.num_stages
        for n in range(stages):
            before, now = loading.Slot((n - 1) % stages, phase), loading.Slot(n, phase)
            m = span.first + group_at(span, group) * stages + n if masked else 0
            self.step(ops, pipes, acc_dK, acc_dV, before, now, m, first and n == 0, masked)

    def visible(self, ops, m):
        """(r, j, c) -> whether the thread's key r is seen by its query c of column group j."""
        first = [ops.first_seen[r] - m * self.config.tile_m for r in range(2)]
        if ops.seen_end is None:
            return lambda r, j, c: 8 * j + c >= first[r]
        end = [ops.seen_end[r] - m * self.config.tile_m for r in range(2)]
        return lambda r, j, c: (8 * j + c >= first[r]) & (8 * j + c < end[r])

    @cute.jit
    def step(
        self,
        ops,
        pipes,
        acc_dK,
        acc_dV,
        before: cutlass.Constexpr,
        now,
        m,
        first: cutlass.Constexpr[bool],
        masked: cutlass.Constexpr[bool],
    ):
        """P, dV and dS of tile m, dK of the tile before."""
        pipes.codes.consumer_wait(now)
        acc_S = cute.make_rmem_tensor(ops.s_shape, Int32)
        acc_dP = cute.make_rmem_tensor(ops.s_shape, Int32 if self.int8_dp else Float32)
        if const_expr(not self.int8_dp):
            pipes.values.consumer_wait(now)
        self.issue_scores(ops, acc_S, acc_dP, now)
        if const_expr(not first):
            self.issue_dk(ops, acc_dK, before)
        visible = self.visible(ops, m) if const_expr(masked) else None

        columns = self.statistics(ops, now.index, 0, self.config.ahead)
        warpgroup.wait_group(1 if first else 2)
        words, targets = [ops.p_words], [self.dtype]
        if const_expr(self.dtype is not BFloat16):
            words, targets = [ops.p_words, ops.p_bf16], [self.dtype, BFloat16]
        exponent = partial(self.exponent, ops, columns)
        bwd_scores.probabilities(acc_S, words, exponent, visible, targets)
        if const_expr(self.int8_dp):
            pipes.values.consumer_wait(now)
        self.issue_dv(ops, acc_dV, now)

        columns = self.statistics(ops, now.index, 1, 2 * self.config.ahead)
        warpgroup.wait_group(1 if first else 2)
        difference = partial(self.difference, ops, columns)
        packed = None
        if const_expr(self.config.packed_ds):
            packed = cute.make_rmem_tensor(cute.size(ops.ds_words), Int32)
        bwd_scores.gradients(acc_dP, packed, difference, visible)
        loading.release(pipes.codes, now)
        warpgroup.wait_group(1)
        bwd_scores.multiply(ops.p_bf16, acc_dP if packed is None else packed, ops.ds_words)
        if const_expr(not first):
            loading.free(pipes.values, before)
        warpgroup.wait_group(0)

    def statistics(self, ops, stage, which, ahead):
        """Statistics of the thread's two queries of column group j, loaded once for both rows.

        The first ``ahead`` groups are loaded at once, and each later one that many groups early.
        """
        groups, loaded = self.rows // 8, {}
        size = 4 if which == 0 or self.true_ds else 2

        def load(j):
            if j < groups and j not in loaded:
                some = cute.make_rmem_tensor(size, Float32)
                cute.autovec_copy(ops.stats[which][None, 4 * j + ops.quad, stage], some)
                loaded[j] = [some[i] for i in range(size)]

        def columns(j):
            load(j)
            load(j + ahead)
            return loaded[j]

        for j in range(ahead):
            load(j)
        return columns

    def exponent(self, ops, columns, r, j):
        """S - L of the thread's key r and its queries of column group j."""
        four = columns(j)

        def z(c, x):
            if const_expr(ops.k_scale is not None):
                x = ptx.fma(x, ops.k_scale[r, 0], ops.k_scale[r, 1])
            return ptx.fma(x, four[c], four[2 + c])

        return z

    def difference(self, ops, columns, r, j):
        """(dP - delta) / do_scale, or dP - delta."""
        two = columns(j)

        def t(c, x):
            if const_expr(ops.v_scale is not None):
                x = ptx.fma(x, ops.v_scale[r, 0], ops.v_scale[r, 1])
            return ptx.fma(x, two[c], two[2 + c]) if const_expr(self.true_ds) else x + two[c]

        return t

    def issue_scores(self, ops, acc_S, acc_dP, state):
        """Starts S^T = K Q^T and dP^T = V dO^T."""
        q = ops.q[None, None, None, state.index]
        wgmma.issue(ops.mmas[0], acc_S, self.dim // 32, ops.k, q)
        num_k = self.dim // (32 if self.int8_dp else 16)
        dout = ops.dout[None, None, None, state.index]
        wgmma.issue(ops.mmas[1], acc_dP, num_k, ops.v, dout, fence=False)

    def issue_dv(self, ops, acc, state):
        """Starts dV += P^T dO."""
        dout = ops.dout_t[None, None, None, state.index]
        wgmma.issue(ops.mmas[2], acc, self.rows // 16, ops.p, dout, accumulate=True)

    def issue_dk(self, ops, acc, state, fence=False):
        """Starts dK += dS^T Q."""
        q = ops.q_t[None, None, None, state.index]
        wgmma.issue(ops.mmas[3], acc, self.rows // 16, ops.ds_t, q, fence=fence, accumulate=True)

    # INT8 dV or dK: each step ends what it begins.

    def share_of(self, smem, wq):
        """Shared memory as a warpgroup sees it that takes its part of a tile's queries."""
        rows, d, cols, stages = self.rows, self.dim, self.columns, self.config.num_stages
        if self.query_wgs == 1:
            return smem

        def part(t, columns, transposed=False):
            if transposed:
                return cute.local_tile(t, (columns, rows, stages), (0, wq, 0))
            return cute.local_tile(t, (rows, columns, stages), (wq, 0, 0))

        return smem._replace(
            q=part(smem.q, d),
            dout=None if self.one_dout else part(smem.dout, d),
            values=(
                part(smem.values[0], self.dout_columns, self.int8_dv),
                part(smem.values[1], cols, self.int8_dk),
            ),
            stats=[cute.domain_offset((0, rows // 2 * wq, 0), t) for t in smem.stats],
        )

    def operands_int8(self, tidx, smem, mmas):
        """Operands of the INT8 ones among dV and dK; None for the other."""
        values, groups = [], []
        slot = cute.make_layout(self.key_wgs, stride=128)(
            cute.arch.make_warp_uniform(tidx // 128) % self.key_wgs
        )
        keys = self.problem.dv_keys, self.problem.dk_keys
        for mma, t, n in zip(mmas[2:], smem.values, keys, strict=True):
            if n:
                values.append(partial(self.slice_of, mma, mma.get_slice(slot), t))
                rows = 1 if n == 1 else 0
                groups.append(bwd_int8.group_of(rows, self.query_wgs, tidx))
            else:
                values.append(None)
                groups.append(None)
        return BwdInt8Operands(values, smem.channels, groups, smem.maxima)

    def slice_of(self, mma, thread, t, n):
        """B of a slice of the columns."""
        shape = SLICE, self.rows, self.config.num_stages
        return mma.make_fragment_B(thread.partition_B(cute.local_tile(t, shape, (n, 0, 0))))

    @cute.jit
    def consume_int8(self, tidx, gmem, smem, pipes, work, scale, mmas):
        """A consumer warpgroup: dK and dV of its 64 keys, or what its queries bring to them."""
        c, span = self.config, work.span
        wg = cute.arch.make_warp_uniform(tidx // 128)
        wk, wq = (wg, 0) if const_expr(self.query_wgs == 1) else (0, wg)
        of_keys = tidx if const_expr(self.query_wgs == 1) else tidx % 128
        mine = self.share_of(smem, wq)
        ops = self.operands(of_keys, wk, gmem, mine, work, mmas)
        seen = [first - self.rows * wq for first in ops.first_seen]
        ops = ops._replace(first_seen=seen)
        if const_expr(self.problem.window):
            ops = ops._replace(seen_end=[end - self.rows * wq for end in ops.seen_end])
        more = self.operands_int8(tidx, mine, mmas)
        shape = c.tile_n, self.columns
        acc_dV = cute.make_rmem_tensor(mmas[2].partition_shape_C(shape), Float32)
        acc_dK = cute.make_rmem_tensor(mmas[3].partition_shape_C(shape), Float32)
        acc_dK.fill(0.0)
        acc_dV.fill(0.0)
        phase = Int32(0)
        pipes.kept.consumer_wait(loading.consumer_state(1))
        walk = partial(self.walk_int8, ops, more, pipes, acc_dK, acc_dV, span)
        for _ in cutlass.range(work.group, unroll=1):
            for g in cutlass.range(0, span.num_masked, unroll=1):
                walk(g, phase, True)
                phase = phase ^ 1
            for g in cutlass.range(span.num_masked, span.num_groups, unroll=1):
                walk(g, phase, False)
                phase = phase ^ 1
        if const_expr(self.query_wgs > 1):
            self.add_up(smem.partial, tidx, wq, acc_dK, acc_dV)
            if wq == 0:
                self.store(gmem, work, mmas[3], acc_dK, gmem.out[0], scale)
            else:
                self.store(gmem, work, mmas[2], acc_dV, gmem.out[1], Float32(1.0))
        else:
            self.store(gmem, work, mmas[3], acc_dK, gmem.out[0], scale)
            self.store(gmem, work, mmas[2], acc_dV, gmem.out[1], Float32(1.0))

    def walk_int8(self, ops, more, pipes, acc_dK, acc_dV, span, group, phase, masked: bool):
        """Steps on a group of tiles, as many as there are buffers."""
        stages = self.config.num_stages
        for n in range(stages):
            m = span.first + group_at(span, group) * stages + n if masked else 0
            self.step_int8(ops, more, pipes, acc_dK, acc_dV, loading.Slot(n, phase), m, masked)

    @cute.jit
    def step_int8(self, ops, more, pipes, acc_dK, acc_dV, now, m, masked: cutlass.Constexpr[bool]):
        """P, dS, dV and dK of tile m."""
        pipes.codes.consumer_wait(now)
        if const_expr(self.one_dout):
            pipes.values.consumer_wait(now)
        acc_S = cute.make_rmem_tensor(ops.s_shape, Int32)
        acc_dP = cute.make_rmem_tensor(ops.s_shape, Int32 if self.int8_dp else Float32)
        self.issue_scores(ops, acc_S, acc_dP, now)
        visible = self.visible(ops, m) if const_expr(masked) else None

        columns = self.statistics(ops, now.index, 0, self.config.ahead)
        warpgroup.wait_group(1)
        bwd_int8.probabilities(acc_S, partial(self.exponent, ops, columns), visible)
        p, jobs = cute.recast_tensor(acc_S, Float32), []
        if const_expr(self.int8_dv):
            jobs.append(self.job(more, 0, ops.mmas[2], acc_dV, p, ops.p, ops.p_words, now.index))
        else:
            bwd_int8.pack(p, ops.p_words, self.dtype)

        columns = self.statistics(ops, now.index, 1, 2 * self.config.ahead)
        warpgroup.wait_group(0)
        bwd_int8.gradients(acc_dP, p, partial(self.difference, ops, columns), visible)
        ds = cute.recast_tensor(acc_dP, Float32)
        if const_expr(self.int8_dk):
            jobs.append(
                self.job(more, 1, ops.mmas[3], acc_dK, ds, ops.ds_t, ops.ds_words, now.index)
            )
        else:
            bwd_int8.pack(ds, ops.ds_words, BFloat16)
        loading.release(pipes.codes, now)
        if const_expr(not self.one_dout):
            pipes.values.consumer_wait(now)
        if const_expr(not self.int8_dv):
            self.issue_dv(ops, acc_dV, now)
        if const_expr(not self.int8_dk):
            self.issue_dk(ops, acc_dK, now, fence=True)
        bwd_int8.run(jobs)
        loading.release(pipes.values, now)

    def job(self, more, which, mma, acc, x, a, words, stage):
        """Quantizes P or dS, and says what its product is."""
        sMax = more.maxima[None, which, stage]
        again = self.config.num_stages == 1
        scales = bwd_int8.quantize(x, words, more.groups[which], sMax, again)
        b = lambda n: more.values[which](n)[None, None, None, stage]
        channels = more.channels[which][0, None, stage]
        return bwd_int8.Job(mma, acc, a, b, scales, channels, self.rows // 32)

    def add_up(self, sums, tidx, wq, acc_dK, acc_dV):
        """Makes dK of the first warpgroup and dV of the second one those of both."""
        thread, size = tidx % 128, cute.size(acc_dK)
        everyone = 128 * self.config.num_consumer_wgs
        cute.arch.barrier(barrier_id=SUMS_BARRIER, number_of_threads=everyone)
        for i in range(size):
            sums[thread, i, wq] = ptx.select(wq == 0, acc_dV[i], acc_dK[i])
        cute.arch.barrier(barrier_id=SUMS_BARRIER, number_of_threads=everyone)
        for i in range(size):
            other = sums[thread, i, 1 - wq]
            acc_dK[i] = acc_dK[i] + other
            acc_dV[i] = acc_dV[i] + other

    @cute.jit
    def store(self, gmem, work, mma, acc, target, factor):
        """A 64-key share of dK or dV."""
        c, tile = self.config, work.tile
        tidx = ptx.thread_index() - 128
        if const_expr(self.query_wgs > 1):
            tidx = tidx % 128
        identity = cute.make_identity_tensor((c.tile_n, self.columns))
        first = mma.get_slice(tidx).partition_C(identity)[0]
        gX = seqlen.from_row(target[work.seq.batch, tile.head, None, None], work.seq.first_k)
        head_dim = const_expr(self.problem.head_dim)
        groups = const_expr(min(self.columns, head_dim) // 8)
        short = const_expr(self.config.column_splits > 1 and head_dim % self.columns > 0)
        for r in cutlass.range_constexpr(2):
            key = tile.block * c.tile_n + first[0] + 8 * r
            if key < work.seqlen_k:
                for j in cutlass.range_constexpr(groups):
                    pair = cute.make_rmem_tensor(2, self.dtype)
                    for x in cutlass.range_constexpr(2):
                        pair[x] = (acc[x + 2 * r + 4 * j] * factor).to(self.dtype)
                    column = tile.split * self.columns + 8 * j + first[1]
                    where = cute.local_tile(gX[key, None], (2,), (column // 2,))
                    if const_expr(not short):
                        cute.autovec_copy(pair, where)
                    else:
                        if column < head_dim:
                            cute.autovec_copy(pair, where)
