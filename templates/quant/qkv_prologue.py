"""Quantization of Q, K and V in one launch, after the K mean."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int8, Int32, const_expr
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

from sage_cute.config import Status
from sage_cute.templates.base import AttnTemplate
from sage_cute.templates.blocks import ptx, seqlen
from sage_cute.templates.quant.exact import BOOST, pack4, round_codes, scale_of
from sage_cute.templates.quant.k_mean import KMean
from sage_cute.templates.quant.spec import TILE, QuantSpec

PLUS_128 = 0x80808080 - (1 << 32)
"""Turns four int8 codes into 128 + code, as bytes without a sign."""

KEYS = [(2 * q, 2 * q + 1, 8 + 2 * q, 9 + 2 * q) for q in range(4)]
"""Keys, of a group of 16, in each word of V^T: position 4q + 2b + c holds key 8b + 2q + c."""


@dsl_user_op
def _opaque(x, *, loc=None, ip=None):
    values = [Int32(x).ir_value(loc=loc, ip=ip)]
    return Int32(
        llvm.inline_asm(
            T.i32(),
            values,
            "mov.b32 $0, $1;",
            "=r,r",
            has_side_effects=True,
            is_align_stack=False,
            asm_dialect=llvm.AsmDialect.AD_ATT,
        )
    )


def lanes_of(head_dim: int) -> int:
    """Lanes that share a token: for 32 channels each or the next power of two above.

    So that what a token costs beside its channels (a reduction, a reciprocal) is spread over as
    many.
    """
    return 1 << (-(-head_dim // 32) - 1).bit_length()


def forget(x: cute.Tensor):
    """Keeps the compiler from carrying what it computed from 16-bit x, in twice the registers."""
    words = cute.recast_tensor(x, Int32)
    for i in range(cute.size(words)):
        words[i] = _opaque(words[i])


class Smem(NamedTuple):
    """Shared memory: the K mean, one maximum a warp, V's codes in words."""

    mean: cute.Tensor
    absmax: cute.Tensor
    codes: cute.Tensor | None


