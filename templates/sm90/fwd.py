"""INT8 attention forward for Hopper."""

from functools import partial
from types import SimpleNamespace

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int8, Int32, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup

from sage_cute.config import ARCHS, AttnProblem, FwdTileConfig, Status, supports_fwd
from sage_cute.config.constraints import PRODUCER_REGISTERS, consumer_registers
from sage_cute.templates.base import AttnTemplate
from sage_cute.templates.blocks import epilogue, fold, loading, ptx, seqlen, softmax
from sage_cute.templates.blocks.magic import MAGIC_BITS
from sage_cute.templates.blocks.scheduler import tile_coord
from sage_cute.templates.mma import int8_sm90, wgmma
from sage_cute.templates.params import (
    BlockScales,
    FwdAccumulators,
    FwdMask,
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
        q_scale           float32 (batch, heads, tokens or blocks)
        k_scale           float32 (batch, kv_heads, blocks)
        v_scale           float32 (batch, kv_heads, padded tokens or blocks)
        out, lse          (batch, heads, seqlen_q, head_dim), head_dim contiguous; float32
                          (batch, heads, seqlen_q): natural log, of the K that was quantized
        of a packed batch: tensors of batch 1 with all tokens; where a sequence's tokens, scales and
        columns of V^T start, and which keys its queries see, is in blocks.seqlen. Rows that TMA
        brings from behind a sequence are masked, and not stored

    Roles
        warp 0            TMA: Q once a tile, K and V^T a stage each per key block
        warp 1            scales of a key block into the stage of its K
        warps 2, 3        nothing (they complete the warpgroup that gives up its registers)
        warps 4 ...       consumer warpgroups, 64 queries each

    Pipelines (producer -> consumer; arrivals on full, on empty)
        Q    warp 0 -> consumers, 1 stage          1 + bytes, one a consumer warp
        K    warps 0 and 1 -> consumers            2 + bytes, one a consumer warp
        V    warp 0 -> consumers                   1 + bytes, one a consumer warp

    Shared memory (dim: head_dim rounded up to 32, where TMA leaves zeros)
        sQ (tile_m, dim), sK (tile_n, dim, stages), sV (dim, tile_n, stages) int8, swizzled; sKeys
        (tile_n / 8, 4, stages) half2: v_scale of the keys that a thread of place q in its quad has
        in a column group, as p_max * v / (largest v of the block); sTile (4, stages): k of the
        block, its largest v, whether its v are flat; barriers.

    A consumer's iteration on block j (blocks run from the last to 0), with ``overlap``: issue
    S = Q K^T of block j and P V of block j + 1 -> wait for both -> one stretch of instructions that
    the compiler mixes at will: probabilities, their codes (the next A operand) and the fold of
    P V into O. What overlaps the products are the other warpgroups. The first iteration multiplies
    a P of zeros. Without ``overlap``: S -> wait -> codes -> P V in slices, each waited for and
    folded. A warpgroup takes the exact path (softmax.py) for blocks that its rows do not see whole
    and for those whose V scales are not flat. With a window blocks run down to the first one that
    the tile's first row sees.
    """

    family = "sm90"
    direction = "fwd"
    roles = ("tma", "scales", "consumer")

    def __init__(self, problem: AttnProblem, config: FwdTileConfig) -> None:
        """Static facts only; ask ``supports`` first."""
        self.problem, self.config = problem, config
        self.dim, self.dtype = problem.padded_dim, wgmma.DTYPES[problem.dtype]
        self.v_per_token = problem.v_scale == "per_token"
        self.exact_p = self.v_per_token and problem.p_scale == "per_block"
        self.slice_n = self.dim // config.pv_slices
        self.threads = 128 * (1 + config.num_consumer_wgs)
        self.consumer_registers = consumer_registers(config.num_consumer_wgs, ARCH)

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
        left: Int32 | None,
        right: Int32 | None,
        key_lengths: cute.Tensor | None,
        cu_q: cute.Tensor | None,
        cu_k: cute.Tensor | None,
        max_q: Int32 | None,
        stream: cuda.CUstream,
    ):
        """Launches the kernel; ``num_ctas`` bounds the grid of a persistent one."""
        bounds = seqlen.Bounds(left, right, key_lengths, cu_q, cu_k)
        c = self.config
        mQ, mK, mV = [loading.rows_first(t) for t in (q_codes, k_codes, v_t)]
        mma_qk = int8_sm90.tiled_mma(c.num_consumer_wgs, c.tile_n, a_in_registers=False)
        mma_pv = int8_sm90.tiled_mma(c.num_consumer_wgs, self.slice_n, a_in_registers=True)
        layouts = SimpleNamespace(
            q=wgmma.smem_layout(Int8, self.dim, (c.tile_m, self.dim)),
            k=wgmma.smem_layout(Int8, self.dim, (c.tile_n, self.dim, c.num_stages)),
            v=wgmma.smem_layout(Int8, c.tile_n, (self.dim, c.tile_n, c.num_stages)),
        )
        tma_q = loading.tma(mQ, layouts.q, (c.tile_m, self.dim))
        tma_k = loading.tma(mK, layouts.k, (c.tile_n, self.dim))
        tma_v = loading.tma(mV, layouts.v, (self.dim, c.tile_n))

        @cute.struct
        class Storage:
            q_barriers: cute.struct.MemRange[cutlass.Int64, 2]
            k_barriers: cute.struct.MemRange[cutlass.Int64, c.num_stages * 2]
            v_barriers: cute.struct.MemRange[cutlass.Int64, c.num_stages * 2]
            keys: cute.struct.Align[cute.struct.MemRange[Int32, c.num_stages * c.tile_n // 2], 128]
            tile: cute.struct.Align[cute.struct.MemRange[Float32, c.num_stages * 4], 128]
            q: cute.struct.Align[cute.struct.MemRange[Int8, cute.cosize(layouts.q)], 1024]
            k: cute.struct.Align[cute.struct.MemRange[Int8, cute.cosize(layouts.k)], 1024]
            v: cute.struct.Align[cute.struct.MemRange[Int8, cute.cosize(layouts.v)], 1024]

        self.Storage = Storage
        rows = mQ.shape[0] if const_expr(max_q is None) else max_q
        num_m_blocks = cute.ceil_div(rows, c.tile_m)
        num_tiles = num_m_blocks * mQ.shape[2] * seqlen.num_sequences(bounds, mQ)
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
            bounds,
            max_q,
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
        bounds: seqlen.Bounds,
        max_q: Int32 | None,
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
        pipe = partial(loading.pipe, consumers=4 * c.num_consumer_wgs)
        k_bytes = c.tile_n * self.dim
        pipes = FwdPipes(
            q=pipe(storage.q_barriers, 1, 1, tx_bytes=c.tile_m * self.dim),
            k=pipe(storage.k_barriers, c.num_stages, 2, tx_bytes=k_bytes),
            v=pipe(storage.v_barriers, c.num_stages, 1, tx_bytes=k_bytes),
        )
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        smem = FwdShared(
            q=storage.q.get_tensor(q_layout.outer, swizzle=q_layout.inner),
            k=storage.k.get_tensor(k_layout.outer, swizzle=k_layout.inner),
            v=storage.v.get_tensor(v_layout.outer, swizzle=v_layout.inner),
            keys=storage.keys.get_tensor(cute.make_layout((c.tile_n // 8, 4, c.num_stages))),
            tile=storage.tile.get_tensor(cute.make_layout((4, c.num_stages))),
        )
        gmem = FwdTensors(
            q=mQ, k=mK, v=mV, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, out=out, lse=lse
        )
        work = FwdWork(
            seqlen_q=mQ.shape[0],
            seqlen_k=mK.shape[0],
            num_heads=mQ.shape[2],
            batch=seqlen.num_sequences(bounds, mQ),
            group=mQ.shape[2] // mK.shape[2],
            num_m_blocks=cute.ceil_div(
                mQ.shape[0] if const_expr(max_q is None) else max_q, c.tile_m
            ),
            num_tiles=num_tiles,
            bounds=bounds,
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

    def tile(self, index, work):
        """Coordinates of a tile, its sequence, and the key blocks that it sees."""
        c, causal = self.config, self.problem.is_causal
        coord = tile_coord(
            index,
            work.num_m_blocks,
            work.num_heads,
            work.batch,
            causal=causal,
            longest_first=c.longest_first,
        )
        lengths = self.problem.lengths
        seq = seqlen.sequence(
            lengths, causal, work.bounds, coord.batch, work.seqlen_q, work.seqlen_k
        )
        blocks = seqlen.key_blocks(coord.m_block, c.tile_m, seq, c.tile_n)
        return coord, seq, blocks

    def tiles(self, work):
        """Bounds of this CTA's loop over tiles."""
        first, step = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        if const_expr(self.config.persistent):
            return first, work.num_tiles, step
        return first, first + 1, 1

    @cute.jit
    def load(self, gmem, smem, pipes, work, tma_q, tma_k, tma_v):
        """Warp 0: the tiles of Q, K and V^T."""
        c, d = self.config, self.dim
        q_state = loading.producer_state(1)
        state = loading.producer_state(c.num_stages)
        first, last, step = self.tiles(work)
        for index in cutlass.range(first, last, step, unroll=1):
            coord, seq, blocks = self.tile(index, work)
            kv_head = coord.head // work.group
            rQ = seqlen.rows_from(gmem.q, coord.head, seq.batch, seq.first_q)
            rK = seqlen.rows_from(gmem.k, kv_head, seq.batch, seq.first_k)
            rV = seqlen.from_column(gmem.v[None, None, kv_head, seq.batch], seqlen.padded_k(seq))
            gQ = cute.local_tile(rQ, (c.tile_m, d), (coord.m_block, 0))
            gK = cute.local_tile(rK, (c.tile_n, d), (None, 0))
            gV = cute.local_tile(rV, (d, c.tile_n), (0, None))
            sQ, tQ = loading.partition(tma_q, smem.q, gQ)
            sK, tK = loading.partition(tma_k, smem.k, gK)
            sV, tV = loading.partition(tma_v, smem.v, gV)
            if blocks.count > 0:
                pipes.q.producer_acquire(q_state)
                cute.copy(tma_q, tQ, sQ, tma_bar_ptr=pipes.q.producer_get_barrier(q_state))
                q_state.advance()
            for i in cutlass.range(blocks.count, unroll=1):
                j = seqlen.block_of(blocks, i)
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
        rounds = const_expr(cute.ceil_div(c.tile_n, 64))
        state = loading.producer_state(c.num_stages)
        first, last, step = self.tiles(work)
        for index in cutlass.range(first, last, step, unroll=1):
            coord, seq, blocks = self.tile(index, work)
            kv_head = coord.head // work.group
            first = seqlen.group_k(seq, self.problem.block_k)
            gK = seqlen.from_index(gmem.k_scale[seq.batch, kv_head, None], first)
            first = seqlen.padded_k(seq) if const_expr(self.v_per_token) else first
            gV = seqlen.from_index(gmem.v_scale[seq.batch, kv_head, None], first)
            for i in cutlass.range(blocks.count, unroll=1):
                j = seqlen.block_of(blocks, i)
                block = cute.make_rmem_tensor(4, Float32)
                v = cute.make_rmem_tensor(2 * rounds, Float32)
                block[0] = gK[j]
                block[2], block[3] = Float32(1.0), Float32(0.0)
                if const_expr(self.v_per_token):
                    v.fill(0.0)
                    for t in cutlass.range_constexpr(2 * rounds):
                        key = j * c.tile_n + 2 * (lane + 32 * (t // 2)) + t % 2
                        if key < cutlass.min((j + 1) * c.tile_n, seq.keys):
                            v[t] = gV[key]
                    block[1] = cute.arch.warp_reduction_max(_largest(v))
                    flat = cutlass.Boolean(True)
                    for t in cutlass.range_constexpr(2 * rounds):
                        outside = lane + 32 * (t // 2) >= c.tile_n // 2
                        flat = flat & ((v[t] >= softmax.FLAT * block[1]) | outside)
                    block[2] = ptx.select(cute.arch.vote_all_sync(flat), Float32(1.0), Float32(0.0))
                else:
                    block[1] = gV[j]
                pipes.k.sync_object_empty.wait(state.index, state.phase)
                if const_expr(self.v_per_token):
                    unit = ptx.select(block[1] > 0.0, self.problem.p_max / block[1], Float32(0.0))
                    for t in cutlass.range_constexpr(rounds):
                        pair = lane + 32 * t
                        if pair < c.tile_n // 2:
                            word = ptx.pack_halves(v[2 * t] * unit, v[2 * t + 1] * unit)
                            smem.keys[pair // 4, pair % 4, state.index] = word
                if lane == 0:
                    cute.autovec_copy(block, smem.tile[None, state.index])
                cute.arch.sync_warp()
                if lane == 0:
                    cute.arch.mbarrier_arrive(pipes.k.producer_get_barrier(state))
                state.advance()

    @cute.jit
    def consume(self, tidx, gmem, smem, pipes, work, scale_log2, mma_qk, mma_pv):
        """A consumer warpgroup: its 64 rows of each tile."""
        c = self.config
        wg = cute.arch.make_warp_uniform(tidx // 128)
        ops = self.operands(tidx, wg, smem, mma_qk, mma_pv)
        q_state = loading.consumer_state(1)
        state = loading.consumer_state(c.num_stages)
        before = state.clone()
        if const_expr(c.pingpong):  # noqa: SIM102
            if wg == c.num_consumer_wgs - 1:
                cute.arch.barrier_arrive(barrier_id=PINGPONG_BARRIER, number_of_threads=256)
        first, last, step = self.tiles(work)
        for index in cutlass.range(first, last, step, unroll=1):
            coord, seq, blocks = self.tile(index, work)
            rows, mask = self.start_rows(ops, gmem, seq, coord, wg, scale_log2)
            acc = FwdAccumulators(
                o=cute.make_rmem_tensor(self.dim // 2, Float32),
                s=cute.make_rmem_tensor(ops.s_shape, Int32),
                pv=cute.make_rmem_tensor(ops.pv_shape, Int32),
            )
            acc.o.fill(0.0)
            _clear(ops.p32)
            if blocks.count > 0:
                pipes.q.consumer_wait(q_state)
                for i in cutlass.range(blocks.count, unroll=1):
                    states = FwdStates(before, state)
                    self.step(
                        ops, pipes, rows, acc, states, wg, mask, i, seqlen.block_of(blocks, i)
                    )
                    before = state.clone()
                    state.advance()
                if const_expr(c.overlap):
                    pipes.v.consumer_wait(before)
                    self.product(ops, pipes, rows, acc, before)
                pipes.q.consumer_release(q_state)
                q_state.advance()
            again = index if const_expr(c.persistent) else ptx.block_index()
            self.store(again, gmem, work, rows, acc.o, mma_qk)

    @cute.jit
    def start_rows(self, ops, gmem, seq: cutlass.Constexpr, coord, wg, scale_log2):
        """State of the thread's rows, and what they see."""
        block_q = const_expr(self.problem.block_q)
        q_scale = cute.make_rmem_tensor(2, Float32)
        q_scale.fill(0.0)
        first, end = [], []
        first_row = coord.m_block * self.config.tile_m
        first_group = seqlen.group_q(seq, block_q)
        for r in cutlass.range_constexpr(2):
            row = first_row + ops.first[0] + 8 * r
            if row < seq.seqlen_q:
                group = seqlen.behind(first_group, row // block_q)
                q_scale[r] = gmem.q_scale[seq.batch, coord.head, group] * scale_log2
            end.append(seqlen.key_end(row, seq) - ops.first[1])
            if const_expr(seq.left is not None):
                first.append(seqlen.key_start(row, seq) - ops.first[1])
        whole = seqlen.whole_blocks(first_row + 64 * wg, 64, seq, self.config.tile_n)
        count = whole.count
        if scale_log2 < 0.0:  # the largest integer score is not the largest score
            count = Int32(0)
        first = first if const_expr(seq.left is not None) else None
        return softmax.make_rows(q_scale), FwdMask(first, end, whole._replace(count=count))

    @cute.jit
    def store(self, index, gmem, work, rows, acc_O, mma_qk):
        """Output of a tile. Coordinates are made again: the main loop has no registers for them."""
        c = self.config
        coord, seq, _ = self.tile(index, work)
        identity = cute.make_identity_tensor((c.tile_m, c.tile_n))
        coords = mma_qk.get_slice(ptx.thread_index() - 128).partition_C(identity)
        mO = seqlen.from_row(gmem.out[seq.batch, coord.head, None, None], seq.first_q)
        mLSE = seqlen.from_index(gmem.lse[seq.batch, coord.head, None], seq.first_q)
        gO = cute.local_tile(mO, (c.tile_m, self.problem.head_dim), (coord.m_block, 0))
        gLSE = cute.local_tile(mLSE, (c.tile_m,), (coord.m_block,))
        left = seq.seqlen_q - coord.m_block * c.tile_m
        epilogue.store_output(acc_O, rows, gO, gLSE, coords[0], left, self.dtype)

    def operands(self, tidx, wg, smem, mma_qk, mma_pv):
        """Fragments of the two products, and where the thread's elements lie."""
        c = self.config
        slot = cute.make_layout(c.num_consumer_wgs, stride=128)(wg)
        qk, pv = mma_qk.get_slice(slot), mma_pv.get_slice(slot)
        v_slices = [
            cute.local_tile(smem.v, (self.slice_n, c.tile_n, c.num_stages), (s, 0, 0))
            for s in range(c.pv_slices)
        ]
        p = mma_pv.make_fragment_A(mma_pv.partition_shape_A((c.tile_m, c.tile_n)))
        coords = mma_qk.get_slice(tidx).partition_C(cute.make_identity_tensor((c.tile_m, c.tile_n)))
        return FwdOperands(
            mma_qk=mma_qk,
            mma_pv=mma_pv,
            q=mma_qk.make_fragment_A(qk.partition_A(smem.q)),
            k=mma_qk.make_fragment_B(qk.partition_B(smem.k)),
            v=[mma_pv.make_fragment_B(pv.partition_B(s)) for s in v_slices],
            p=p,
            p32=cute.recast_tensor(p, Int32),
            s_shape=mma_qk.partition_shape_C((c.tile_m, c.tile_n)),
            pv_shape=mma_pv.partition_shape_C((c.tile_m, self.slice_n)),
            first=coords[0],
            keys=smem.keys,
            tile=smem.tile,
            quad=tidx % 4,
        )

    @cute.jit
    def step(self, ops, pipes, rows, acc, states, wg, mask, i, j):
        """The i-th block of a tile, block j of the keys."""
        c, now = self.config, states.now
        k_arrived = pipes.k.consumer_try_wait(now)
        if const_expr(c.overlap):  # noqa: SIM102
            if i > 0:
                pipes.v.consumer_wait(states.before)
        pipes.k.consumer_wait(now, k_arrived)
        if const_expr(c.pingpong):
            cute.arch.barrier(barrier_id=PINGPONG_BARRIER + wg, number_of_threads=256)
        k = ops.k[None, None, None, now.index]
        wgmma.issue(ops.mma_qk, acc.s, self.dim // 32, ops.q, k)
        if const_expr(c.overlap):
            self.issue_product(ops, acc, 0, states.before, fence=False)
        if const_expr(c.pingpong):
            other = (wg + 1) % c.num_consumer_wgs
            cute.arch.barrier_arrive(barrier_id=PINGPONG_BARRIER + other, number_of_threads=256)
        block = self.block_scales(ops, now)
        if const_expr(c.overlap):
            # Its branch is here, where ptxas finds nothing to move across it.
            softmax.book(rows, acc.o, c.lazy_rescale)
        # Waits stay out of branches, where ptxas would serialize all products.
        warpgroup.wait_group(0)
        if const_expr(c.overlap):  # noqa: SIM102
            if i > 0:
                pipes.v.consumer_release(states.before)
        whole = j < mask.whole.first + mask.whole.count
        if const_expr(not isinstance(mask.whole.first, int)):
            whole = whole & (j >= mask.whole.first)
        bounded = whole & (block.flat > 0.0)
        if cute.arch.vote_all_sync(bounded):
            self.whole_block(ops, rows, acc, block, now)
        else:
            self.masked_block(ops, rows, acc, block, now, mask, j)
        loading.release(pipes.k, now)
        if const_expr(not c.overlap):
            pipes.v.consumer_wait(now)
            self.product(ops, pipes, rows, acc, now)

    def whole_block(self, ops, rows, acc, block, state):
        """Codes of a block that needs no mask; the fold of the product before."""
        factors, offsets, maxima = softmax.score_factors(acc.s, rows, block.k)
        if self.config.overlap:
            fold.begin_fold(rows)
            fold.fold(acc.o, acc.pv, rows, range(self.slice_n // 8))
        words = self.key_words(ops, state)
        if self.exact_p:
            sums, inverses = softmax.exact_block(
                acc.s,
                rows,
                ops.p32,
                lambda x, r: ptx.fma(
                    ptx.as_float(x + MAGIC_BITS), factors[r], offsets[r] + softmax.HEAD_LOG2
                ),
                words,
                None,
                self.problem.p_max,
            )
            self.keep(rows, maxima, sums, inverses, block, 2.0**-softmax.HEAD_LOG2)
        else:
            sums = softmax.bounded_block(
                acc.s, rows, ops.p32, factors, offsets, words, self.config.exp_fma_of_8
            )
            self.keep(rows, maxima, sums, [Float32(1.0)] * 2, block, 1.0)

    def masked_block(self, ops, rows, acc, block, state, mask, j):
        """The same for a block that needs a mask, or whose V scales differ much."""
        visible = mask.of_block(j, self.config.tile_n)
        maxima = softmax.scores_in_place(acc.s, rows, block.k, visible)
        if self.config.overlap:
            fold.begin_fold(rows)
            fold.fold(acc.o, acc.pv, rows, range(self.slice_n // 8))
        finite = [ptx.select(m == softmax.NEG_INF, Float32(0.0), m) for m in maxima]
        sums, inverses = softmax.exact_block(
            acc.s,
            rows,
            ops.p32,
            lambda x, r: ptx.as_float(x) - (finite[r] - softmax.HEAD_LOG2),
            self.key_words(ops, state) if self.v_per_token else None,
            visible,
            self.problem.p_max,
        )
        self.keep(rows, maxima, sums, inverses, block, 2.0**-softmax.HEAD_LOG2)

    def keep(self, rows, maxima, sums, inverses, block, unit: float):
        """What is to be booked of a block, once its product has been issued."""
        v = block.v * (1.0 / self.problem.p_max)
        for r in range(2):
            rows.block_m[r] = maxima[r]
            rows.block_l[r] = sums[r] * unit
            scaled = inverses[r] * unit if self.v_per_token else inverses[r]
            rows.block_b[r] = scaled * v

    def issue_product(self, ops, acc, n, state, fence=True):
        """Starts column slice n of P V."""
        v = ops.v[n][None, None, None, state.index]
        wgmma.issue(ops.mma_pv, acc.pv, self.config.tile_n // 32, ops.p, v, fence)

    def product(self, ops, pipes, rows, acc, state):
        """P V of the block whose codes were just made, slice after slice, folded at once."""
        groups = self.slice_n // 8
        for n in range(self.config.pv_slices):
            self.issue_product(ops, acc, n, state)
            if n == 0:
                softmax.book(rows, acc.o, self.config.lazy_rescale)
                fold.begin_fold(rows)
            warpgroup.wait_group(0)
            fold.fold(acc.o, acc.pv, rows, range(groups), n * groups)
        pipes.v.consumer_release(state)

    def key_words(self, ops, state):
        """V's scales in the block, half2 for each column group of the thread."""
        groups = self.config.tile_n // 8
        if not self.v_per_token:
            bits = {255: 0x5BF8, 127: 0x57F0}[self.problem.p_max]  # in half precision
            return [Int32(bits << 16 | bits)] * groups
        words = []
        for n in range(groups // 4):
            four = cute.make_rmem_tensor(4, Int32)
            source = ops.keys[None, ops.quad, state.index]
            cute.autovec_copy(cute.local_tile(source, (4,), (n,)), four)
            words += [four[i] for i in range(4)]
        return words

    def block_scales(self, ops, state):
        """Scales of the whole key block."""
        four = cute.make_rmem_tensor(4, Float32)
        cute.autovec_copy(ops.tile[None, state.index], four)
        return BlockScales(k=four[0], v=four[1], flat=four[2])


def _clear(x):
    """Zeros; a function, since what a loop's own body mutates becomes dynamic."""
    x.fill(0)


def _largest(x):
    """Of a few floats, NaN left out."""
    top = Float32(0.0)
    for i in range(cute.size(x)):
        top = cute.arch.fmax(top, x[i])
    return top
