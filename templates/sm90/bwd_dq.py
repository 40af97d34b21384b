"""INT8 attention backward for Hopper, dQ, each product in INT8 or (all but S) 16 bit."""

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
    BwdPipes,
    BwdQueryOperands,
    BwdShared,
    BwdTensors,
    BwdWork,
)
from sage_cute.templates.blocks.bwd_schedule import (
    BEYOND,
    bwd_tile,
    group_at,
    key_end,
    key_span,
    key_start,
    ragged_key_span,
    tile_at,
)
from sage_cute.templates.blocks.magic import MAGIC
from sage_cute.templates.mma import wgmma

ARCH = ARCHS["sm_90a"]


class SageBwdDqSm90(AttnTemplate):
    """dQ = scale dS K, on what ``quant.bwd_prologue`` made.

    Layouts (global memory): those of ``sm90.bwd``, and
        k_hat  bfloat16 (batch, kv_heads, seqlen_k, head_dim), the dequantized codes
        k_t    int8 (batch, kv_heads, head_dim, seqlen_k padded to 128), instead of k_hat if dQ is
               INT8: ``quant.bwd_transposed``
        k_t_scale  float32 (batch, kv_heads, padded seqlen_k / 64, head_dim), of 22 bits
        dq     (batch, heads, seqlen_q, head_dim), head_dim contiguous; the queries that see no key
               are not written

    Roles
        warp 0            TMA: Q and dO of the tile of queries once; for each tile of keys K and V,
                          then K^
        warp 1            scales of the keys into the stage
        warp 2            of the last CTA waits for the end of the kernel before, beside which this
                          one starts: what comes behind this one comes behind both
        warp 3            nothing, like warp 2 (they complete the warpgroup that gives up registers)
        warps 4 ...       consumer warpgroups, 64 queries each

    Pipelines (producer -> consumer; arrivals on full, on empty)
        kept    warp 0 -> consumers, 1 stage       1 + bytes, -
        codes   warps 0 and 1 -> consumers         2 + bytes, one a consumer warp
        values  warp 0 -> consumers                1 + bytes, one a consumer warp

    Shared memory
        Q, dO (tile_m, head_dim), on their way into registers where those have room
        (``operands_in_registers``); K, V, K^ (tile_n, head_dim, stages); scales of K and of V
        (tile_n, 2, stages). For INT8: K^T (head_dim, tile_n, stages), scales of its channels (1,
        head_dim, stages), maxima (32, stages)

    A consumer's step on tile j (from the last one that a query sees to 0): issue S = Q K^T,
    dP = dO V^T of j and dQ += dS K of j + 1 -> wait for S, P -> wait for dP, dP - delta -> wait
    for dQ, dS. What belongs to a query stays in registers. Steps come in groups of
    ``dq_num_stages``, as in ``sm90.bwd``. With an INT8 dQ the step ends what it begins, as there.
    """

    family = "sm90"
    direction = "bwd"
    roles = ("tma", "scales", "consumer")

    def __init__(self, problem: BwdProblem, config: BwdTileConfig) -> None:
        """Static facts only; ask ``supports`` first."""
        self.problem, self.config = problem, config
        self.dtype = wgmma.DTYPES[problem.dtype]
        self.dim = problem.padded_dim
        self.int8_dp = problem.dp == "int8"
        self.v_type = Int8 if self.int8_dp else self.dtype
        self.int8_dq = problem.dq_rows > 0
        # a scale for queries whose do_scale differ is one of dS with do_scale in it
        self.true_ds = problem.dq_rows > 1 and self.int8_dp
        _, self.kept = operands_in_registers(problem, config, ARCH)
        self.wgs, self.stages = config.dq_num_consumer_wgs, config.dq_num_stages
        self.tile_m, self.tile_n = 64 * config.dq_num_consumer_wgs, config.dq_tile_n
        self.k_uniform = problem.block_k % config.dq_tile_n == 0
        self.threads = 128 * (1 + self.wgs)
        self.consumer_registers = consumer_registers(self.wgs, ARCH)

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
        k_dq: cute.Tensor,
        dout: cute.Tensor,
        stats: cute.Tensor,
        k_scale: cute.Tensor,
        v_scale: cute.Tensor | None,
        k_t_scale: cute.Tensor | None,
        dq: cute.Tensor,
        rows: Int32,
        scale: Float32,
        left: Int32 | None,
        right: Int32 | None,
        key_lengths: cute.Tensor | None,
        cu_q: cute.Tensor | None,
        cu_k: cute.Tensor | None,
        stream: cuda.CUstream,
    ):
        """Launches the kernel, one CTA a tile of queries.

        k_dq is k_hat or k_t. dout: int8 of the rows, or as given.
        """
        d = self.dim
        rows_first = loading.rows_first
        layouts = self.layouts()
        q = loading.tma(rows_first(q_codes), layouts.q, (self.tile_m, d))
        k = loading.tma(rows_first(k_codes), layouts.k, (self.tile_n, d))
        v_ = loading.tma(rows_first(v), layouts.v, (self.tile_n, d))
        do = loading.tma(rows_first(dout), layouts.dout, (self.tile_m, d))
        kh_tile = (d, self.tile_n) if const_expr(self.int8_dq) else (self.tile_n, d)
        kh = loading.tma(rows_first(k_dq), layouts.k_hat, kh_tile)
        channels = None, None
        if const_expr(self.int8_dq):
            channels = loading.tma(rows_first(k_t_scale), self.channel_layout(), (1, d))
        array, stages = products.array, self.stages

        @cute.struct
        class Storage:
            kept_barriers: cute.struct.MemRange[cutlass.Int64, 2]
            codes_barriers: cute.struct.MemRange[cutlass.Int64, stages * 2]
            values_barriers: cute.struct.MemRange[cutlass.Int64, stages * 2]
            q: array(Int8, cute.cosize(layouts.q))
            dout: array(self.v_type, cute.cosize(layouts.dout))
            k: array(Int8, cute.cosize(layouts.k))
            v: array(self.v_type, cute.cosize(layouts.v))
            k_hat: array(Int8 if self.int8_dq else BFloat16, cute.cosize(layouts.k_hat))
            scales: array(Float32, self.tile_n * 2 * stages, 128)
            channels: array(Float32, d * stages if self.int8_dq else 0, 128)
            maxima: array(Float32, 32 * stages if self.int8_dq else 0, 128)

        self.Storage = Storage
        bounds = seqlen.Bounds(left, right, key_lengths, cu_q, cu_k)
        num_tiles = cute.ceil_div(rows, self.tile_m) * dq.shape[0] * dq.shape[1]
        if const_expr(cu_q is not None):
            num_tiles = cute.ceil_div(rows, self.tile_m) * (cu_q.shape[0] - 1) * dq.shape[1]
        self.kernel(
            BwdTensors(q[0], k[0], v_[0], do[0], kh[0], None, None, None, None, channels[0]),
            BwdTensors(q[1], k[1], v_[1], do[1], kh[1], stats, k_scale, v_scale, dq, channels[1]),
            rows,
            scale,
            bounds,
            (layouts.q, layouts.k, layouts.v, layouts.dout, layouts.k_hat),
            self.mmas(),
        ).launch(
            grid=(num_tiles, 1, 1),
            block=[self.threads, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
            use_pdl=True,
        )

    def mmas(self):
        """S, dP and dQ."""
        scores_mma = partial(products.scores_mma, a_in_registers=self.kept)
        return (
            scores_mma(self.wgs, self.tile_n, Int8),
            scores_mma(self.wgs, self.tile_n, self.v_type),
            products.gradient_mma(self.wgs, self.dim, BFloat16, int8=self.int8_dq),
        )

    def layouts(self):
        """Layouts in shared memory, all swizzled."""
        d, make = self.dim, wgmma.smem_layout
        return SimpleNamespace(
            q=make(Int8, d, (self.tile_m, d)),
            dout=make(self.v_type, d, (self.tile_m, d)),
            k=make(Int8, d, (self.tile_n, d, self.stages)),
            v=make(self.v_type, d, (self.tile_n, d, self.stages)),
            k_hat=make(Int8, self.tile_n, (d, self.tile_n, self.stages))
            if self.int8_dq
            else make(BFloat16, d, (self.tile_n, d, self.stages)),
        )

    def channel_layout(self):
        """Scales of the channels of K^T in shared memory."""
        d = self.dim
        return cute.make_layout((1, d, self.stages), stride=(d, 1, d))

    @cute.kernel
    def kernel(
        self,
        tma: BwdTensors,
        gmem: BwdTensors,
        rows: Int32,
        scale: Float32,
        bounds: seqlen.Bounds,
        layouts: tuple,
        mmas: tuple,
    ):
        """Allocates, builds the pipelines and dispatches the roles."""
        d, stages = self.dim, self.stages
        tidx, _, _ = cute.arch.thread_idx()
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        storage = cutlass.memory.SmemAllocator().allocate(self.Storage)
        pipe = partial(loading.pipe, consumers=4 * self.wgs)
        v_bytes = self.v_type.width // 8
        kept, codes = self.tile_m * d * (1 + v_bytes), self.tile_n * d * (1 + v_bytes)
        pipes = BwdPipes(
            kept=pipe(storage.kept_barriers, 1, 1, tx_bytes=kept),
            codes=pipe(storage.codes_barriers, stages, 2, tx_bytes=codes),
            values=pipe(
                storage.values_barriers,
                stages,
                1,
                tx_bytes=self.tile_n * d + 4 * d if self.int8_dq else self.tile_n * d * 2,
            ),
        )
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        q, k, v, dout, k_hat = layouts
        tensor = lambda memory, layout: memory.get_tensor(layout.outer, swizzle=layout.inner)
        smem = BwdShared(
            q=tensor(storage.q, q),
            k=tensor(storage.k, k),
            v=tensor(storage.v, v),
            dout=tensor(storage.dout, dout),
            values=tensor(storage.k_hat, k_hat),
            stats=storage.scales.get_tensor(cute.make_layout((self.tile_n, 2, stages))),
            channels=storage.channels.get_tensor(self.channel_layout())
            if const_expr(self.int8_dq)
            else None,
            maxima=storage.maxima.get_tensor(cute.make_layout((32, stages)))
            if const_expr(self.int8_dq)
            else None,
        )
        work = self.work(gmem, rows, bounds)
        if warp_index < 4:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            if warp_index == 0:
                self.load(gmem, smem, pipes, work, tma)
            if warp_index == 1:
                self.load_scales(gmem, smem, pipes, work)
            if warp_index == 2 and cute.arch.block_idx()[0] == cute.arch.grid_dim()[0] - 1:
                cute.arch.griddepcontrol_wait()
        else:
            cute.arch.setmaxregister_increase(self.consumer_registers)
            consume = self.consume_int8 if const_expr(self.int8_dq) else self.consume
            if const_expr(not self.problem.ragged):
                consume(tidx - 128, gmem, smem, pipes, work, scale, mmas)
            else:
                if work.span.num_groups > 0:
                    consume(tidx - 128, gmem, smem, pipes, work, scale, mmas)
                else:
                    self.store_zeros(tidx - 128, gmem, work)

    def ragged_work(self, gmem, longest, bounds):
        """``work`` for any mask and length."""
        heads, causal = gmem.q.shape[2], self.problem.is_causal
        tile = bwd_tile(
            cute.arch.block_idx()[0],
            cute.ceil_div(longest, self.tile_m),
            1,
            heads,
            last_first=causal,
        )
        seq = seqlen.sequence(
            self.problem.lengths,
            causal,
            bounds,
            tile.batch,
            gmem.q.shape[0],
            gmem.k.shape[0],
        )
        span = ragged_key_span(
            tile.block, seq, tile_m=self.tile_m, tile_n=self.tile_n, stages=self.stages
        )
        group, offset = heads // gmem.k.shape[2], seq.seqlen_k - seq.seqlen_q
        return BwdWork(seq.seqlen_q, 0, seq.seqlen_k, seq, offset, group, tile, span)

    def work(self, gmem, rows, bounds):
        """What this CTA works on. rows: that see a key, or those of the longest sequence."""
        if const_expr(self.problem.ragged):
            return self.ragged_work(gmem, rows, bounds)
        causal = self.problem.is_causal
        seqlen_k = gmem.k.shape[0]
        offset = cutlass.max(seqlen_k - rows, 0)
        tile = bwd_tile(
            cute.arch.block_idx()[0],
            cute.ceil_div(rows, self.tile_m),
            1,
            gmem.q.shape[2],
            last_first=causal,
        )
        span = key_span(
            tile.block,
            seqlen_k,
            offset,
            tile_m=self.tile_m,
            tile_n=self.tile_n,
            stages=self.stages,
            causal=causal,
        )
        group = gmem.q.shape[2] // gmem.k.shape[2]
        blind = gmem.q.shape[0] - rows
        seq = seqlen.dense(tile.batch, rows, seqlen_k, causal=causal)
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
        d, tile, span, seq = self.dim, work.tile, work.span, work.seq
        kv_head = tile.head // work.group
        state = loading.producer_state(1)
        pipes.kept.producer_acquire(state)
        bar = pipes.kept.producer_get_barrier(state)
        dout_blind = 0 if const_expr(self.int8_dp) else work.blind
        for atom, shared, tensor, blind in (
            (tma.q, smem.q, gmem.q, seqlen.behind(seq.first_q, work.blind)),
            (tma.dout, smem.dout, gmem.dout, seqlen.behind(seqlen.padded_q(seq), dout_blind)),
        ):
            seen = cute.domain_offset((blind, 0), tensor[None, None, tile.head, seq.batch])
            s, g = loading.partition(
                atom, shared, cute.local_tile(seen, (self.tile_m, d), (tile.block, 0))
            )
            cute.copy(atom, g, s, tma_bar_ptr=bar)

        state = loading.producer_state(self.stages)
        padded = seqlen.padded_k(seq)
        tiles = lambda tensor, first: cute.local_tile(
            seqlen.rows_from(tensor, kv_head, seq.batch, first), (self.tile_n, d), (None, 0)
        )
        sK, tK = loading.partition(tma.k, smem.k, tiles(gmem.k, seq.first_k))
        first_v = padded if const_expr(self.problem.block_v > 0) else seq.first_k
        sV, tV = loading.partition(tma.v, smem.v, tiles(gmem.v, first_v))
        if const_expr(self.int8_dq):
            of_head = gmem.values[None, None, kv_head, seq.batch]
            k_tiles = cute.local_tile(
                seqlen.from_column(of_head, padded), (d, self.tile_n), (0, None)
            )
            of_tile = padded if const_expr(isinstance(padded, int)) else padded // self.tile_n
            channels = seqlen.rows_from(gmem.channels, kv_head, seq.batch, of_tile)
            sScale, tScale = loading.partition(
                tma.channels, smem.channels, cute.local_tile(channels, (1, d), (None, 0))
            )
        else:
            k_tiles = tiles(gmem.values, padded)
        sKh, tKh = loading.partition(tma.values, smem.values, k_tiles)
        for i in cutlass.range(span.num_tiles, unroll=1):
            j, at = (
                self.tile_or_nothing(span.first - tile_at(span, i, self.stages), work),
                state.index,
            )
            pipes.codes.producer_acquire(state)
            bar = pipes.codes.producer_get_barrier(state)
            cute.copy(tma.k, tK[None, j], sK[None, at], tma_bar_ptr=bar)
            cute.copy(tma.v, tV[None, j], sV[None, at], tma_bar_ptr=bar)
            pipes.values.producer_acquire(state)
            bar = pipes.values.producer_get_barrier(state)
            cute.copy(tma.values, tKh[None, j], sKh[None, at], tma_bar_ptr=bar)
            if const_expr(self.int8_dq):
                cute.copy(tma.channels, tScale[None, j], sScale[None, at], tma_bar_ptr=bar)
            state.advance()

    def tile_or_nothing(self, j, work):
        """Tile j, or one behind the tensors where it is behind a packed sequence."""
        if const_expr(self.problem.lengths != "packed"):
            return j
        return ptx.select(j * self.tile_n < work.seqlen_k, j, Int32(BEYOND))

    @cute.jit
    def load_scales(self, gmem, smem, pipes, work):
        """Warp 1: what P and dS need of each key: scale of K (if not one a tile), scale of V."""
        tile, span, seq = work.tile, work.span, work.seq
        block_v = const_expr(max(self.problem.block_v, 1))
        first_k, first_v = seqlen.group_k(seq, self.problem.block_k), seqlen.padded_k(seq)
        if const_expr(not isinstance(first_v, int)):
            first_v = first_v // block_v
        kv_head = tile.head // work.group
        lane = cute.arch.lane_idx()
        state = loading.producer_state(self.stages)
        for i in cutlass.range(span.num_tiles, unroll=1):
            first = (span.first - tile_at(span, i, self.stages)) * self.tile_n
            for t in cutlass.range_constexpr(cute.ceil_div(self.tile_n, 32)):
                at = lane + 32 * t
                key = cutlass.min(first + at, work.seqlen_k - 1)
                group = seqlen.behind(first_k, key // self.problem.block_k)
                k = gmem.k_scale[seq.batch, kv_head, group]
                v = Float32(1.0)
                if const_expr(self.int8_dp):
                    v = gmem.v_scale[seq.batch, kv_head, seqlen.behind(first_v, key // block_v)]
                if const_expr(t == 0):
                    pipes.codes.sync_object_empty.wait(state.index, state.phase)
                if at < self.tile_n:
                    smem.stats[at, 0, state.index] = k
                    smem.stats[at, 1, state.index] = v
            cute.arch.sync_warp()
            loading.arrive(pipes.codes.producer_get_barrier(state))
            state.advance()

    def operands(self, tidx, wg, gmem, smem, work, mmas):
        """Fragments of the three products, and what belongs to the thread's two queries."""
        mma_s, mma_dp, mma_dq = mmas
        slot = cute.make_layout(self.wgs, stride=128)(wg)
        s, dp, dq = [m.get_slice(slot) for m in mmas]
        shape = self.tile_m, self.tile_n
        first = mma_s.get_slice(tidx).partition_C(cute.make_identity_tensor(shape))[0]
        ds = mma_dq.make_fragment_A(mma_dq.partition_shape_A(shape))
        if not self.int8_dq:
            k_t = products.turned(smem.values, self.dim, self.tile_n, self.stages)
        q_scale, lse, delta = (cute.make_rmem_tensor(2, Float32) for _ in range(3))
        visible, first_seen = [], []
        stats = gmem.stats[work.seq.batch, work.tile.head, None, None]
        stats = seqlen.from_row(stats, seqlen.padded_q(work.seq))
        for r in range(2):
            row = work.tile.block * self.tile_m + first[0] + 8 * r
            four = cute.make_rmem_tensor(4, Float32)
            cute.autovec_copy(stats[cutlass.min(row, work.rows - 1), None], four)
            q_scale[r], lse[r], delta[r] = four[0], four[1], four[2]
            if self.problem.dq_rows > 1:  # what is no query sets no scale
                lse[r] = ptx.select(row < work.rows, lse[r], Float32(float("inf")))
            if self.true_ds:  # P times do_scale
                lse[r] = lse[r] - ptx.log2(four[3])
            visible.append(key_end(row, work.seq, work.offset) - first[1])
            if self.problem.window:
                first_seen.append(key_start(row, work.seq, work.offset) - first[1])
        return BwdQueryOperands(
            mmas=mmas,
            q=products.fragment_a(mma_s, s, smem.q, in_registers=self.kept),
            k=mma_s.make_fragment_B(s.partition_B(smem.k)),
            dout=products.fragment_a(mma_dp, dp, smem.dout, in_registers=self.kept),
            v=mma_dp.make_fragment_B(dp.partition_B(smem.v)),
            ds=ds,
            k_t=None if self.int8_dq else mma_dq.make_fragment_B(dq.partition_B(k_t)),
            ds_words=bwd_scores.as_words(ds),
            s_shape=mma_s.partition_shape_C(shape),
            stats=smem.stats,
            quad=tidx % 4,
            q_scale=q_scale,
            lse=lse,
            delta=delta,
            visible=visible,
            first_seen=first_seen if self.problem.window else None,
        )

    def visible(self, ops, j):
        """(r, g, c) -> whether the thread's query r sees its key c of column group g of tile j."""
        end = [ops.visible[r] - j * self.tile_n for r in range(2)]
        if ops.first_seen is None:
            return lambda r, g, c: 8 * g + c < end[r]
        first = [ops.first_seen[r] - j * self.tile_n for r in range(2)]
        return lambda r, g, c: (8 * g + c < end[r]) & (8 * g + c >= first[r])

    @cute.jit
    def store_zeros(self, tidx, gmem, work):
        """DQ of queries that see no key, 8 columns of a row at a time."""
        tile, vectors = work.tile, const_expr(self.problem.head_dim // 8)
        zeros = cute.make_rmem_tensor(8, self.dtype)
        zeros.fill(0.0)
        first = tile.block * self.tile_m
        rows = cutlass.min(work.rows - first, self.tile_m)
        gX = seqlen.from_row(gmem.out[work.seq.batch, tile.head, None, None], work.seq.first_q)
        for i in cutlass.range(tidx, rows * vectors, 128 * self.wgs, unroll=1):
            where = gX[first + i // vectors, None]
            cute.autovec_copy(zeros, cute.local_tile(where, (8,), (i % vectors,)))

    @cute.jit
    def consume(self, tidx, gmem, smem, pipes, work, scale, mmas):
        """A consumer warpgroup: dQ of its 64 queries."""
        span = work.span
        wg = cute.arch.make_warp_uniform(tidx // 128)
        ops = self.operands(tidx, wg, gmem, smem, work, mmas)
        out_shape = mmas[2].partition_shape_C((self.tile_m, self.dim))
        acc_dQ = cute.make_rmem_tensor(out_shape, Float32)
        acc_dQ.fill(0.0)
        phase = Int32(0)
        pipes.kept.consumer_wait(loading.consumer_state(1))
        if const_expr(self.kept):
            products.keep(mmas[0], tidx, smem.q, ops.q)
            products.keep(mmas[1], tidx, smem.dout, ops.dout)
        walk = partial(self.walk, ops, pipes, acc_dQ, span)
        walk(Int32(0), phase, True, True)
        phase = phase ^ 1
        for g in cutlass.range(1, span.num_masked, unroll=1):
            walk(g, phase, False, True)
            phase = phase ^ 1
        for g in cutlass.range(span.num_masked, span.num_groups, unroll=1):
            walk(g, phase, False, False)
            phase = phase ^ 1
        last = loading.Slot(self.stages - 1, phase ^ 1)
        pipes.values.consumer_wait(last)
        warpgroup.fence()
        self.issue_dq(ops, acc_dQ, last)
        warpgroup.wait_group(0)
        self.store(gmem, work, mmas[2], acc_dQ, scale)

    def walk(self, ops, pipes, acc_dQ, span, group, phase, first: bool, masked: bool):
        """Steps on a group of tiles, as many as there are buffers."""
        for n in range(self.stages):
            # the last buffer of the group before had the other phase
            before = loading.Slot((n - 1) % self.stages, phase if n else phase ^ 1)
            j = span.first - group_at(span, group) * self.stages - n if masked else 0
            now = loading.Slot(n, phase)
            self.step(ops, pipes, acc_dQ, before, now, j, first and n == 0, masked)

    @cute.jit
    def step(
        self,
        ops,
        pipes,
        acc_dQ,
        before,
        now,
        j,
        first: cutlass.Constexpr[bool],
        masked: cutlass.Constexpr[bool],
    ):
        """P and dS of tile j, dQ of the tile before."""
        pipes.codes.consumer_wait(now)
        if const_expr(not first):
            pipes.values.consumer_wait(before)
        acc_S = cute.make_rmem_tensor(ops.s_shape, Int32)
        acc_dP = cute.make_rmem_tensor(ops.s_shape, Int32 if self.int8_dp else Float32)
        self.issue_scores(ops, acc_S, acc_dP, now)
        if const_expr(not first):
            self.issue_dq(ops, acc_dQ, before)
        visible = self.visible(ops, j) if const_expr(masked) else None
        factors = self.factors(ops, now.index)
        of_k = None if const_expr(self.k_uniform) else self.scales(ops, now.index, 0)
        of_v = self.scales(ops, now.index, 1) if const_expr(self.int8_dp) else None

        warpgroup.wait_group(1 if first else 2)
        num_words = const_expr(cute.size(ops.ds_words))
        p, packed = cute.make_rmem_tensor(num_words, Int32), None
        if const_expr(self.config.packed_ds):
            packed = cute.make_rmem_tensor(num_words, Int32)
        exponent = partial(self.exponent, ops, of_k, factors)
        bwd_scores.probabilities(acc_S, [p], exponent, visible, [BFloat16])

        warpgroup.wait_group(0 if first else 1)
        difference = partial(self.difference, ops, of_v)
        bwd_scores.gradients(acc_dP, packed, difference, visible)
        loading.release(pipes.codes, now)
        warpgroup.wait_group(0)
        bwd_scores.multiply(p, acc_dP if packed is None else packed, ops.ds_words)
        if const_expr(not first):
            loading.free(pipes.values, before)

    def factors(self, ops, stage):
        """(factor, bias) of S of the thread's two queries: with the tile's k_scale if it has one.

        Where each key has its own, the bias is that of the magic number alone.
        """
        k_scale = ops.stats[0, 0, stage] if const_expr(self.k_uniform) else None
        both = []
        for r in range(2):
            factor = ops.q_scale[r]
            if const_expr(k_scale is not None):
                factor = factor * k_scale
                both.append((factor, ptx.fma(factor, Float32(-MAGIC), -ops.lse[r])))
            else:
                both.append(bwd_scores.with_bias(factor))
        return both

    def scales(self, ops, stage, which):
        """Scales of the thread's two keys in column group j, all loaded at once."""
        loaded = []
        for j in range(self.tile_n // 8):
            two = cute.make_rmem_tensor(2, Float32)
            column = ops.stats[None, which, stage]
            cute.autovec_copy(cute.local_tile(column, (2,), (4 * j + ops.quad,)), two)
            loaded.append((two[0], two[1]))
        return lambda j: loaded[j]

    def exponent(self, ops, columns, factors, r, j):
        """S - L of the thread's query r and its keys of column group j."""
        factor, bias = factors[r]
        two = None if const_expr(self.k_uniform) else columns(j)

        def z(c, x):
            x = ptx.fma(x, factor, bias)
            return x if const_expr(two is None) else ptx.fma(x, two[c], -ops.lse[r])

        return z

    def difference(self, ops, columns, r, j):
        """(dP - delta) / do_scale."""
        two = columns(j) if const_expr(self.int8_dp) else None

        def t(c, x):
            if const_expr(two is None):
                return x + ops.delta[r]
            return ptx.fma(x - MAGIC, two[c], ops.delta[r])

        return t

    def issue_scores(self, ops, acc_S, acc_dP, state):
        """Starts S = Q K^T and dP = dO V^T."""
        k = ops.k[None, None, None, state.index]
        wgmma.issue(ops.mmas[0], acc_S, self.dim // 32, ops.q, k)
        num_k = self.dim // (32 if self.int8_dp else 16)
        v = ops.v[None, None, None, state.index]
        wgmma.issue(ops.mmas[1], acc_dP, num_k, ops.dout, v, fence=False)

    def issue_dq(self, ops, acc, state):
        """Starts dQ += dS K."""
        k_t = ops.k_t[None, None, None, state.index]
        wgmma.issue(ops.mmas[2], acc, self.tile_n // 16, ops.ds, k_t, fence=False, accumulate=True)

    # INT8 dQ: each step ends what it begins.

    def operands_int8(self, tidx, wg, smem, mma):
        """Operands of an INT8 dQ."""
        thread = mma.get_slice(cute.make_layout(self.wgs, stride=128)(wg))

        def slice_of(n):
            shape = SLICE, self.tile_n, self.stages
            tile = cute.local_tile(smem.values, shape, (n, 0, 0))
            return mma.make_fragment_B(thread.partition_B(tile))

        rows = self.problem.dq_rows
        whole = const_expr(rows > 8)
        group = bwd_int8.group_of(0 if whole else rows, rows // 64 if whole else 1, tidx)
        return BwdInt8Operands(slice_of, smem.channels, group, smem.maxima)

    @cute.jit
    def consume_int8(self, tidx, gmem, smem, pipes, work, scale, mmas):
        """A consumer warpgroup: dQ of its 64 queries."""
        span = work.span
        wg = cute.arch.make_warp_uniform(tidx // 128)
        ops = self.operands(tidx, wg, gmem, smem, work, mmas)
        more = self.operands_int8(tidx, wg, smem, mmas[2])
        out_shape = mmas[2].partition_shape_C((self.tile_m, self.dim))
        acc_dQ = cute.make_rmem_tensor(out_shape, Float32)
        acc_dQ.fill(0.0)
        phase = Int32(0)
        pipes.kept.consumer_wait(loading.consumer_state(1))
        walk = partial(self.walk_int8, ops, more, pipes, acc_dQ, span)
        for g in cutlass.range(0, span.num_masked, unroll=1):
            walk(g, phase, True)
            phase = phase ^ 1
        for g in cutlass.range(span.num_masked, span.num_groups, unroll=1):
            walk(g, phase, False)
            phase = phase ^ 1
        self.store(gmem, work, mmas[2], acc_dQ, scale)

    def walk_int8(self, ops, more, pipes, acc_dQ, span, group, phase, masked: bool):
        """Steps on a group of tiles, as many as there are buffers."""
        for n in range(self.stages):
            j = span.first - group_at(span, group) * self.stages - n if masked else 0
            self.step_int8(ops, more, pipes, acc_dQ, loading.Slot(n, phase), j, masked)

    @cute.jit
    def step_int8(self, ops, more, pipes, acc_dQ, now, j, masked: cutlass.Constexpr[bool]):
        """P, dS and dQ of tile j."""
        pipes.codes.consumer_wait(now)
        acc_S = cute.make_rmem_tensor(ops.s_shape, Int32)
        acc_dP = cute.make_rmem_tensor(ops.s_shape, Int32 if self.int8_dp else Float32)
        self.issue_scores(ops, acc_S, acc_dP, now)
        visible = self.visible(ops, j) if const_expr(masked) else None
        factors = self.factors(ops, now.index)
        of_k = None if const_expr(self.k_uniform) else self.scales(ops, now.index, 0)
        of_v = self.scales(ops, now.index, 1) if const_expr(self.int8_dp) else None

        warpgroup.wait_group(1)
        bwd_int8.probabilities(acc_S, partial(self.exponent, ops, of_k, factors), visible)
        warpgroup.wait_group(0)
        p = cute.recast_tensor(acc_S, Float32)
        bwd_int8.gradients(acc_dP, p, partial(self.difference, ops, of_v), visible)
        loading.release(pipes.codes, now)
        ds, at = cute.recast_tensor(acc_dP, Float32), now.index
        again = self.stages == 1
        scales = bwd_int8.quantize(ds, ops.ds_words, more.groups, more.maxima[None, at], again)
        pipes.values.consumer_wait(now)
        b = lambda n: more.values(n)[None, None, None, at]
        channels = more.channels[0, None, at]
        bwd_int8.run(
            [bwd_int8.Job(ops.mmas[2], acc_dQ, ops.ds, b, scales, channels, self.tile_n // 32)]
        )
        loading.release(pipes.values, now)

    @cute.jit
    def store(self, gmem, work, mma, acc, scale):
        """A 64-query share of dQ, with do_scale, which dS was divided by."""
        tile = work.tile
        tidx = ptx.thread_index() - 128
        identity = cute.make_identity_tensor((self.tile_m, self.dim))
        first = mma.get_slice(tidx).partition_C(identity)[0]
        seq = work.seq
        gX = seqlen.from_row(gmem.out[seq.batch, tile.head, None, None], seq.first_q)
        stats = gmem.stats[seq.batch, tile.head, None, None]
        stats = seqlen.from_row(stats, seqlen.padded_q(seq))
        for r in cutlass.range_constexpr(2):
            row = tile.block * self.tile_m + first[0] + 8 * r
            if row < work.rows:
                factor = scale if const_expr(self.true_ds) else scale * stats[row, 3]
                for j in cutlass.range_constexpr(self.problem.head_dim // 8):
                    pair = cute.make_rmem_tensor(2, self.dtype)
                    for x in cutlass.range_constexpr(2):
                        pair[x] = (acc[x + 2 * r + 4 * j] * factor).to(self.dtype)
                    target = gX[work.blind + row, None]
                    column = (8 * j + first[1]) // 2
                    cute.autovec_copy(pair, cute.local_tile(target, (2,), (column,)))
