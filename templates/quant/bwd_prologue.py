"""What runs before the backward's attention kernels, one pass over each tensor."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int8, Int32, const_expr

from sage_cute.config import ARCHS, Status
from sage_cute.config.bwd import TILE_K, BwdProblem, default_bwd_config, supports_bwd
from sage_cute.templates.blocks import ptx, seqlen
from sage_cute.templates.blocks.bwd_schedule import visible_rows
from sage_cute.templates.quant.bwd_transposed import TransposedPrologue
from sage_cute.templates.quant.spec import TILE

LOG2_E = 1.4426950408889634
ARCH = ARCHS["sm_90a"]


class BwdInputs(NamedTuple):
    """What the forward and autograd left."""

    dout: cute.Tensor
    out: cute.Tensor
    lse: cute.Tensor
    dlse: cute.Tensor | None
    q: cute.Tensor
    q_scale: cute.Tensor
    k: cute.Tensor
    k_scale: cute.Tensor
    v: cute.Tensor | None


class BwdWorkspace(NamedTuple):
    """What the attention kernels read beside; None: another form of it, or none, is read."""

    q_hat: cute.Tensor | None
    k_hat: cute.Tensor | None
    dout8: cute.Tensor | None
    stats: cute.Tensor
    v: cute.Tensor | None
    v_scale: cute.Tensor | None
    q_t: cute.Tensor | None
    q_t_scale: cute.Tensor | None
    k_t: cute.Tensor | None
    k_t_scale: cute.Tensor | None
    dout_t: cute.Tensor | None
    dout_t_scale: cute.Tensor | None


class BwdPrologue(TransposedPrologue):
    """delta, dO and V in INT8, Q^ and K^ in bfloat16, V^ in 16 bit if a 16-bit dP takes it.

    Of an INT8 dV, dK or dQ: dO^T, Q^T or K^T in INT8 (``TransposedPrologue``) with scales for
    ``tile_q`` rows or ``TILE_K`` keys; Q^ or K^ is then not made.

    Layouts: those of ``sm90.bwd``. Inputs are (batch, heads, seqlen, head_dim), head_dim contiguous
    and rows on 16 bytes; out like dO; lse and dlse float32 (batch, heads, seqlen_q), natural log.
    Rows are the last queries that see a key: of those before nothing is made.

        delta  = rowsum(dO O) - dLSE, of the dequantized dO if dP is INT8
        stats  = q_scale scale log2 e, LSE log2 e (inf where it is -inf, so that P = 0),
                 -delta / do_scale, do_scale (1 if dP is in 16 bit)
        Q^     = do_scale times dequantized Q: dS is divided by do_scale

    Roles: all warps do the same. A CTA does one tile of 128 tokens: the first CTAs those of Q, dO
    and O, then those of K, then those of V. Tokens and lanes as in ``QuantizePrologue``.

    Pipelines: none.

    Shared memory: one maximum a warp, where V has a scale for many tokens; ``TransposedSmem``.
    """

    family = "sm90"
    direction = "quantize"
    roles = ("quantize",)

    def __init__(self, problem: BwdProblem, block_q: int, per_channel: bool):
        """Static facts only; ``supports`` says whether they fit."""
        if not (status := self.supports(problem)):
            raise ValueError(status.reason)
        self.problem, self.block_q, self.per_channel = problem, block_q, per_channel
        self.head_dim = problem.head_dim
        self.share_channels()
        self.pitch = self.transposed_pitch()

    @staticmethod
    def supports(problem: BwdProblem) -> Status:
        """Whether there is such a kernel."""
        return supports_bwd(problem, default_bwd_config(problem), ARCH)

    @cute.jit
    def __call__(
        self,
        dout: cute.Tensor,
        out: cute.Tensor,
        lse: cute.Tensor,
        dlse: cute.Tensor | None,
        q: cute.Tensor,
        q_scale: cute.Tensor,
        k: cute.Tensor,
        k_scale: cute.Tensor,
        v: cute.Tensor | None,
        q_hat: cute.Tensor | None,
        k_hat: cute.Tensor | None,
        dout8: cute.Tensor | None,
        stats: cute.Tensor,
        v_hat: cute.Tensor | None,
        v_scale: cute.Tensor | None,
        q_t: cute.Tensor | None,
        q_t_scale: cute.Tensor | None,
        k_t: cute.Tensor | None,
        k_t_scale: cute.Tensor | None,
        dout_t: cute.Tensor | None,
        dout_t_scale: cute.Tensor | None,
        scale_log2: Float32,
        stream,
    ):
        """One launch for all."""
        transposed = q_t, q_t_scale, k_t, k_t_scale, dout_t, dout_t_scale
        bounds = seqlen.Bounds()
        ctas_q = self.ctas(stats if const_expr(q_hat is None) else q_hat, bounds, None)
        ctas_k = self.ctas(k if const_expr(k_hat is None) else k_hat, bounds, None)
        ctas_v = ctas_k if const_expr(self.problem.block_v > 0) else Int32(0)
        self.kernel(
            BwdInputs(dout, out, lse, dlse, q, q_scale, k, k_scale, v),
            BwdWorkspace(q_hat, k_hat, dout8, stats, v_hat, v_scale, *transposed),
            scale_log2,
            ctas_q,
            ctas_k,
        ).launch(
            grid=(ctas_q + ctas_k + ctas_v, 1, 1),
            block=[self.threads, 1, 1],
            stream=stream,
            min_blocks_per_mp=1024 // self.threads,
            # percent; given, or compiling asks a GPU for it
            preferred_smem_carveout=60 if self.problem.tile_q or self.problem.dq_rows else 10,
        )

    @cute.kernel
    def kernel(
        self,
        x: BwdInputs,
        w: BwdWorkspace,
        scale_log2: Float32,
        ctas_q: Int32,
        ctas_k: Int32,
    ):
        """One tile."""
        cta, _, _ = cute.arch.block_idx()
        if cta < ctas_q:
            self.queries(cta, x, w, scale_log2)
        elif cta < ctas_q + ctas_k:
            self.keys(cta - ctas_q, x, w)
        else:
            if const_expr(self.problem.block_v > 0):
                self.values_of_v(cta - (ctas_q + ctas_k), x, w)

    @cute.jit
    def queries(self, cta, x, w, scale_log2):
        """Rows of Q, dO and O."""
        like = w.stats if const_expr(w.q_hat is None) else w.q_hat
        batch, head, tile = self.position(cta, like, None)
        rows = self.rows(x, w)
        blind = x.q.shape[2] - rows
        row = tile * TILE + self.row()
        rdO = self.load(_behind(x.dout[batch, head, None, None], blind, rows), tile, rows)
        rO = self.load(_behind(x.out[batch, head, None, None], blind, rows), tile, rows)
        delta, do_scale = Float32(0.0), Float32(1.0)
        if const_expr(self.problem.dp == "int8"):
            scales = self.scale(rdO, rows, tile, 1, None, None)
            codes = self.encode(rdO, scales, None)
            self.store_codes(codes, w.dout8[batch, head, None, None], tile, None)
            # a token of zeros: any scale will do, and delta may still have -dLSE
            do_scale = ptx.select(scales[0] == 0.0, Float32(1.0), scales[0])
            exact = cute.make_rmem_tensor(8, Float32)
            for v in cutlass.range_constexpr(self.vectors):
                exact.store(codes[None, v].load().to(Float32))
                delta = _add_product(delta, exact, self.values(rO, v, None))
        else:
            for v in cutlass.range_constexpr(self.vectors):
                delta = _add_product(delta, self.values(rdO, v, None), self.values(rO, v, None))
        for i in cutlass.range_constexpr(self.lanes.bit_length() - 1):
            delta = delta + cute.arch.shuffle_sync_bfly(delta, 1 << i)

        four = cute.make_rmem_tensor(4, Float32)
        four[0] = four[2] = four[3] = Float32(0.0)
        four[1] = Float32(float("inf"))
        q_scale = Float32(0.0)
        if row < rows:
            q_scale = x.q_scale[batch, head, (blind + row) // self.block_q]
            lse = x.lse[batch, head, blind + row] * LOG2_E
            if const_expr(x.dlse is not None):
                delta = delta - x.dlse[batch, head, blind + row] / do_scale
            four[0], four[2], four[3] = q_scale * scale_log2, -delta, do_scale
            four[1] = ptx.select(lse == Float32(float("-inf")), Float32(float("inf")), lse)
        if self.lane() == 0:
            cute.autovec_copy(four, w.stats[batch, head, row, None])
        source = _behind(x.q[batch, head, None, None], blind, rows)
        if const_expr(self.problem.dk_keys == 0):
            self.dequantize(source, q_scale * do_scale, w.q_hat[batch, head, None, None], tile)
        at, block = (batch, head, None, None), self.problem.tile_q
        if const_expr(block > 0):
            smem = self.allocate_transposed(block)
            if const_expr(self.problem.dk_keys > 0):
                rQ, to = self.load_codes(source, tile), (tile, w.q_t[at], w.q_t_scale[at])
                self.transpose(rQ, q_scale, block, self.per_channel, *to, smem)
            if const_expr(self.problem.dv_keys > 0):
                to = tile, w.dout_t[at], w.dout_t_scale[at]
                self.transpose(rdO, None, block, self.per_channel, *to, smem)

    def rows(self, x, w):
        """How many queries see a key."""
        if const_expr(w.q_hat is not None):
            return w.q_hat.shape[2]
        return visible_rows(x.q.shape[2], x.k.shape[2], causal=self.problem.is_causal)

    @cute.jit
    def keys(self, cta, x, w):
        """Rows of K."""
        like = x.k if const_expr(w.k_hat is None) else w.k_hat
        batch, head, tile = self.position(cta, like, None)
        row = tile * TILE + self.row()
        k_scale = Float32(0.0)
        if row < like.shape[2]:
            k_scale = x.k_scale[batch, head, row // self.problem.block_k]
        at = batch, head, None, None
        if const_expr(self.problem.dq_rows > 0):
            smem = self.allocate_transposed(TILE_K)
            rK, to = self.load_codes(x.k[at], tile), (tile, w.k_t[at], w.k_t_scale[at])
            self.transpose(rK, k_scale, TILE_K, self.per_channel, *to, smem)
        else:
            self.dequantize(x.k[at], k_scale, w.k_hat[at], tile)

    @cute.jit
    def values_of_v(self, cta, x, w):
        """Rows of V: the forward's codes again, not transposed, or what they stand for."""
        batch, head, tile = self.position(cta, x.v, None)
        tokens, block = x.v.shape[2], const_expr(self.problem.block_v)
        absmax = cutlass.memory.SmemAllocator().allocate_tensor(
            Float32, cute.make_layout(self.threads // 32), byte_alignment=16
        )
        rV = self.load(x.v[batch, head, None, None], tile, tokens)
        scales = self.scale(rV, tokens, tile, block, None, absmax)
        codes, target = self.encode(rV, scales, None), w.v[batch, head, None, None]
        row = tile * TILE + self.row()
        if const_expr(self.problem.dp == "int8"):
            if self.lane() == 0 and row % block == 0 and row < tokens:
                w.v_scale[batch, head, row // block] = scales[0]
            self.store_codes(codes, target, tile, None)
        else:
            for v in cutlass.range_constexpr(self.vectors):
                values = codes[None, v].load().to(Float32) * scales[0]
                rV[None, 0, v].store(values.to(target.element_type))
            if row < tokens:
                wide = self.tiled_copy(target.element_type, 128)
                tidx, _, _ = cute.arch.thread_idx()
                gV = wide.get_slice(tidx).partition_D(self.tile_of(target, tile))
                self.copy(wide, rV, gV)

    @cute.jit
    def dequantize(self, gX: cute.Tensor, scale, gOut: cute.Tensor, tile):
        """Codes gX (tokens, head_dim) times the token's scale, in bfloat16."""
        tidx, _, _ = cute.arch.thread_idx()
        codes, wide = self.tiled_copy(Int8, 64), self.tiled_copy(BFloat16, 128)
        source = codes.get_slice(tidx).partition_S(self.tile_of(gX, tile))
        target = wide.get_slice(tidx).partition_D(self.tile_of(gOut, tile))
        if tile * TILE + self.row() < gOut.shape[0]:
            rX = cute.make_fragment_like(source)
            self.copy(codes, source, rX)
            rOut = cute.make_fragment_like(target)
            rOut.store((rX.load().to(Float32) * scale).to(BFloat16))
            self.copy(wide, rOut, target)


def _add_product(total, a, b):
    """Total plus the inner product of 8 and 8 floats."""
    for i in range(8):
        total = ptx.fma(a[i], b[i], total)
    return total


def _behind(gX: cute.Tensor, blind, rows):
    """Rows from ``blind`` on of gX (tokens, head_dim)."""
    moved = cute.domain_offset((blind, 0), gX)
    shape = rows, gX.shape[1]
    return cute.make_tensor(moved.iterator, cute.make_layout(shape, stride=gX.layout.stride))
