"""INT8 attention forward for Hopper."""

from functools import partial
from types import SimpleNamespace

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int8, Int32, Uint8, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup

from sage_cute.config import ARCHS, AttnProblem, FwdTileConfig, Status, supports_fwd
from sage_cute.config.constraints import PRODUCER_REGISTERS, consumer_registers
from sage_cute.templates.base import AttnTemplate
from sage_cute.templates.blocks import epilogue, fold, loading, ptx, seqlen, softmax
from sage_cute.templates.blocks.scheduler import tile_coord
from sage_cute.templates.mma import int8_sm90, wgmma
from sage_cute.templates.params import (
    BlockScales,
    FwdAccumulators,
    FwdMask,
    FwdOperands,
    FwdPipes,
    FwdShared,
    FwdTensors,
    FwdWork,
)

PINGPONG_BARRIER = 1  # named barriers 1 .. num_consumer_wgs
ARCH = ARCHS["sm_90a"]


class SageFwdSm90(AttnTemplate):
    """O = softmax(Q K^T) V on codes and scales that the quantization prologue made.

    Layouts (global memory)
        q_codes, k_codes  int8 (batch, heads, seqlen, head_dim), contiguous
        v_t               uint8 (batch, kv_heads, head_dim, seqlen_k padded to 128), contiguous,
                          128 + code, keys permuted within 16 (mma.int8_sm90)
        q_scale           float32 (batch, heads, tokens or blocks)
        k_scale           float32 (batch, kv_heads, blocks)
        v_scale           float32 (batch, kv_heads, padded tokens or blocks)
        out, lse          (batch, heads, seqlen_q, head_dim), head_dim contiguous; float32
                          (batch, heads, seqlen_q): natural log, of the K that was quantized
        of a packed batch: tensors of batch 1 with all tokens; where a sequence's tokens, scales and
        columns of V^T start, and which keys its queries see, is in blocks.seqlen. Rows that TMA
        brings from behind a sequence are masked, and not stored

    Roles
        warp 0            TMA: Q once a tile, K and V^T of a step into one slot
        warps 1, 2, 3     in turns: scales of a key block into the slot of its K
        warps 4 ...       consumer warpgroups, 64 queries each

    Pipelines (producer -> consumer; arrivals on full, on empty)
        Q    warp 0 -> consumers, 1 stage             1 + bytes, one a consumer warp
        KV   warp 0 and a scale warp -> consumers     2 + bytes, one a consumer warp

    Shared memory (dim: head_dim rounded up to 32, where TMA leaves zeros)
        sQ (tile_m, dim), sK (tile_n, dim, stages), sV (dim, tile_n, stages), swizzled; sKeys
        (tile_n / 8, 4, stages) half2: v_scale of the keys that a thread of place q in its quad has
        in a column group, as p_max * v / (largest v of the block); sTile (2, stages): k of the
        block, its largest v / p_max, negative if its v are not flat; barriers.

    A consumer's step on block j (blocks run from the last to 0), with ``overlap``: issue S = Q K^T
    of block j and P V of block j + 1, whose V lies in the same slot -> S arrives: maxima -> P V
    arrives -> the reference of the softmax moves, rarely -> one stretch of instructions that the
    compiler mixes at will: probabilities, their codes (the next A operand) and the fold of P V
    into O. What overlaps the products are the other warpgroups. The first step multiplies a P of
    zeros and a V of zeros, from outside of the tensor; the last slot has no K. A slot is given back
    one step later (``release``). Without ``overlap``: S -> wait -> codes -> P V in slices, each
    waited for and folded. A warp takes the exact path (softmax.py) for blocks that its warpgroup's
    rows do not see whole and for those whose V scales are not flat. With a window blocks run down
    to the first one that the tile's first row sees.
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
        self.lag = int(config.overlap)  # P V is multiplied as many steps later
        self.scale_warps = min(3, config.num_stages)
        self.early_max = config.overlap and self.dim > 64  # maxima are found while P V is in flight
        # What ptxas makes of it is 2 to 5 % faster there, and 3 to 7 % slower above.
        self.late_release = self.counts_ahead = self.dim <= 64
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
        mma_pv = int8_sm90.tiled_mma(
            c.num_consumer_wgs, self.slice_n, a_in_registers=True, b_type=Uint8
        )
        layouts = SimpleNamespace(
            q=wgmma.smem_layout(Int8, self.dim, (c.tile_m, self.dim)),
            k=wgmma.smem_layout(Int8, self.dim, (c.tile_n, self.dim, c.num_stages)),
            v=wgmma.smem_layout(Uint8, c.tile_n, (self.dim, c.tile_n, c.num_stages)),
        )
        tma_q = loading.tma(mQ, layouts.q, (c.tile_m, self.dim))
        tma_k = loading.tma(mK, layouts.k, (c.tile_n, self.dim))
        tma_v = loading.tma(mV, layouts.v, (self.dim, c.tile_n))

        @cute.struct
        class Storage:
            q_barriers: cute.struct.MemRange[cutlass.Int64, 2]
            kv_barriers: cute.struct.MemRange[cutlass.Int64, c.num_stages * 2]
            keys: cute.struct.Align[cute.struct.MemRange[Int32, c.num_stages * c.tile_n // 2], 128]
            tile: cute.struct.Align[cute.struct.MemRange[Float32, c.num_stages * 2], 128]
            q: cute.struct.Align[cute.struct.MemRange[Int8, cute.cosize(layouts.q)], 1024]
            k: cute.struct.Align[cute.struct.MemRange[Int8, cute.cosize(layouts.k)], 1024]
            v: cute.struct.Align[cute.struct.MemRange[Uint8, cute.cosize(layouts.v)], 1024]

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
        pipes = FwdPipes(
            q=pipe(storage.q_barriers, 1, 1, tx_bytes=c.tile_m * self.dim),
            kv=pipe(storage.kv_barriers, c.num_stages, 2, tx_bytes=2 * c.tile_n * self.dim),
        )
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        smem = FwdShared(
            q=storage.q.get_tensor(q_layout.outer, swizzle=q_layout.inner),
            k=storage.k.get_tensor(k_layout.outer, swizzle=k_layout.inner),
            v=storage.v.get_tensor(v_layout.outer, swizzle=v_layout.inner),
            keys=storage.keys.get_tensor(cute.make_layout((c.tile_n // 8, 4, c.num_stages))),
            tile=storage.tile.get_tensor(cute.make_layout((2, c.num_stages))),
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
            if (warp >= 1) & (warp <= self.scale_warps):
                self.load_scales(gmem, smem, pipes, work, warp)
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
        outside = cute.ceil_div(cutlass.max(work.seqlen_k, gmem.v.shape[1]), c.tile_n)
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
                for i in cutlass.range(blocks.count + self.lag, unroll=1):
                    pipes.kv.producer_acquire(state)
                    bar = pipes.kv.producer_get_barrier(state)
                    # Zeros, from outside of the tensors, for the V before and the K behind.
                    j = seqlen.block_of(blocks, i)
                    k = ptx.select(i < blocks.count, j, outside)
                    v = ptx.select(i >= self.lag, j + self.lag, outside)
                    cute.copy(tma_k, tK[None, k], sK[None, state.index], tma_bar_ptr=bar)
                    cute.copy(tma_v, tV[None, v], sV[None, state.index], tma_bar_ptr=bar)
                    state.advance()

    @cute.jit
    def load_scales(self, gmem, smem, pipes, work, warp):
        """Warps 1 to 3, in turns: the scales of a key block."""
        c, turns = self.config, const_expr(self.scale_warps)
        lane = cute.arch.lane_idx()
        base = Int32(0)  # slots used so far
        first, last, step = self.tiles(work)
        for index in cutlass.range(first, last, step, unroll=1):
            coord, seq, blocks = self.tile(index, work)
            kv_head = coord.head // work.group
            first = seqlen.group_k(seq, self.problem.block_k)
            gK = seqlen.from_index(gmem.k_scale[seq.batch, kv_head, None], first)
            first = seqlen.padded_k(seq) if const_expr(self.v_per_token) else first
            gV = seqlen.from_index(gmem.v_scale[seq.batch, kv_head, None], first)
            slots = ptx.select(blocks.count > 0, blocks.count + self.lag, Int32(0))
            # Turns go by slots, not by blocks, and are no more than there are slots: a warp that
            # runs ahead is never a whole ring ahead of a barrier, where parities repeat.
            mine = (warp - 1 - base % turns + turns) % turns
            for i in cutlass.range(mine, slots, turns, unroll=1):
                slot = loading.Slot((base + i) % c.num_stages, (base + i) // c.num_stages % 2 ^ 1)
                if i < blocks.count:
                    j = seqlen.block_of(blocks, i)
                    self.load_block_scales(gK, gV, smem, pipes, seq.keys, lane, j, slot)
                else:  # the slot behind a tile's blocks has none
                    pipes.kv.sync_object_empty.wait(slot.index, slot.phase)
                cute.arch.sync_warp()
                loading.arrive(pipes.kv.producer_get_barrier(slot))
            base = base + slots

    @cute.jit
    def load_block_scales(self, gK, gV, smem, pipes, keys, lane, j, slot):
        """The scales of block j into a slot, two keys a lane at a time."""
        c = self.config
        rounds = const_expr(cute.ceil_div(c.tile_n, 64))
        block = cute.make_rmem_tensor(2, Float32)
        block[0] = gK[j]
        v = cute.make_rmem_tensor(2 * rounds, Float32)
        largest = Float32(0.0)
        if const_expr(self.v_per_token):
            v.fill(0.0)
            for t in cutlass.range_constexpr(2 * rounds):
                key = j * c.tile_n + 2 * (lane + 32 * (t // 2)) + t % 2
                if key < cutlass.min((j + 1) * c.tile_n, keys):
                    v[t] = gV[key]
            largest = cute.arch.warp_reduction_max(_largest(v))
            flat = cutlass.Boolean(True)
            for t in cutlass.range_constexpr(2 * rounds):
                outside = lane + 32 * (t // 2) >= c.tile_n // 2
                flat = flat & ((v[t] >= softmax.FLAT * largest) | outside)
            unit = largest * (1.0 / self.problem.p_max)
            block[1] = ptx.select(cute.arch.vote_all_sync(flat), unit, -unit)
        else:
            block[1] = gV[j] * (1.0 / self.problem.p_max)
        pipes.kv.sync_object_empty.wait(slot.index, slot.phase)
        if const_expr(self.v_per_token):
            unit = ptx.select(largest > 0.0, self.problem.p_max / largest, Float32(0.0))
            for t in cutlass.range_constexpr(rounds):
                pair = lane + 32 * t
                if pair < c.tile_n // 2:
                    word = ptx.pack_halves(v[2 * t] * unit, v[2 * t + 1] * unit)
                    smem.keys[pair // 4, pair % 4, slot.index] = word
        if lane == 0:
            cute.autovec_copy(block, smem.tile[None, slot.index])

    @cute.jit
    def consume(self, tidx, gmem, smem, pipes, work, scale_log2, mma_qk, mma_pv):
        """A consumer warpgroup: its 64 rows of each tile."""
        c = self.config
        wg = cute.arch.make_warp_uniform(tidx // 128)
        ops = self.operands(tidx, wg, smem, mma_qk, mma_pv)
        q_state = loading.consumer_state(1)
        slot = loading.Slot(Int32(0), Int32(0))
        if const_expr(c.pingpong):  # noqa: SIM102
            if wg == c.num_consumer_wgs - 1:
                cute.arch.barrier_arrive(barrier_id=PINGPONG_BARRIER, number_of_threads=256)
        first, last, step = self.tiles(work)
        for index in cutlass.range(first, last, step, unroll=1):
            coord, seq, blocks = self.tile(index, work)
            rows, mask = self.start_rows(ops, gmem, seq, coord, wg, scale_log2, blocks)
            acc = FwdAccumulators(
                o=cute.make_rmem_tensor(self.dim // 2, Float32),
                s=cute.make_rmem_tensor(ops.s_shape, Int32),
                pv=cute.make_rmem_tensor(ops.pv_shape, Int32),
            )
            acc.o.fill(0.0)
            _clear(ops.p32)
            if blocks.count > 0:
                pipes.q.consumer_wait(q_state)
                slot = self.walk(ops, pipes, rows, acc, wg, mask, blocks, slot)
                loading.free(pipes.q, q_state)
                q_state.advance()
            again = index if const_expr(c.persistent) else ptx.block_index()
            self.store(again, gmem, work, rows, acc.o, mma_qk)

    def release(self, pipes, slot):
        """Gives a slot back, once for the warp, when a product has read all that it held.

        Its scales were read with loads, for which an arrival does not wait; the product that
        multiplies the codes made of them does.
        """
        loading.arrive(pipes.kv.sync_object_empty.get_barrier(slot.index))

    @cute.jit
    def start_rows(self, ops, gmem, seq: cutlass.Constexpr, coord, wg, scale_log2, blocks):
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
        # Steps from ``start`` on, and before ``stop`` if there is one, need no mask.
        last = blocks.first + blocks.count
        start, stop = cute.arch.make_warp_uniform(last - (whole.first + count)), None
        if const_expr(seq.left is not None):
            stop = last - whole.first
        return softmax.make_rows(q_scale), FwdMask(first, end, start, stop)

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
    def walk(self, ops, pipes, rows, acc, wg, mask, blocks, slot):
        """All blocks of a tile; returns the next tile's first slot.

        With overlap in runs of blocks that take the bounded path and of those that do not: a loop
        of its own without the other path is what ptxas schedules well.
        """
        stages = self.config.num_stages
        i = Int32(0)
        if const_expr(not self.config.overlap):
            while i < blocks.count:
                block, bounded = self.look(ops, pipes, mask, blocks, slot, i)
                self.step(ops, pipes, rows, acc, wg, mask, blocks, slot, block, bounded, i)
                slot = loading.next_slot(slot, stages)
                i = i + 1
            return slot
        block, bounded = self.look(ops, pipes, mask, blocks, slot, i)
        before = slot
        while i < blocks.count:
            while bounded:
                self.start_products(ops, acc, slot, wg)
                if const_expr(self.counts_ahead):
                    ahead = loading.next_slot(slot, stages)
                tops = self.arrived(acc)
                if const_expr(not self.late_release):
                    self.release_before(pipes, before, i)
                self.whole_block(ops, rows, acc, block, slot, tops)
                if const_expr(self.late_release):
                    self.release_before(pipes, before, i)
                before = slot
                slot = ahead if self.counts_ahead else loading.next_slot(slot, stages)
                i = i + 1
                block, bounded = self.look(ops, pipes, mask, blocks, slot, i)
            for _ in cutlass.range(cutlass.min(blocks.count - i, 1), unroll=1):
                self.start_products(ops, acc, slot, wg)
                warpgroup.wait_group(0)
                self.release_before(pipes, before, i)
                j = seqlen.block_of(blocks, i)
                self.masked_block(ops, rows, acc, block, slot, mask, j)
                before = slot
                slot = loading.next_slot(slot, stages)
                i = i + 1
                block, bounded = self.look(ops, pipes, mask, blocks, slot, i)
        self.release(pipes, before)
        self.product(ops, pipes, rows, acc, slot)
        return loading.next_slot(slot, stages)

    @cute.jit
    def release_before(self, pipes, before, i):
        """Gives back the slot of the step before, if there was one."""
        if i > 0:
            self.release(pipes, before)

    def look(self, ops, pipes, mask, blocks, slot, i):
        """Waits for the slot of step i: its scales, and whether the warp takes the bounded path.

        Of the slot behind the last block nothing is used.
        """
        pipes.kv.consumer_wait(slot)
        block = self.block_scales(ops, slot)
        bounded = (i >= mask.start) & (ptx.as_int(block.v) >= 0) & (i < blocks.count)
        if const_expr(mask.stop is not None):
            bounded = bounded & (i < mask.stop)
        return block, cute.arch.vote_all_sync(bounded)

    @cute.jit
    def start_products(self, ops, acc, slot, wg):
        """S of this block and (with overlap) P V of the one before: in flight."""
        c = self.config
        if const_expr(c.pingpong):
            cute.arch.barrier(barrier_id=PINGPONG_BARRIER + wg, number_of_threads=256)
        k = ops.k[None, None, None, slot.index]
        wgmma.issue(ops.mma_qk, acc.s, self.dim // 32, ops.q, k)
        if const_expr(c.overlap):
            self.issue_product(ops, acc, 0, slot, fence=False)
        if const_expr(c.pingpong):
            other = (wg + 1) % c.num_consumer_wgs
            cute.arch.barrier_arrive(barrier_id=PINGPONG_BARRIER + other, number_of_threads=256)

    def arrived(self, acc):
        """Waits for the products; the rows' largest integer scores."""
        if self.early_max:
            warpgroup.wait_group(1)
            tops = softmax.tops(acc.s)
            warpgroup.wait_group(0)
            return tops
        warpgroup.wait_group(0)
        return softmax.tops(acc.s)

    @cute.jit
    def step(self, ops, pipes, rows, acc, wg, mask, blocks, slot, block, bounded, i):
        """A block without overlap."""
        self.start_products(ops, acc, slot, wg)
        warpgroup.wait_group(0)  # not in a branch, where ptxas would serialize all products
        if bounded:
            self.whole_block(ops, rows, acc, block, slot, softmax.tops(acc.s))
        else:
            self.masked_block(
                ops, rows, acc, block, slot, mask, seqlen.block_of(blocks, ptx.opaque(i))
            )
        self.product(ops, pipes, rows, acc, slot)

    @cute.jit
    def whole_block(self, ops, rows, acc, block, slot, tops):
        """Codes of a block that needs no mask; the fold of the product before."""
        wide = self.dim > 128
        bases, factors, offsets, maxima = softmax.score_factors(rows, block.k, tops, wide)
        weights, offsets, v = softmax.weights(
            rows, acc.o, maxima, offsets, block.v, self.config.lazy_rescale
        )
        offsets = [-x for x in offsets]
        b = [ptx.mul(w, v) for w in weights]
        if const_expr(self.config.overlap):
            self.fold_product(rows, acc)
        words = self.key_words(ops, slot)
        if const_expr(self.exact_p):
            sums, inverses = softmax.exact_block(
                acc.s,
                rows,
                ops.p32,
                lambda x, r: (
                    ptx.fma(ptx.as_float(x + bases[r]), factors[r], offsets[r]) + softmax.HEAD_LOG2
                ),
                words,
                None,
                self.problem.p_max,
            )
            self.keep(rows, weights, sums, inverses, v, 2.0**-softmax.HEAD_LOG2)
        else:
            sums = softmax.bounded_block(
                acc.s, rows, ops.p32, bases, factors, offsets, words, self.config.exp_fma_of_8
            )
            for r in cutlass.range_constexpr(2):
                rows.b[r] = b[r]
                rows.l[r] = ptx.fma(sums[r], weights[r], rows.l[r])
        fold.count_bias(rows, ops.p32)

    @cute.jit
    def masked_block(self, ops, rows, acc, block, slot, mask, j):
        """The same for a block that needs a mask, or whose V scales differ much."""
        visible = mask.of_block(j, self.config.tile_n)
        maxima = softmax.scores_in_place(acc.s, rows, block.k, visible)
        v = ptx.as_float(ptx.as_int(block.v) & 0x7FFFFFFF)
        weights, _, v = softmax.weights(rows, acc.o, maxima, maxima, v, self.config.lazy_rescale)
        if const_expr(self.config.overlap):
            self.fold_product(rows, acc)
        finite = [ptx.select(m == softmax.NEG_INF, Float32(0.0), m) for m in maxima]
        sums, inverses = softmax.exact_block(
            acc.s,
            rows,
            ops.p32,
            lambda x, r: (ptx.as_float(x) - finite[r]) + softmax.HEAD_LOG2,
            self.key_words(ops, slot) if self.v_per_token else None,
            visible,
            self.problem.p_max,
        )
        self.keep(rows, weights, sums, inverses, v, 2.0**-softmax.HEAD_LOG2)
        for r in cutlass.range_constexpr(2):  # a row that sees no key takes no NaN of V's scales
            rows.b[r] = ptx.select(maxima[r] == softmax.NEG_INF, Float32(0.0), rows.b[r])
        fold.count_bias(rows, ops.p32)

    def keep(self, rows, weights, sums, inverses, v, unit: float):
        """The block's part of the row sums, and the factor of its product."""
        scale = unit if self.v_per_token else 1.0
        for r in range(2):
            rows.b[r] = ptx.mul(weights[r], inverses[r] * scale * v)
        for r in range(2):
            rows.l[r] = ptx.fma(sums[r] * unit, weights[r], rows.l[r])

    def fold_product(self, rows, acc):
        """The whole product that has arrived into O."""
        fold.fold(acc.o, acc.pv, rows.b, range(self.slice_n // 8))

    def issue_product(self, ops, acc, n, slot, fence=True):
        """Starts column slice n of P V."""
        v = ops.v[n][None, None, None, slot.index]
        wgmma.issue(ops.mma_pv, acc.pv, self.config.tile_n // 32, ops.p, v, fence)

    @cute.jit
    def product(self, ops, pipes, rows, acc, slot):
        """P V of the block whose codes were made last, slice after slice, folded at once."""
        groups = self.slice_n // 8
        self.issue_product(ops, acc, 0, slot)
        for n in cutlass.range_constexpr(self.config.pv_slices):
            if const_expr(n > 0):
                self.issue_product(ops, acc, n, slot)
            warpgroup.wait_group(0)
            fold.fold(acc.o, acc.pv, rows.b, range(groups), n * groups)
        self.release(pipes, slot)

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
        two = cute.make_rmem_tensor(2, Float32)
        cute.autovec_copy(ops.tile[None, state.index], two)
        return BlockScales(k=two[0], v=two[1])


def _clear(x):
    """Zeros; a function, since what a loop's own body mutates becomes dynamic."""
    x.fill(0)


def _largest(x):
    """Of a few floats, NaN left out."""
    top = Float32(0.0)
    for i in range(cute.size(x)):
        top = cute.arch.fmax(top, x[i])
    return top
