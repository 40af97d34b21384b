"""Mean of K over tokens, which smoothing subtracts: partial sums, then their sum.

One CTA sums one chunk of tokens of one head; a second, tiny kernel adds the chunks up in order. No
atomics: the same bits every time.

Precision. All sums are in float64, so that the mean rounded to float32 is, but for the rarest ties,
the one that any float64 sum gives. Converting costs two integer instructions in place of F2F on its
16-lane pipe: the exponent and the 10 upper bits of the significand of a float32, moved to their
places in a float64, are x * 2^-896 exactly, subnormals and zeros included. NaN and infinities are
left out: they would spread from one key to all.

Tensors: mK (batch, heads, seqlen, head_dim), any strides but head_dim contiguous; mPartial
(batch * heads, chunks, head_dim) float64; mMean (batch, heads, head_dim) float32. The batch of the
last two is that of sequences (``blocks.seqlen``); keys behind a key length are not read.

Loads run one step ahead of the sums: otherwise all warps wait for memory together, and then add
together (measured: 3.0 TB/s).
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Float64, Int32, Int64
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

from sage_cute.templates.blocks import ptx, seqlen
from sage_cute.templates.quant.spec import MAX_CHUNKS

UNROLL = 4
KEEP = 0x8FFFFFFF - (1 << 32)  # sign, 8 bits of exponent and the significand of a float32 >> 3
RESCALE = 2.0**896


@dsl_user_op
def from_high_word(high, *, loc=None, ip=None):
    """The float64 with these upper 32 bits and zeros below."""
    wide = llvm.zext(T.i64(), Int32(high).ir_value(loc=loc, ip=ip), loc=loc, ip=ip)
    wide = Int64(wide) << 32
    return Float64(llvm.bitcast(T.f64(), wide.ir_value(loc=loc, ip=ip), loc=loc, ip=ip))


class KMean:
    """Kernels ``partial`` (a CTA a chunk, 8 channels a thread) and ``finish`` (a CTA a head)."""

    def __init__(self, head_dim: int, lengths: str):
        self.head_dim, self.lengths = head_dim, lengths
        self.columns = head_dim // 8  # threads across one token
        self.groups = 256 // head_dim  # second reduction: threads per channel
        self.busy = self.groups * head_dim
        self.threads = -(-self.busy // 32) * 32
        self.rows = self.busy // self.columns  # tokens that one load instruction covers
        self.step = self.rows * UNROLL

    @cute.jit
    def launch(
        self,
        mK: cute.Tensor,
        mPartial: cute.Tensor,
        mMean: cute.Tensor,
        bounds: seqlen.Bounds,
        stream,
    ):
        """Writes mMean; later kernels may start early and wait for it."""
        self.partial(mK, mPartial, bounds).launch(
            grid=(mPartial.shape[0] * mPartial.shape[1], 1, 1),
            block=[self.threads, 1, 1],
            stream=stream,
            # where threads and columns are no powers of two, addresses take more registers
            min_blocks_per_mp=3 if self.busy % 64 == 0 else 2,
            preferred_smem_carveout=50,  # given: or compiling asks a GPU for it
        )
        self.finish(mPartial, mMean, mK.shape[2], bounds).launch(
            grid=(mPartial.shape[0], 1, 1),
            block=[-(-self.head_dim // 32) * 32, 1, 1],
            stream=stream,
            use_pdl=True,
        )

    def thread(self, busy: int):
        """This thread's index; those that fill up the last warp do what the last busy one does."""
        tidx, _, _ = cute.arch.thread_idx()
        return tidx if busy % 32 == 0 else cutlass.min(tidx, busy - 1)

    @cute.jit
    def add(self, tKrK: cute.Tensor, total: cute.Tensor):
        """Adds UNROLL tokens, times 2^-896, to the float64 sums of 8 channels."""
        for u in cutlass.range_constexpr(UNROLL):
            for c in cutlass.range_constexpr(8):
                x = Float32(tKrK[c, u, 0])
                x = ptx.select(abs(x) < Float32.inf, x, Float32(0.0))
                total[c] += from_high_word((ptx.as_int(x) >> 3) & KEEP)

    @cute.jit
    def load(self, tiled, gK: cute.Tensor, start, last):
        """UNROLL tokens of this thread's 8 channels, (8, UNROLL, 1); zeros from token last on."""
        tidx = self.thread(self.busy)
        tile = cute.local_tile(
            cute.domain_offset((start, 0), gK), (self.step, self.head_dim), (0, 0)
        )
        tKgK = tiled.get_slice(tidx).partition_S(tile)
        tKrK = cute.make_fragment_like(tKgK)
        tKrK.fill(0.0)
        for u in cutlass.range_constexpr(UNROLL):
            if start + u * self.rows + tidx // self.columns < last:
                cute.copy(tiled, tKgK[None, u, None], tKrK[None, u, None])
        return tKrK

    @cute.kernel
    def partial(self, mK: cute.Tensor, mPartial: cute.Tensor, bounds: seqlen.Bounds):
        tidx = self.thread(self.busy)
        cta, _, _ = cute.arch.block_idx()
        cute.arch.griddepcontrol_launch_dependents()
        chunk, head = cta % mPartial.shape[1], cta // mPartial.shape[1]
        keys = self.keys(bounds, head, mK.shape[1], mK.shape[2])
        size = cute.ceil_div(keys, mPartial.shape[1])
        first = cute.arch.make_warp_uniform(min(chunk * size, keys))
        last = cute.arch.make_warp_uniform(min(first + size, keys))
        seq = self.sequence(bounds, head // mK.shape[1], mK.shape[2])
        gK = mK[seq.batch, head % mK.shape[1], None, None]  # (seqlen, head_dim)
        gK = seqlen.from_row(gK, seq.first_k)

        atom = cute.make_copy_atom(
            cute.nvgpu.CopyUniversalOp(), mK.element_type, num_bits_per_copy=128
        )
        tiled = cute.make_tiled_copy_tv(
            atom,
            cute.make_layout((self.rows, self.columns), stride=(self.columns, 1)),
            cute.make_layout((1, 8)),
        )
        total = cute.make_rmem_tensor(8, Float64)
        total.fill(0.0)
        tKrK = self.load(tiled, gK, first, last)
        for start in cutlass.range(first, last, self.step, unroll=1):
            ahead = self.load(tiled, gK, start + self.step, last)
            self.add(tKrK, total)
            tKrK.store(ahead.load())

        smem = cutlass.memory.SmemAllocator().allocate_tensor(
            Float64, cute.make_layout(self.busy * 8), byte_alignment=16
        )
        for c in cutlass.range_constexpr(8):
            smem[tidx * 8 + c] = total[c]
        cute.arch.sync_threads()
        # Every channel's rows in 8s, then those sums: thread (group, channel).
        channel, group = tidx % self.head_dim, tidx // self.head_dim
        part = smem[group * 8 * self.head_dim + channel]
        for r in cutlass.range_constexpr(1, 8):
            part += smem[(group * 8 + r) * self.head_dim + channel]
        cute.arch.sync_threads()
        smem[tidx] = part
        cute.arch.sync_threads()
        if tidx < self.head_dim:
            part = smem[tidx]
            for g in cutlass.range_constexpr(1, self.groups):
                part += smem[g * self.head_dim + tidx]
            mPartial[head, chunk, tidx] = part * Float64(RESCALE)

    def sequence(self, bounds, index, seqlen_k):
        """The sequence of which a CTA sums keys."""
        return seqlen.sequence(self.lengths, False, bounds, index, seqlen_k, seqlen_k)

    def keys(self, bounds, head, kv_heads, seqlen_k):
        """How many keys it has."""
        if self.lengths == "dense":
            return seqlen_k
        return self.sequence(bounds, head // kv_heads, seqlen_k).keys

    @cute.kernel
    def finish(
        self, mPartial: cute.Tensor, mMean: cute.Tensor, seqlen_k: Int32, bounds: seqlen.Bounds
    ):
        channel = self.thread(self.head_dim)
        head, _, _ = cute.arch.block_idx()
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
        chunks = mPartial.shape[1]
        parts = [mPartial[head, cutlass.min(c, chunks - 1), channel] for c in range(MAX_CHUNKS)]
        total = Float64(0.0)
        for c in cutlass.range_constexpr(MAX_CHUNKS):  # all loads are on their way at once
            total += ptx.select(c < chunks, parts[c], Float64(0.0))
        keys = self.keys(bounds, head, mMean.shape[1], seqlen_k)
        mean = Float32(total / Float64(cutlass.max(keys, 1)))
        mMean[head // mMean.shape[1], head % mMean.shape[1], channel] = mean
