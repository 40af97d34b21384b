"""Q^T, K^T and dO^T in INT8: operands of products that contract tokens."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int8, Int32, const_expr

from sage_cute.templates.blocks import ptx
from sage_cute.templates.quant.exact import BOOST, pack4, round_codes, scale_of
from sage_cute.templates.quant.qkv_prologue import QuantizePrologue, forget
from sage_cute.templates.quant.spec import TILE


class TransposedSmem(NamedTuple):
    """Shared memory of a transposed copy."""

    codes: cute.Tensor  # words, as of V^T; before there are codes, maxima of the warps
    factors: cute.Tensor  # (4, head_dim, blocks): what ``round_codes`` needs, 2^64 or 1


class TransposedPrologue(QuantizePrologue):
    """Steps that make a transposed copy of a tile of 128 tokens.

    Layouts
        gT      int8 (head_dim, tokens, a multiple of 128), contiguous: the tokens of each group of
                16 permuted as the keys of V^T, zeros behind the last one
        gScale  float32 (tokens / block, head_dim), of 22 bits, so that the sums that it ends up in
                can be exact (blocks.bwd_int8); one a channel, or the block's for all channels

    Roles: all warps do the same. Pipelines: none. Shared memory: ``TransposedSmem``.
    """

    @cute.jit
    def allocate_transposed(self, block: cutlass.Constexpr[int]):
        """Shared memory for copies whose scales are for ``block`` tokens."""
        allocator = cutlass.memory.SmemAllocator()
        words, blocks = TILE * self.pitch + TILE // 16 * 4, TILE // block
        codes = allocator.allocate_tensor(Int32, cute.make_layout(words), byte_alignment=16)
        shape = cute.make_layout((4, self.padded_dim, blocks))
        return TransposedSmem(codes, allocator.allocate_tensor(Float32, shape, byte_alignment=16))

    @cute.jit
    def load_codes(self, gX: cute.Tensor, tile, tokens):
        """A thread's part of a tile of codes (tokens, head_dim): (8, 1, vectors), 0 behind.

        tokens: None: all of gX.
        """
        tidx, _, _ = cute.arch.thread_idx()
        tiled = self.tiled_copy(Int8, 64)
        source = tiled.get_slice(tidx).partition_S(self.tile_of(gX, tile))
        rX = cute.make_fragment_like(source)
        rX.fill(0)
        if tile * TILE + self.row() < (gX.shape[0] if tokens is None else tokens):
            self.copy(tiled, source, rX)
        return rX

    @cute.jit
    def scaled(self, rX: cute.Tensor, v: cutlass.Constexpr[int], scale):
        """Vector v times ``scale`` (None: as it is), in float32."""
        x = self.values(rX, v, None)
        if const_expr(scale is not None):
            for c in cutlass.range_constexpr(8):
                x[c] = ptx.mul(x[c], scale)
        return x

    @cute.jit
    def transpose(
        self,
        rX: cute.Tensor,
        scale,
        block: cutlass.Constexpr[int],
        per_channel: cutlass.Constexpr[bool],
        tile,
        gT: cute.Tensor,
        gScale: cute.Tensor,
        smem,
    ):
        """A tile of tokens, this thread's part of it ``rX`` times ``scale``, to gT and gScale."""
        tidx, _, _ = cute.arch.thread_idx()
        warp = tidx // 32
        warps = const_expr(self.threads // 32)
        columns = const_expr(self.padded_dim if per_channel else 1)
        top = cute.make_tensor(
            cute.recast_tensor(smem.codes, Float32).iterator, cute.make_layout((columns, warps))
        )
        largest = Float32(0.0)
        for v in cutlass.range_constexpr(self.vectors):
            x = self.scaled(rX, v, scale)
            for c in cutlass.range_constexpr(8):
                x[c] = cute.math.absf(x[c])
                if const_expr(per_channel):
                    for i in cutlass.range_constexpr((32 // self.lanes).bit_length() - 1):
                        other = cute.arch.shuffle_sync_bfly(x[c], self.lanes << i)
                        x[c] = ptx.max_nan(x[c], other)
                else:
                    largest = ptx.max_nan(largest, x[c])
            if const_expr(per_channel):
                at = (v * self.lanes + self.lane(),)
                if tidx % 32 < self.lanes:
                    cute.autovec_copy(x, cute.local_tile(top[None, warp], (8,), at))
        if const_expr(not per_channel):
            for i in cutlass.range_constexpr(5):
                largest = ptx.max_nan(largest, cute.arch.shuffle_sync_bfly(largest, 1 << i))
            if tidx % 32 == 0:
                top[0, warp] = largest
        forget(rX)
        cute.arch.sync_threads()

        blocks, share = const_expr(TILE // block), const_expr(warps * block // TILE)
        if tidx < blocks * self.padded_dim:
            channel, of_block = tidx % self.padded_dim, tidx // self.padded_dim
            column = channel if const_expr(per_channel) else 0
            for w in cutlass.range_constexpr(share):
                largest = ptx.max_nan(
                    Float32(0.0) if w == 0 else largest, top[column, of_block * share + w]
                )
            found, divisor, inverse, error, mask, tiny = scale_of(largest)
            four = cute.make_rmem_tensor(4, Float32)
            none = mask == 0
            four[0] = divisor
            four[1] = ptx.select(none, Float32(0.0), inverse)
            four[2] = ptx.select(none, Float32(0.0), error)
            four[3] = Float32(1.0)
            if tiny:
                four[3] = Float32(BOOST)
            cute.autovec_copy(four, smem.factors[None, channel, of_block])
            if channel < self.head_dim:
                gScale[tile * blocks + of_block, channel] = ptx.round22(found)
        cute.arch.sync_threads()

        codes = cute.make_rmem_tensor((8, self.vectors), Int8)
        words = cute.recast_tensor(codes, Int32)
        of_token = self.row() // block
        for v in cutlass.range_constexpr(self.vectors):
            x = self.scaled(rX, v, scale)
            for half in cutlass.range_constexpr(2):
                code = [
                    self.code_of(
                        x[4 * half + c],
                        smem.factors[
                            None, 8 * (v * self.lanes + self.lane()) + 4 * half + c, of_token
                        ],
                    )
                    for c in range(4)
                ]
                words[half, v] = pack4(code[0], code[1], code[2], code[3], Int32(-1))
        self.stage_codes(codes, smem.codes)
        cute.arch.sync_threads()
        self.store_transposed(gT, tile, smem.codes)
        cute.arch.sync_threads()  # shared memory may be used again

    @cute.jit
    def code_of(self, x, factors):
        """The code of x in the low byte; 0 where the scale is 0, anything where it is NaN."""
        four = cute.make_rmem_tensor(4, Float32)
        cute.autovec_copy(factors, four)
        largest = four[0] * 127.0
        x = cute.arch.fmax(cute.arch.fmin(x * four[3], largest), -largest)
        return round_codes(x, four[0], four[1], four[2])
