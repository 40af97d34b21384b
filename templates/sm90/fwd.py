"""INT8 attention forward for Hopper."""

from functools import partial
from types import SimpleNamespace

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int8, Int32, const_expr, pipeline
from cutlass.cute.nvgpu import cpasync, warpgroup

from sage_cute.config import ARCHS, AttnProblem, FwdTileConfig, Status, supports_fwd
from sage_cute.config.constraints import PRODUCER_REGISTERS, consumer_registers
from sage_cute.templates.base import AttnTemplate
from sage_cute.templates.blocks import epilogue, fold, ptx, softmax
from sage_cute.templates.blocks.scheduler import key_range, tile_coord, visible_keys
from sage_cute.templates.mma import int8_sm90
from sage_cute.templates.params import (
    BlockScales,
    FwdAccumulators,
    FwdOperands,
    FwdPipes,
    FwdShared,
    FwdStates,
    FwdTensors,
    FwdWork,
)

PINGPONG_BARRIER = 1  # named barriers 1 .. num_consumer_wgs
ARCH = ARCHS["sm_90a"]


class SageFwdSm90(AttnTemplate):
    """O = softmax(Q K^T) V on codes and scales that the quantization prologue made.

    Layouts (global memory)
        q_codes, k_codes  int8 (batch, heads, seqlen, head_dim), contiguous
        v_t               int8 (batch, kv_heads, head_dim, seqlen_k padded to 128), contiguous,
                          keys permuted within 16 (mma.int8_sm90)
        q_scale, k_scale  float32 (batch, heads, tokens or blocks)
        v_scale           float32 (batch, kv_heads, padded tokens or blocks)
        out, lse          (batch, heads, seqlen_q, head_dim), head_dim contiguous; float32
                          (batch, heads, seqlen_q): natural log, of the K that was quantized

    Roles
        warp 0            TMA: Q once a tile, K and V^T a stage each per key block
        warp 1            scales of a key block into the stage of its K
        warps 2, 3        nothing (they complete the warpgroup that gives up its registers)
        warps 4 ...       consumer warpgroups, 64 queries each

    Pipelines (producer -> consumer; arrivals on full, on empty)
        Q    warp 0 -> consumers, 1 stage          1 + bytes, one a consumer warp
        K    warps 0 and 1 -> consumers            2 + bytes, one a consumer warp
        V    warp 0 -> consumers                   1 + bytes, one a consumer warp

    Shared memory
        sQ (tile_m, head_dim), sK (tile_n, head_dim, stages), sV (head_dim, tile_n, stages) int8,
        swizzled; sKeys (4, tile_n / 2, stages): k, k, v, v of each pair of keys; sTile (4, stages):
        k and v of the block, largest k; barriers.

    A consumer's iteration on block j (blocks run from the last to 0), with ``overlap``: codes of P
    of block j + 1, packed into the A operand slice by slice; as soon as the registers of a slice of
    scores are free, that slice of S = Q K^T of block j is issued -> issue P V of j + 1 -> wait for
    S, slice by slice: probabilities, and from ``fold_after`` on the fold of P V. Without
    ``overlap`` P V is waited for and folded before S is issued. The first ``num_exact`` blocks
    apply the mask and set the softmax reference; the others keep it unless it threatens to
    overflow.
    """

    family = "sm90"
    direction = "fwd"
    roles = ("tma", "scales", "consumer")

    def __init__(self, problem: AttnProblem, config: FwdTileConfig) -> None:
        """Static facts only; ask ``supports`` first."""
        self.problem, self.config = problem, config
        self.head_dim, self.dtype = problem.head_dim, _DTYPES[problem.dtype]
        self.k_per_token = problem.k_scale == "per_token"
        self.v_per_token = problem.v_scale == "per_token"
        self.slice_n = problem.head_dim // config.pv_slices
        self.threads = 128 * (1 + config.num_consumer_wgs)
        self.consumer_registers = consumer_registers(config, ARCH)

    @staticmethod
    def supports(problem: AttnProblem, config: FwdTileConfig) -> Status:
        """Whether this template can be built for a problem and a configuration."""
        return supports_fwd(problem, config, ARCH)

    @cute.jit
    def __call__(
        self,
        q_codes: cute.Tensor,
        q_scale: cute.Tensor,
        k_codes: cute.Tensor,
        k_scale: cute.Tensor,
        v_t: cute.Tensor,
        v_scale: cute.Tensor,
        out: cute.Tensor,
        lse: cute.Tensor,
        scale_log2: Float32,
        num_ctas: Int32,
        stream: cuda.CUstream,
    ):
        """Launches the kernel; ``num_ctas`` bounds the grid of a persistent one."""
        c = self.config
        mQ, mK, mV = [_rows_first(t) for t in (q_codes, k_codes, v_t)]
        mma_qk = int8_sm90.tiled_mma(
            c.num_consumer_wgs, c.tile_n // c.qk_slices, a_in_registers=False
        )
        mma_pv = int8_sm90.tiled_mma(c.num_consumer_wgs, self.slice_n, a_in_registers=True)
        layouts = SimpleNamespace(
            q=int8_sm90.smem_layout(c.tile_m, self.head_dim),
            k=int8_sm90.smem_layout(c.tile_n, self.head_dim, c.num_stages),
            v=int8_sm90.smem_layout(self.head_dim, c.tile_n, c.num_stages),
        )
        load = cpasync.CopyBulkTensorTileG2SOp()
        tma_q = cpasync.make_tiled_tma_atom(load, mQ, layouts.q, (c.tile_m, self.head_dim))
        tma_k = cpasync.make_tiled_tma_atom(
            load, mK, cute.select(layouts.k, mode=[0, 1]), (c.tile_n, self.head_dim)
        )
        tma_v = cpasync.make_tiled_tma_atom(
            load, mV, cute.select(layouts.v, mode=[0, 1]), (self.head_dim, c.tile_n)
        )

        @cute.struct
        class Storage:
            q_barriers: cute.struct.MemRange[cutlass.Int64, 2]
            k_barriers: cute.struct.MemRange[cutlass.Int64, c.num_stages * 2]
            v_barriers: cute.struct.MemRange[cutlass.Int64, c.num_stages * 2]
            keys: cute.struct.Align[cute.struct.MemRange[Float32, c.num_stages * c.tile_n * 2], 128]
            tile: cute.struct.Align[cute.struct.MemRange[Float32, c.num_stages * 4], 128]
            q: cute.struct.Align[cute.struct.MemRange[Int8, cute.cosize(layouts.q)], 1024]
            k: cute.struct.Align[cute.struct.MemRange[Int8, cute.cosize(layouts.k)], 1024]
            v: cute.struct.Align[cute.struct.MemRange[Int8, cute.cosize(layouts.v)], 1024]

        self.Storage = Storage
        num_m_blocks = cute.ceil_div(mQ.shape[0], c.tile_m)
        num_tiles = num_m_blocks * mQ.shape[2] * mQ.shape[3]
        grid = cutlass.min(num_tiles, num_ctas) if const_expr(c.persistent) else num_tiles
        self.kernel(
            *tma_q,
            *tma_k,
            *tma_v,
            q_scale,
            k_scale,
            v_scale,
            out,
            lse,
            scale_log2,
            num_tiles,
            layouts.q,
            layouts.k,
            layouts.v,
            mma_qk,
            mma_pv,
        ).launch(grid=(grid, 1, 1), block=[self.threads, 1, 1], stream=stream, min_blocks_per_mp=1)

    @cute.kernel
    def kernel(
        self,
        tma_q: cute.CopyAtom,
        mQ: cute.Tensor,
        tma_k: cute.CopyAtom,
        mK: cute.Tensor,
        tma_v: cute.CopyAtom,
        mV: cute.Tensor,
        q_scale: cute.Tensor,
        k_scale: cute.Tensor,
        v_scale: cute.Tensor,
        out: cute.Tensor,
        lse: cute.Tensor,
        scale_log2: Float32,
        num_tiles: Int32,
        q_layout: cute.ComposedLayout,
        k_layout: cute.ComposedLayout,
        v_layout: cute.ComposedLayout,
        mma_qk: cute.TiledMma,
        mma_pv: cute.TiledMma,
    ):
        """Allocates, builds the pipelines and dispatches the roles."""
        c = self.config
        tidx, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            for atom in (tma_q, tma_k, tma_v):
                cpasync.prefetch_descriptor(atom)
        storage = cutlass.memory.SmemAllocator().allocate(self.Storage)
        pipes = FwdPipes(
            q=self.pipe(storage.q_barriers, 1, 1, c.tile_m * self.head_dim),
            k=self.pipe(storage.k_barriers, c.num_stages, 2, c.tile_n * self.head_dim),
            v=self.pipe(storage.v_barriers, c.num_stages, 1, c.tile_n * self.head_dim),
        )
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        smem = FwdShared(
            q=storage.q.get_tensor(q_layout.outer, swizzle=q_layout.inner),
            k=storage.k.get_tensor(k_layout.outer, swizzle=k_layout.inner),
            v=storage.v.get_tensor(v_layout.outer, swizzle=v_layout.inner),
            keys=storage.keys.get_tensor(cute.make_layout((4, c.tile_n // 2, c.num_stages))),
            tile=storage.tile.get_tensor(cute.make_layout((4, c.num_stages))),
        )
        gmem = FwdTensors(
            q=mQ, k=mK, v=mV, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, out=out, lse=lse
        )
        work = FwdWork(
            seqlen_q=mQ.shape[0],
            seqlen_k=mK.shape[0],
            num_heads=mQ.shape[2],
            batch=mQ.shape[3],
            group=mQ.shape[2] // mK.shape[2],
            num_m_blocks=cute.ceil_div(mQ.shape[0], c.tile_m),
            num_tiles=num_tiles,
        )
        if warp < 4:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            if warp == 0:
                self.load(gmem, smem, pipes, work, tma_q, tma_k, tma_v)
            if warp == 1:
                self.load_scales(gmem, smem, pipes, work)
        else:
            cute.arch.setmaxregister_increase(self.consumer_registers)
            self.consume(tidx - 128, gmem, smem, pipes, work, scale_log2, mma_qk, mma_pv)

    def pipe(self, barriers, num_stages: int, producers: int, tx_bytes: int):
        """A TMA pipeline whose consumers are all consumer warps."""
        group = partial(pipeline.CooperativeGroup, pipeline.Agent.Thread)
        return pipeline.PipelineTmaAsync.create(
            barrier_storage=barriers.data_ptr(),
            num_stages=num_stages,
            producer_group=group(producers),
            consumer_group=group(4 * self.config.num_consumer_wgs),
            tx_count=tx_bytes,
            cta_layout_vmnk=cute.make_layout((1, 1, 1, 1)),
            defer_sync=True,
        )

    def tile(self, index, work):
        """Coordinates and key blocks of a tile."""
        c, causal = self.config, self.problem.is_causal
        coord = tile_coord(
            index,
            work.num_m_blocks,
            work.num_heads,
            work.batch,
            causal=causal,
            longest_first=c.longest_first,
        )
        keys = key_range(
            coord.m_block,
            work.seqlen_q,
            work.seqlen_k,
            tile_m=c.tile_m,
            tile_n=c.tile_n,
            causal=causal,
        )
        return coord, keys

    def tiles(self, work):
        """Bounds of this CTA's loop over tiles."""
        first, step = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        if const_expr(self.config.persistent):
            return first, work.num_tiles, step
        return first, first + 1, 1

    @cute.jit
    def load(self, gmem, smem, pipes, work, tma_q, tma_k, tma_v):
        """Warp 0: the tiles of Q, K and V^T."""
        c, d = self.config, self.head_dim
        q_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, 1)
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, c.num_stages)
        first, last, step = self.tiles(work)
        for index in cutlass.range(first, last, step, unroll=1):
            coord, keys = self.tile(index, work)
            kv_head = coord.head // work.group
            gQ = cute.local_tile(
                gmem.q[None, None, coord.head, coord.batch], (c.tile_m, d), (coord.m_block, 0)
            )
            gK = cute.local_tile(gmem.k[None, None, kv_head, coord.batch], (c.tile_n, d), (None, 0))
            gV = cute.local_tile(gmem.v[None, None, kv_head, coord.batch], (d, c.tile_n), (0, None))
            sQ, tQ = _partition(tma_q, smem.q, gQ)
            sK, tK = _partition(tma_k, smem.k, gK)
            sV, tV = _partition(tma_v, smem.v, gV)
            if keys.num_blocks > 0:
                pipes.q.producer_acquire(q_state)
                cute.copy(tma_q, tQ, sQ, tma_bar_ptr=pipes.q.producer_get_barrier(q_state))
                q_state.advance()
            for i in cutlass.range(keys.num_blocks, unroll=1):
                j = keys.num_blocks - 1 - i
                pipes.k.producer_acquire(state)
                bar = pipes.k.producer_get_barrier(state)
                cute.copy(tma_k, tK[None, j], sK[None, state.index], tma_bar_ptr=bar)
                pipes.v.producer_acquire(state)
                bar = pipes.v.producer_get_barrier(state)
                cute.copy(tma_v, tV[None, j], sV[None, state.index], tma_bar_ptr=bar)
                state.advance()

    @cute.jit
    def load_scales(self, gmem, smem, pipes, work):
        """Warp 1: the scales of each key block, two keys a lane at a time."""
        c = self.config
        lane = cute.arch.lane_idx()
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, c.num_stages)
        first, last, step = self.tiles(work)
        for index in cutlass.range(first, last, step, unroll=1):
            coord, keys = self.tile(index, work)
            kv_head = coord.head // work.group
            gK = gmem.k_scale[coord.batch, kv_head, None]
            gV = gmem.v_scale[coord.batch, kv_head, None]
            for i in cutlass.range(keys.num_blocks, unroll=1):
                j = keys.num_blocks - 1 - i
                pipes.k.sync_object_empty.wait(state.index, state.phase)
                k_max = Float32(0.0)
                for t in cutlass.range_constexpr(cute.ceil_div(c.tile_n, 64)):
                    pair = lane + 32 * t
                    if pair < c.tile_n // 2:
                        key = j * c.tile_n + 2 * pair
                        four = self.fetch_scales(gK, gV, key, work.seqlen_k)
                        cute.autovec_copy(four, smem.keys[None, pair, state.index])
                        k_max = cute.arch.fmax(k_max, cute.arch.fmax(four[0], four[1]))
                for shift in cutlass.range_constexpr(5):
                    other = cute.arch.shuffle_sync_bfly(k_max, 1 << shift)
                    k_max = cute.arch.fmax(k_max, other)
                if lane == 0:
                    block = cute.make_rmem_tensor(4, Float32)
                    block[0] = block[2] = k_max if const_expr(self.k_per_token) else gK[j]
                    block[1] = Float32(1.0) if const_expr(self.v_per_token) else gV[j]
                    block[3] = Float32(0.0)
                    cute.autovec_copy(block, smem.tile[None, state.index])
                cute.arch.sync_warp()
                if lane == 0:
                    cute.arch.mbarrier_arrive(pipes.k.producer_get_barrier(state))
                state.advance()

    @cute.jit
    def fetch_scales(self, gK, gV, key, seqlen_k):
        """(k, k, v, v) of two keys; 0 past the end and for what is not per token."""
        four = cute.make_rmem_tensor(4, Float32)
        for c in cutlass.range_constexpr(2):
            k, v = Float32(0.0), Float32(0.0)
            if key + c < seqlen_k:
                if const_expr(self.k_per_token):
                    k = gK[key + c]
                if const_expr(self.v_per_token):
                    v = gV[key + c]
            four[c], four[2 + c] = k, v
        return four

    @cute.jit
    def consume(self, tidx, gmem, smem, pipes, work, scale_log2, mma_qk, mma_pv):
        """A consumer warpgroup: its 64 rows of each tile."""
        c = self.config
        wg = cute.arch.make_warp_uniform(tidx // 128)
        ops = self.operands(tidx, wg, smem, mma_qk, mma_pv)
        q_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, 1)
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, c.num_stages)
        if const_expr(c.pingpong):  # noqa: SIM102
            if wg == c.num_consumer_wgs - 1:
                cute.arch.barrier_arrive(barrier_id=PINGPONG_BARRIER, number_of_threads=256)
        first, last, step = self.tiles(work)
        for index in cutlass.range(first, last, step, unroll=1):
            coord, keys = self.tile(index, work)
            rows, visible = self.start_rows(ops, gmem, work, coord, scale_log2)
            acc = FwdAccumulators(
                o=cute.make_rmem_tensor(self.head_dim // 2, Float32),
                s=[cute.make_rmem_tensor(ops.s_shape, Int32) for _ in range(c.qk_slices)],
                pv=cute.make_rmem_tensor(ops.pv_shape, Int32),
            )
            acc.o.fill(0.0)
            if keys.num_blocks > 0:
                pipes.q.consumer_wait(q_state)
                self.limit_rows(ops, rows)
                j = keys.num_blocks - 1
                states = FwdStates(state, state)
                self.step(ops, pipes, rows, acc, states, wg, visible, j, True, True)
                for i in cutlass.range(1, keys.num_exact, unroll=1):
                    before = state.clone()
                    state.advance()
                    states = FwdStates(before, state)
                    j = keys.num_blocks - 1 - i
                    self.step(ops, pipes, rows, acc, states, wg, visible, j, False, True)
                for _ in cutlass.range(keys.num_exact, keys.num_blocks, unroll=1):
                    before = state.clone()
                    state.advance()
                    states = FwdStates(before, state)
                    self.step(ops, pipes, rows, acc, states, wg, None, 0, False, False)
                self.last_product(ops, pipes, rows, acc, state)
                state.advance()
                pipes.q.consumer_release(q_state)
                q_state.advance()
            again = ptx.opaque(index) if const_expr(c.persistent) else ptx.block_index()
            self.store(again, gmem, work, rows, acc.o, mma_qk)

    @cute.jit
    def start_rows(self, ops, gmem, work, coord, scale_log2):
        """State of the rows, and how many keys (less the thread's first column) each one sees."""
        causal = self.problem.is_causal
        q_scale = cute.make_rmem_tensor(2, Float32)
        q_scale.fill(0.0)
        visible = []
        for r in cutlass.range_constexpr(2):
            row = coord.m_block * self.config.tile_m + ops.first[0] + 8 * r
            if row < work.seqlen_q:
                group = row // self.problem.block_q
                q_scale[r] = gmem.q_scale[coord.batch, coord.head, group] * scale_log2
            limit = visible_keys(row, work.seqlen_q, work.seqlen_k, causal=causal)
            visible.append(limit - ops.first[1])
        return softmax.make_rows(q_scale), visible

    def limit_rows(self, ops, rows):
        """Bounds the rows' scores by the sums of their codes, which the quad adds up together."""
        quarter = self.head_dim // 16
        for r in range(2):
            words = [ops.q32[ops.first[0] + 8 * r, ops.quad * quarter + w] for w in range(quarter)]
            softmax.limit_row(rows, r, words)

    @cute.jit
    def store(self, index, gmem, work, rows, acc_O, mma_qk):
        """Output of a tile. Coordinates are made again: the main loop has no registers for them."""
        c = self.config
        coord, _ = self.tile(index, work)
        identity = cute.make_identity_tensor((c.tile_m, c.tile_n))
        coords = mma_qk.get_slice(ptx.thread_index() - 128).partition_C(identity)
        gO = cute.local_tile(
            gmem.out[coord.batch, coord.head, None, None],
            (c.tile_m, self.head_dim),
            (coord.m_block, 0),
        )
        gLSE = cute.local_tile(
            gmem.lse[coord.batch, coord.head, None], (c.tile_m,), (coord.m_block,)
        )
        left = work.seqlen_q - coord.m_block * c.tile_m
        epilogue.store_output(acc_O, rows, gO, gLSE, coords[0], left, self.dtype)

    def operands(self, tidx, wg, smem, mma_qk, mma_pv):
        """Fragments of the two products, and where the thread's elements lie."""
        c, d = self.config, self.head_dim
        slot = cute.make_layout(c.num_consumer_wgs, stride=128)(wg)
        qk, pv = mma_qk.get_slice(slot), mma_pv.get_slice(slot)
        n = c.tile_n // c.qk_slices
        k_slices = [
            cute.local_tile(smem.k, (n, d, c.num_stages), (s, 0, 0)) for s in range(c.qk_slices)
        ]
        v_slices = [
            cute.local_tile(smem.v, (self.slice_n, c.tile_n, c.num_stages), (s, 0, 0))
            for s in range(c.pv_slices)
        ]
        p = mma_pv.make_fragment_A(mma_pv.partition_shape_A((c.tile_m, c.tile_n)))
        coords = mma_qk.get_slice(tidx).partition_C(cute.make_identity_tensor((c.tile_m, n)))
        return FwdOperands(
            mma_qk=mma_qk,
            mma_pv=mma_pv,
            q=mma_qk.make_fragment_A(qk.partition_A(smem.q)),
            k=[mma_qk.make_fragment_B(qk.partition_B(s)) for s in k_slices],
            v=[mma_pv.make_fragment_B(pv.partition_B(s)) for s in v_slices],
            p=p,
            p32=cute.recast_tensor(p, Int32),
            q32=cute.recast_tensor(smem.q, Int32),
            s_shape=mma_qk.partition_shape_C((c.tile_m, n)),
            pv_shape=mma_pv.partition_shape_C((c.tile_m, self.slice_n)),
            first=coords[0],
            keys=smem.keys,
            tile=smem.tile,
            quad=tidx % 4,
        )

    @cute.jit
    def step(
        self,
        ops,
        pipes,
        rows,
        acc,
        states,
        wg,
        visible,
        j,
        first: cutlass.Constexpr[bool],
        exact: cutlass.Constexpr[bool],
    ):
        """From the probabilities of the block before to those of this one."""
        c, now = self.config, states.now
        k_arrived = pipes.k.consumer_try_wait(now)
        if const_expr(not first):
            v_arrived = pipes.v.consumer_try_wait(states.before)
        for n in cutlass.range_constexpr(c.qk_slices):
            if const_expr(not first):
                self.encode_slice(ops, rows, acc, n)
            if const_expr(n == 0):
                pipes.k.consumer_wait(now, k_arrived)
                if const_expr(c.pingpong):
                    cute.arch.barrier(barrier_id=PINGPONG_BARRIER + wg, number_of_threads=256)
            if const_expr(not first and n == c.qk_slices - 1):
                pipes.v.consumer_wait(states.before, v_arrived)
            if const_expr(c.overlap or first):
                self.issue_scores(ops, acc, n, now)
        if const_expr(not first):
            if const_expr(c.overlap):
                self.issue_product(ops, acc, 0, states.before, fence=False)
            else:
                self.product(ops, pipes, rows, acc, states.before)
                for n in cutlass.range_constexpr(c.qk_slices):
                    self.issue_scores(ops, acc, n, now)
        if const_expr(c.pingpong):
            other = (wg + 1) % c.num_consumer_wgs
            cute.arch.barrier_arrive(barrier_id=PINGPONG_BARRIER + other, number_of_threads=256)

        folding = const_expr(c.overlap and not first)
        block = self.block_scales(ops, now)
        factors = softmax.block_factors(rows, block, self.k_per_token)
        left = None
        if const_expr(exact):
            warpgroup.wait_group(1 if folding else 0)
            left = [visible[r] - j * c.tile_n for r in range(2)]
            columns = partial(self.key_scales, ops, now.index)
            softmax.exact_scores(acc.s, rows, acc.o, columns, factors, left)
        else:
            rare = softmax.may_exceed(rows, block.k_max)
            # Not in the branch: ptxas would serialize all products.
            warpgroup.wait_group(1 if folding else 0)
            if not const_expr(c.lazy_rescale) or rare:
                # another address, so that the branch keeps no scales alive for the common path
                columns = partial(self.key_scales, ops, ptx.opaque(now.index))
                softmax.keep_in_range(acc.s, rows, acc.o, columns, factors, block.k_factor)
        self.score_block(ops, pipes, rows, acc, states, factors, left, folding)
        pipes.k.consumer_release(now)
        softmax.block_levels(acc.s, rows, self.problem.p_max, block.v_block)

    @cute.jit
    def score_block(
        self, ops, pipes, rows, acc, states, factors, left, folding: cutlass.Constexpr[bool]
    ):
        """Probabilities of a block, while P V of the block before is folded."""
        c = self.config
        num_groups = const_expr(c.tile_n // 8)
        splits = _split_points(num_groups, c.split_groups) if left is None else ()
        spans = fold_spans(num_groups, c.fold_after, c.pv_slices) if folding else []
        sums = [Float32(0.0)] * 2
        for g, acc_s, local in softmax.groups_of(acc.s):
            if const_expr(g in splits):  # noqa: SIM102
                # never taken, see FwdTileConfig.split_groups; each another, or one would remain
                if cute.arch.grid_dim()[1] == 2 + g:
                    ptx.trap()
            self.start_folds(ops, pipes, rows, acc, states, spans, g)
            both = self.key_scales(ops, states.now.index, g)
            k, v = (both, both[2:]) if both is not None else (None, None)
            softmax.probabilities(
                acc_s,
                g,
                local,
                rows,
                k if self.k_per_token else None,
                v if self.v_per_token else None,
                factors,
                left,
                sums,
                g % 8 < c.exp_fma_of_8,
            )
            for n, (wait, stop) in enumerate(spans):
                if const_expr(wait <= g < stop):
                    part = _share(self.slice_n // 8, g - wait, stop - wait)
                    fold.fold(acc.o, acc.pv, rows, part, n * self.slice_n // 8)
        self.start_folds(ops, pipes, rows, acc, states, spans, num_groups)
        if const_expr(num_groups in splits):  # noqa: SIM102
            if cute.arch.grid_dim()[1] == 2 + num_groups:
                ptx.trap()
        for r in cutlass.range_constexpr(2):
            rows.l[r] = rows.l[r] + sums[r]

    def start_folds(self, ops, pipes, rows, acc, states, spans, g):
        """Before column group g: waits for the slice of P V to be folded now, starts the next."""
        for n, (wait, stop) in enumerate(spans):
            if g == wait:
                warpgroup.wait_group(0)
                if n == 0:
                    fold.begin_fold(rows)
                if n == len(spans) - 1:
                    pipes.v.consumer_release(states.before)
                if wait == stop:
                    fold.fold(acc.o, acc.pv, rows, range(self.slice_n // 8), n * self.slice_n // 8)
            if g == stop and n + 1 < len(spans):
                self.issue_product(ops, acc, n + 1, states.before)

    def encode_slice(self, ops, rows, acc, n):
        """Codes of a slice of P', packed; its registers are free then."""
        softmax.encode(acc.s[n], rows.level)
        softmax.pack(acc.s[n], ops.p32, n * self.config.tile_n // 8 // self.config.qk_slices)

    def issue_scores(self, ops, acc, n, state):
        """Starts column slice n of Q K^T."""
        k = ops.k[n][None, None, None, state.index]
        int8_sm90.issue(ops.mma_qk, acc.s[n], self.head_dim // 32, ops.q, k)

    def issue_product(self, ops, acc, n, state, fence=True):
        """Starts column slice n of P V."""
        v = ops.v[n][None, None, None, state.index]
        int8_sm90.issue(ops.mma_pv, acc.pv, self.config.tile_n // 32, ops.p, v, fence)

    def product(self, ops, pipes, rows, acc, state):
        """P V of the block whose P was just packed, slice after slice, folded at once."""
        fold.begin_fold(rows)
        groups = self.slice_n // 8
        for n in range(self.config.pv_slices):
            self.issue_product(ops, acc, n, state)
            warpgroup.wait_group(0)
            fold.fold(acc.o, acc.pv, rows, range(groups), n * groups)
        pipes.v.consumer_release(state)

    def last_product(self, ops, pipes, rows, acc, state):
        """P V of block 0."""
        for n in range(self.config.qk_slices):
            self.encode_slice(ops, rows, acc, n)
        pipes.v.consumer_wait(state)
        self.product(ops, pipes, rows, acc, state)

    def key_scales(self, ops, stage, g):
        """(k, k, v, v) of the thread's two keys of column group g."""
        if const_expr(not (self.k_per_token or self.v_per_token)):
            return None
        four = cute.make_rmem_tensor(4, Float32)
        cute.autovec_copy(ops.keys[None, 4 * g + ops.quad, stage], four)
        return [four[i] for i in range(4)]

    def block_scales(self, ops, state):
        """Scales of the whole key block."""
        four = cute.make_rmem_tensor(4, Float32)
        cute.autovec_copy(ops.tile[None, state.index], four)
        k_factor = Float32(1.0) if const_expr(not self.k_per_token) else four[2]
        return BlockScales(k_block=four[0], v_block=four[1], k_max=four[2], k_factor=k_factor)


_DTYPES = {"bfloat16": BFloat16, "float16": Float16}


def _rows_first(t):
    """(batch, heads, rows, columns) as (rows, columns, heads, batch)."""
    return cute.make_tensor(t.iterator, cute.select(t.layout, mode=[2, 3, 1, 0]))


def _partition(tma, smem, gmem):
    """Shared and global side of a TMA copy of whole tiles."""
    return cpasync.tma_partition(
        tma, 0, cute.make_layout(1), cute.group_modes(smem, 0, 2), cute.group_modes(gmem, 0, 2)
    )


def fold_spans(num_groups: int, fold_after: int, slices: int) -> list[tuple[int, int]]:
    """Column groups of the scores (first, past the last) during which each slice of P V is folded.

    A slice is waited for at the first; the next slice starts at the end and has as many groups'
    time to finish.
    """
    first = fold_after * num_groups // 16
    span = (num_groups - first) / (2 * slices - 1)
    return [(first + round(2 * n * span), first + round((2 * n + 1) * span)) for n in range(slices)]


def _split_points(num_groups: int, every: int) -> tuple[int, ...]:
    """Column groups before which a branch keeps instructions apart, the end included."""
    return (*range(every, num_groups, every), num_groups) if every else ()


def _share(total, index, parts):
    """The index-th of ``parts`` nearly equal ranges that make up range(total)."""
    return range(total * index // parts, total * (index + 1) // parts)