class QuantizePrologue(AttnTemplate):
    """INT8 codes and scales of Q, K and V.

    Layouts (head_dim contiguous and any other strides, inputs with rows on 16 bytes):

        mQ (batch, heads, seqlen_q, head_dim), mK and mV (batch, kv heads, seqlen_k, head_dim)
        mQc, mKc int8 codes, shaped as Q and K, rows on 8 bytes
        mQs, mKs float32: per token (batch, heads, seqlen), or per block (batch, heads, blocks)
        mKmean (batch, kv heads, head_dim) float32
        mVt (batch, kv heads, head_dim, seqlen_k rounded up to 128) uint8: V^T as 128 + code
            (``blocks.fold``), the keys of each group of 16 permuted (``KEYS``), codes of 0 behind
            seqlen_k
        mVs float32: per token (batch, kv heads, padded seqlen_k), the scale or its log2 (behind
            seqlen_k: of a scale of 0), or per block (batch, kv heads, blocks)
        mPartial (batch * kv heads, chunks, head_dim) float64: scratch of the mean
        of a packed batch: tensors of batch 1 with all tokens; mKmean and mPartial of sequences;
            scales of blocks and V^T's columns from where ``blocks.seqlen`` says
        keys behind a key length count as zeros, whatever they hold: codes 0, scales of other keys

    Roles: all warps do the same. One CTA quantizes one tile of 128 tokens: the first CTAs those of
    V, then those of Q, then those of K. A token belongs to 1 to 8 lanes of a warp (``lanes_of``).

    Pipelines: none inside a CTA; 32 to 48 warps a multiprocessor hide each other's waiting, for
    which 40 registers have to do (``forget``). The launch may start while the K mean is computed
    (programmatic dependent launch); the CTAs of K wait for it, and they come last. Where a token's
    vectors of 8 channels are no multiple of its lanes, some lanes hold one of zeros, neither read
    nor written, and threads have 64 registers.

    Shared memory: see ``Smem``. V is transposed there: tokens in rows whose pitch is an odd
    multiple of what a token's lanes write at once, and 4 words of skew every 16 rows, which leaves
    no bank conflict in the writes (8 bytes a lane) nor in the reads (a word of each of 16 tokens a
    lane). Bytes are transposed 4 x 4 in registers.
    """

    family = "sm90"
    direction = "quantize"
    roles = ("quantize",)

    def __init__(self, spec: QuantSpec):
        """Static facts only; ``supports`` says whether they fit."""
        if not (status := self.supports(spec)):
            raise ValueError(status.reason)
        self.spec = spec
        self.head_dim = spec.head_dim
        self.share_channels()
        self.pitch = self.transposed_pitch()
        self.mean = KMean(spec.head_dim, spec.lengths)

    def share_channels(self):
        """How a token's channels are spread over lanes, in vectors of 8."""
        self.lanes = lanes_of(self.head_dim)
        self.threads = TILE * self.lanes
        self.vectors = -(-self.head_dim // (8 * self.lanes))
        self.padded_dim = 8 * self.lanes * self.vectors

    @staticmethod
    def supports(spec: QuantSpec) -> Status:
        """Whether there is such a kernel."""
        reason = spec.why_not()
        return Status(reason is None, reason or "")

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor | None,
        mK: cute.Tensor | None,
        mV: cute.Tensor | None,
        mQc: cute.Tensor | None,
        mQs: cute.Tensor | None,
        mKc: cute.Tensor | None,
        mKs: cute.Tensor | None,
        mKmean: cute.Tensor | None,
        mVt: cute.Tensor | None,
        mVs: cute.Tensor | None,
        mPartial: cute.Tensor | None,
        left: Int32 | None,
        right: Int32 | None,
        key_lengths: cute.Tensor | None,
        cu_q: cute.Tensor | None,
        cu_k: cute.Tensor | None,
        max_q: Int32 | None,
        max_k: Int32 | None,
        stream,
    ):
        """Launches the K mean, if K is smoothed and has none yet, and the quantization."""
        bounds = seqlen.Bounds(left, right, key_lengths, cu_q, cu_k, max_q, max_k)
        if const_expr(self.spec.computes_mean):
            self.mean.launch(mK, mPartial, mKmean, bounds, stream)
        ctas_v, ctas_q, ctas_k = Int32(0), Int32(0), Int32(0)
        if const_expr(self.spec.block_k > 0):
            ctas_q, ctas_k = self.ctas(mQ, bounds, max_q), self.ctas(mK, bounds, max_k)
        if const_expr(self.spec.block_v > 0):
            ctas_v = self.ctas(mV, bounds, max_k)
        self.kernel(
            mQ, mK, mV, mQc, mQs, mKc, mKs, mKmean, mVt, mVs, bounds, ctas_v, ctas_q
        ).launch(
            grid=(ctas_v + ctas_q + ctas_k, 1, 1),
            block=[self.threads, 1, 1],
            stream=stream,
            use_pdl=self.spec.computes_mean,
            min_blocks_per_mp=(1536 if self.padded_dim == self.head_dim else 1024) // self.threads,
            preferred_smem_carveout=80,  # percent; given, or compiling asks a GPU for it
        )

    @cute.jit
    def ctas(self, mX: cute.Tensor, bounds, longest):
        """CTAs that a tensor takes."""
        if const_expr(longest is None):
            return mX.shape[0] * mX.shape[1] * cute.ceil_div(mX.shape[2], TILE)
        return (bounds.cu_q.shape[0] - 1) * mX.shape[1] * cute.ceil_div(longest, TILE)

    @cute.kernel
    def kernel(
        self,
        mQ: cute.Tensor | None,
        mK: cute.Tensor | None,
        mV: cute.Tensor | None,
        mQc: cute.Tensor | None,
        mQs: cute.Tensor | None,
        mKc: cute.Tensor | None,
        mKs: cute.Tensor | None,
        mKmean: cute.Tensor | None,
        mVt: cute.Tensor | None,
        mVs: cute.Tensor | None,
        bounds: seqlen.Bounds,
        ctas_v: Int32,
        ctas_q: Int32,
    ):
        """One tile of one operand."""
        cta, _, _ = cute.arch.block_idx()
        smem = self.allocate()
        if cta < ctas_v:
            if const_expr(self.spec.block_v > 0):
                self.quantize_v(cta, mV, mVt, mVs, bounds, smem)
        elif cta < ctas_v + ctas_q:
            if const_expr(self.spec.block_q > 0):
                seqlen_k = mK.shape[2]
                self.quantize_q(cta - ctas_v, mQ, mQc, mQs, bounds, seqlen_k, smem)
        else:
            if const_expr(self.spec.block_k > 0):
                self.quantize_k(cta - (ctas_v + ctas_q), mK, mKc, mKs, mKmean, bounds, smem)

    @cute.jit
    def allocate(self):
        allocator = cutlass.memory.SmemAllocator()

        def array(dtype, size):
            return allocator.allocate_tensor(dtype, cute.make_layout(size), byte_alignment=16)

        mean, absmax, codes = (
            array(Float32, self.padded_dim),
            array(Float32, self.threads // 32),
            None,
        )
        if const_expr(self.spec.block_v > 0):
            codes = array(Int32, TILE * self.pitch + TILE // 16 * 4)
        return Smem(mean, absmax, codes)

    # One operand each.

    @cute.jit
    def quantize_q(self, cta, mQ, mQc, mQs, bounds, seqlen_k, smem):
        index, head, tile = self.position(cta, mQ, bounds.max_q)
        seq = self.sequence(bounds, index, mQ.shape[2], seqlen_k)
        if const_expr(self.spec.lengths != "packed"):
            self.quantize_queries(mQ, mQc, mQs, seq, head, tile, smem)
        else:
            if tile * TILE < seq.seqlen_q:
                self.quantize_queries(mQ, mQc, mQs, seq, head, tile, smem)

    @cute.jit
    def quantize_queries(self, mQ, mQc, mQs, seq: cutlass.Constexpr, head, tile, smem):
        block = const_expr(self.spec.block_q)
        seen = None
        if const_expr(self.spec.mask_q):
            seen = seqlen.seeing(seq)
        gX = seqlen.from_row(mQ[seq.batch, head, None, None], seq.first_q)
        rX = self.load(gX, tile, seq.seqlen_q, seen)
        scales = self.scale(rX, seq.seqlen_q, tile, block, None, smem.absmax)
        gScale = seqlen.from_index(mQs[seq.batch, head, None], seqlen.group_q(seq, block))
        self.store_scale(scales[0], gScale, seq.seqlen_q, tile, block)
        codes = self.encode(rX, scales, None)
        gCodes = seqlen.from_row(mQc[seq.batch, head, None, None], seq.first_q)
        self.store_codes(codes, gCodes, tile, self.packed(seq.seqlen_q))

    @cute.jit
    def quantize_k(self, cta, mK, mKc, mKs, mKmean, bounds, smem):
        index, head, tile = self.position(cta, mK, bounds.max_k)
        seq = self.sequence(bounds, index, mK.shape[2], mK.shape[2])
        if const_expr(self.spec.lengths != "packed"):
            self.quantize_keys(mK, mKc, mKs, mKmean, seq, head, tile, smem)
        else:
            if tile * TILE < seq.seqlen_k:
                self.quantize_keys(mK, mKc, mKs, mKmean, seq, head, tile, smem)

    @cute.jit
    def quantize_keys(self, mK, mKc, mKs, mKmean, seq: cutlass.Constexpr, head, tile, smem):
        block = const_expr(self.spec.block_k)
        gX = seqlen.from_row(mK[seq.batch, head, None, None], seq.first_k)
        rX = self.load(gX, tile, seq.keys)
        mean = None
        if const_expr(self.spec.smooth_k):
            mean = smem.mean
            tidx, _, _ = cute.arch.thread_idx()
            if const_expr(self.spec.computes_mean):
                cute.arch.griddepcontrol_wait()
            if tidx < self.head_dim:
                mean[tidx] = mKmean[seq.index, head, tidx]
            if const_expr(self.padded_dim > self.head_dim):  # noqa: SIM102
                if tidx >= self.head_dim and tidx < self.padded_dim:
                    mean[tidx] = Float32(0.0)
            cute.arch.sync_threads()
        scales = self.scale(rX, seq.keys, tile, block, mean, smem.absmax)
        if const_expr(self.spec.lengths == "padded"):  # zeros less the mean are no zeros
            scale, divisor, inverse, error, mask, tiny = scales
            mask = ptx.select(tile * TILE + self.row() < seq.keys, mask, Int32(0))
            scales = scale, divisor, inverse, error, mask, tiny
        gScale = seqlen.from_index(mKs[seq.batch, head, None], seqlen.group_k(seq, block))
        self.store_scale(scales[0], gScale, seq.seqlen_k, tile, block)
        codes = self.encode(rX, scales, mean)
        gCodes = seqlen.from_row(mKc[seq.batch, head, None, None], seq.first_k)
        self.store_codes(codes, gCodes, tile, self.packed(seq.seqlen_k))

    @cute.jit
    def quantize_v(self, cta, mV, mVt, mVs, bounds, smem):
        index, head, tile = self.position(cta, mV, bounds.max_k)
        seq = self.sequence(bounds, index, mV.shape[2], mV.shape[2])
        if const_expr(self.spec.lengths != "packed"):
            self.quantize_values(mV, mVt, mVs, seq, head, tile, smem)
        else:
            if tile * TILE < seq.seqlen_k:
                self.quantize_values(mV, mVt, mVs, seq, head, tile, smem)

    @cute.jit
    def quantize_values(self, mV, mVt, mVs, seq: cutlass.Constexpr, head, tile, smem):
        block = const_expr(self.spec.block_v)
        first, end = seqlen.group_k(seq, block), seq.seqlen_k
        if const_expr(block == 1):
            first, end = seqlen.padded_k(seq), (tile + 1) * TILE
        gX = seqlen.from_row(mV[seq.batch, head, None, None], seq.first_k)
        rX = self.load(gX, tile, seq.keys)
        scales = self.scale(rX, seq.keys, tile, block, None, smem.absmax)
        scale = scales[0]
        if const_expr(self.spec.v_scale_form == "log2"):
            scale = cute.math.log2(scale, approx=True)
        gScale = seqlen.from_index(mVs[seq.batch, head, None], first)
        self.store_scale(scale, gScale, end, tile, block)
        codes = self.encode(rX, scales, None)
        words = cute.recast_tensor(codes, Int32)
        for i in cutlass.range_constexpr(cute.size(words)):
            words[i] = words[i] ^ PLUS_128
        self.stage_codes(codes, smem.codes)
        cute.arch.sync_threads()
        gVt = seqlen.from_column(mVt[seq.batch, head, None, None], seqlen.padded_k(seq))
        self.store_transposed(gVt, tile, smem.codes)

    def packed(self, tokens):
        """Tokens of a sequence where its tensor has others behind them; else None."""
        return tokens if self.spec.lengths == "packed" else None

    def transposed_pitch(self) -> int:
        """Words from a token to the next one where codes wait to be transposed."""
        words = self.padded_dim // 4
        return words if words // (2 * self.lanes) % 2 else words + 2 * self.lanes

    # Where this thread is.

    def sequence(self, bounds, index, seqlen_q, seqlen_k):
        """The sequence of a CTA."""
        return seqlen.sequence(self.spec.lengths, False, bounds, index, seqlen_q, seqlen_k)

    @cute.jit
    def position(self, cta, mX: cute.Tensor, longest):
        """(sequence, head, tile of tokens) of one CTA."""
        tokens = mX.shape[2] if const_expr(longest is None) else longest
        tiles = cute.ceil_div(tokens, TILE)
        batch_head, tile = cta // tiles, cta % tiles
        return batch_head // mX.shape[1], batch_head % mX.shape[1], tile

    @cute.jit
    def lane(self):
        """Which of its token's lanes this thread is."""
        tidx, _, _ = cute.arch.thread_idx()
        return tidx % self.lanes

    @cute.jit
    def row(self):
        """This thread's token within the tile."""
        tidx, _, _ = cute.arch.thread_idx()
        return tidx // self.lanes

    def tiled_copy(self, dtype, num_bits: int):
        """Eight elements a thread, a token's lanes side by side, 128 tokens."""
        atom = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), dtype, num_bits_per_copy=num_bits)
        threads = cute.make_layout((TILE, self.lanes), stride=(self.lanes, 1))
        return cute.make_tiled_copy_tv(atom, threads, cute.make_layout((1, 8)))

    def tile_of(self, gX: cute.Tensor, tile):
        """A tile of gX (seqlen, head_dim), with channels that do not exist where lanes idle."""
        return cute.local_tile(gX, (TILE, self.padded_dim), (tile, 0))

    @cute.jit
    def copy(self, tiled, source: cute.Tensor, target: cute.Tensor):
        """This thread's vectors (8, 1, vectors) of a token, as far as they exist."""
        if const_expr(self.padded_dim == self.head_dim):
            cute.copy(tiled, source, target)
        else:
            for v in cutlass.range_constexpr(self.vectors):
                if 8 * (v * self.lanes + self.lane()) < self.head_dim:
                    cute.copy(tiled, source[None, None, v], target[None, None, v])

    # Steps of all operands.

    @cute.jit
    def load(self, gX: cute.Tensor, tile, tokens, seen=None):
        """A thread's part of a tile of gX (tokens, head_dim): (8, 1, vectors), 0 behind the end.

        seen: (first, end) of the tokens that count; None: all.
        """
        tidx, _, _ = cute.arch.thread_idx()
        tiled = self.tiled_copy(gX.element_type, 128)
        tXgX = tiled.get_slice(tidx).partition_S(self.tile_of(gX, tile))
        tXrX = cute.make_fragment_like(tXgX)
        tXrX.fill(0.0)
        there = tile * TILE + self.row() < tokens
        if const_expr(seen is not None):
            there = there & (tile * TILE + self.row() >= seen[0])
            there = there & (tile * TILE + self.row() < seen[1])
        if there:
            self.copy(tiled, tXgX, tXrX)
        return tXrX

    @cute.jit
    def values(self, rX: cute.Tensor, v: cutlass.Constexpr[int], mean):
        """Vector v in float32, the mean taken off."""
        x = cute.make_rmem_tensor(8, Float32)
        x.store(rX[None, 0, v].load().to(Float32))
        if const_expr(mean is not None):
            rMean = cute.make_rmem_tensor(8, Float32)
            cute.autovec_copy(cute.local_tile(mean, (8,), (v * self.lanes + self.lane(),)), rMean)
            for c in cutlass.range_constexpr(8):
                x[c] = x[c] - rMean[c]
        return x

    @cute.jit
    def scale(self, rX, tokens, tile, block: cutlass.Constexpr[int], mean, sAbsmax):
        """``scale_of`` the largest absolute value of this thread's token, or block of tokens."""
        top = Float32(0.0)
        for v in cutlass.range_constexpr(self.vectors):
            x = self.values(rX, v, mean)
            for c in cutlass.range_constexpr(8):
                top = ptx.max_nan(top, cute.math.absf(x[c]))
        top = ptx.select(tile * TILE + self.row() < tokens, top, Float32(0.0))
        in_warp = const_expr(min(self.lanes * block, 32))
        for i in cutlass.range_constexpr(in_warp.bit_length() - 1):
            top = ptx.max_nan(top, cute.arch.shuffle_sync_bfly(top, 1 << i))
        warps = const_expr(self.lanes * block // 32)
        if const_expr(warps > 1):
            tidx, _, _ = cute.arch.thread_idx()
            if tidx % 32 == 0:
                sAbsmax[tidx // 32] = top
            cute.arch.sync_threads()
            for w in cutlass.range_constexpr(warps):
                top = ptx.max_nan(top, sAbsmax[tidx // 32 // warps * warps + w])
        forget(rX)
        return scale_of(top)

    @cute.jit
    def encode(self, rX: cute.Tensor, scales, mean):
        """INT8 codes of this thread's part of a token, (8, vectors)."""
        _, divisor, inverse, error, mask, tiny = scales
        codes = cute.make_rmem_tensor((8, self.vectors), Int8)
        words = cute.recast_tensor(codes, Int32)  # (2, vectors)
        for v in cutlass.range_constexpr(self.vectors):
            x = self.values(rX, v, mean)
            if tiny:
                largest = divisor * 127.0
                for c in cutlass.range_constexpr(8):
                    # Codes beyond 127 come from scales of a few bits only.
                    x[c] = cute.arch.fmax(cute.arch.fmin(x[c] * BOOST, largest), -largest)
            for half in cutlass.range_constexpr(2):
                code = [round_codes(x[4 * half + c], divisor, inverse, error) for c in range(4)]
                words[half, v] = pack4(code[0], code[1], code[2], code[3], mask)
        return codes

    @cute.jit
    def store_scale(self, scale, gScale: cute.Tensor, tokens, tile, block: cutlass.Constexpr[int]):
        """A token's scale (V's behind the end too: gScale is longer there), or its block's."""
        token = tile * TILE + self.row()
        if const_expr(block == 1 and self.spec.lengths != "packed"):
            tokens = gScale.shape[0]
        if self.lane() == 0 and token % block == 0 and token < tokens:
            gScale[token // block] = scale

    @cute.jit
    def store_codes(self, codes, gC: cute.Tensor, tile, tokens):
        """Codes to gC (seqlen, head_dim), as far as there are ``tokens``; None: to all of it."""
        tidx, _, _ = cute.arch.thread_idx()
        tiled = self.tiled_copy(Int8, 64)
        tCgC = tiled.get_slice(tidx).partition_D(self.tile_of(gC, tile))
        if tile * TILE + self.row() < (gC.shape[0] if tokens is None else tokens):
            self.copy(tiled, cute.make_tensor(codes.iterator, tCgC.shape), tCgC)

    # V^T.

    @cute.jit
    def stage_codes(self, codes, sCodes: cute.Tensor):
        """Codes to shared memory, 8 bytes at a time."""
        row = self.row()
        words = cute.recast_tensor(codes, Int32)  # (2, vectors)
        for v in cutlass.range_constexpr(self.vectors):
            offset = row * self.pitch + row // 16 * 4 + (v * self.lanes + self.lane()) * 2
            cute.autovec_copy(words[None, v], cute.local_tile(sCodes, (2,), (offset // 2,)))

    @cute.jit
    def store_transposed(self, gVt: cute.Tensor, tile, sCodes: cute.Tensor):
        """Codes in shared memory to gVt (head_dim, tokens): 16 tokens of 4 channels a task."""
        dtype = gVt.element_type
        tidx, _, _ = cute.arch.thread_idx()
        groups = const_expr(TILE // 16)
        tasks = const_expr(groups * self.head_dim // 4)
        atom = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), dtype, num_bits_per_copy=128)
        if tidx < tasks:
            group, quad = tidx % groups, tidx // groups
            base = group * (16 * self.pitch + 4) + quad
            out = cute.make_rmem_tensor((4, 4), Int32)  # (word, channel)
            for q in cutlass.range_constexpr(4):
                a, b, c, d = [sCodes[base + key * self.pitch] for key in KEYS[q]]
                low, low2 = ptx.prmt(a, b, 0x5140), ptx.prmt(c, d, 0x5140)
                high, high2 = ptx.prmt(a, b, 0x7362), ptx.prmt(c, d, 0x7362)
                out[q, 0] = ptx.prmt(low, low2, 0x5410)
                out[q, 1] = ptx.prmt(low, low2, 0x7632)
                out[q, 2] = ptx.prmt(high, high2, 0x5410)
                out[q, 3] = ptx.prmt(high, high2, 0x7632)
            rOut = cute.recast_tensor(out, dtype)  # (16, 4)
            for channel in cutlass.range_constexpr(4):
                at = (4 * quad + channel, tile * groups + group)
                cute.copy(atom, rOut[None, channel], cute.local_tile(gVt, (1, 16), at)[0, None])
