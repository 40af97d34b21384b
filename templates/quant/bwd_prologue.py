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

    dout: cute.Tensor | None
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
    Rows are the last queries that see a key: of those before nothing is made. Of a ragged problem
    they are all queries, those that see no key made zeros whatever they hold, with a copy of dO for
    products in 16 bit; everything made of a packed batch has the rows of each sequence padded to
    128 (``blocks.seqlen``), zeros: what the products contract must be finite.

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
        dout_copy: cute.Tensor | None,
        scale_log2: Float32,
        left: Int32 | None,
        right: Int32 | None,
        key_lengths: cute.Tensor | None,
        cu_q: cute.Tensor | None,
        cu_k: cute.Tensor | None,
        max_q: Int32 | None,
        max_k: Int32 | None,
        stream,
    ):
        """One launch for all."""
        transposed = q_t, q_t_scale, k_t, k_t_scale, dout_t, dout_t_scale
        bounds = seqlen.Bounds(left, right, key_lengths, cu_q, cu_k, max_q, max_k)
        ctas_q = self.ctas(stats if const_expr(q_hat is None) else q_hat, bounds, max_q)
        ctas_k = self.ctas(k if const_expr(k_hat is None) else k_hat, bounds, max_k)
        ctas_v = ctas_k if const_expr(self.problem.block_v > 0) else Int32(0)
        self.kernel(
            BwdInputs(dout, out, lse, dlse, q, q_scale, k, k_scale, v),
            BwdWorkspace(dout_copy, q_hat, k_hat, dout8, stats, v_hat, v_scale, *transposed),
            scale_log2,
            bounds,
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
        bounds: seqlen.Bounds,
        ctas_q: Int32,
        ctas_k: Int32,
    ):
        """One tile."""
        cta, _, _ = cute.arch.block_idx()
        if cta < ctas_q:
            self.queries(cta, x, w, scale_log2, bounds)
        elif cta < ctas_q + ctas_k:
            self.keys(cta - ctas_q, x, w, bounds)
        else:
            if const_expr(self.problem.block_v > 0):
                self.values_of_v(cta - (ctas_q + ctas_k), x, w, bounds)

    def sequence(self, bounds, index, x):
        """The sequence of a CTA."""
        p = self.problem
        sizes = x.q.shape[2], x.k.shape[2]
        return seqlen.sequence(p.lengths, p.is_causal, bounds, index, *sizes)

    def padded(self, tile):
        """Rows up to the end of a tile, where the padding is made too; None: all of a tensor."""
        return (tile + 1) * TILE if self.problem.lengths == "packed" else None

    @cute.jit
    def queries(self, cta, x, w, scale_log2, bounds):
        """Rows of Q, dO and O."""
        like = w.stats if const_expr(w.q_hat is None) else w.q_hat
        index, head, tile = self.position(cta, like, bounds.max_q)
        if const_expr(not self.problem.ragged):
            rows = self.rows(x, w)
            seq = seqlen.dense(index, rows, x.k.shape[2], causal=self.problem.is_causal)
            blind = x.q.shape[2] - rows
            self.rows_of_queries(x, w, seq, head, tile, rows, blind, None, scale_log2)
        else:
            seq = self.sequence(bounds, index, x)
            if tile * TILE < seq.seqlen_q:
                seen = seqlen.seeing(seq)
                self.rows_of_queries(x, w, seq, head, tile, seq.seqlen_q, 0, seen, scale_log2)

    @cute.jit
    def rows_of_queries(
        self,
        x,
        w,
        seq: cutlass.Constexpr,
        head,
        tile,
        rows,
        blind,
        seen: cutlass.Constexpr,
        scale_log2,
    ):
        """A tile of the ``rows`` queries behind ``blind`` ones; seen: (first, end) that count."""
        row = tile * TILE + self.row()
        at, to = (seq.batch, head, None, None), seqlen.padded_q(seq)
        of = seqlen.behind(seq.first_q, blind)
        rdO = self.load(_behind(x.dout[at], of, rows), tile, rows, seen)
        rO = self.load(_behind(x.out[at], of, rows), tile, rows, seen)
        if const_expr(w.dout is not None):
            self.store_rows(rdO, seqlen.from_row(w.dout[at], to), tile, self.padded(tile))
        delta, do_scale = Float32(0.0), Float32(1.0)
        if const_expr(self.problem.dp == "int8"):
            scales = self.scale(rdO, rows, tile, 1, None, None)
            codes = self.encode(rdO, scales, None)
            gCodes = seqlen.from_row(w.dout8[at], to)
            self.store_codes(codes, gCodes, tile, self.padded(tile))
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
        counts = row < rows
        if const_expr(seen is not None):
            counts = (row >= seen[0]) & (row < seen[1])
        first_group = seqlen.group_q(seq, self.block_q)
        if counts:
            group = seqlen.behind(first_group, (blind + row) // self.block_q)
            q_scale = x.q_scale[seq.batch, head, group]
            token = seqlen.behind(seq.first_q, blind + row)
            lse = x.lse[seq.batch, head, token] * LOG2_E
            if const_expr(x.dlse is not None):
                delta = delta - x.dlse[seq.batch, head, token] / do_scale
            four[0], four[2], four[3] = q_scale * scale_log2, -delta, do_scale
            four[1] = ptx.select(lse == Float32(float("-inf")), Float32(float("inf")), lse)
        if self.lane() == 0:
            cute.autovec_copy(four, w.stats[seq.batch, head, seqlen.behind(to, row), None])
        source = _behind(x.q[at], of, rows)
        if const_expr(self.problem.dk_keys == 0):
            scale = q_scale * do_scale
            self.dequantize(source, scale, seqlen.from_row(w.q_hat[at], to), tile, rows)
        block = self.problem.tile_q
        if const_expr(block > 0):
            smem = self.allocate_transposed(block)
            if const_expr(self.problem.dk_keys > 0):
                rQ = self.load_codes(source, tile, rows)
                into = self.transposed_of(tile, w.q_t[at], w.q_t_scale[at], to, block)
                self.transpose(rQ, q_scale, block, self.per_channel, *into, smem)
            if const_expr(self.problem.dv_keys > 0):
                into = self.transposed_of(tile, w.dout_t[at], w.dout_t_scale[at], to, block)
                self.transpose(rdO, None, block, self.per_channel, *into, smem)

    def transposed_of(self, tile, gT, gScale, first, block):
        """Where ``transpose`` writes a tile of tokens that are counted from ``first``."""
        groups = first if isinstance(first, int) else first // block
        return tile, seqlen.from_column(gT, first), seqlen.from_row(gScale, groups)

    def rows(self, x, w):
        """How many queries see a key."""
        if const_expr(w.q_hat is not None):
            return w.q_hat.shape[2]
        return visible_rows(x.q.shape[2], x.k.shape[2], causal=self.problem.is_causal)

    @cute.jit
    def keys(self, cta, x, w, bounds):
        """Rows of K."""
        like = x.k if const_expr(w.k_hat is None) else w.k_hat
        index, head, tile = self.position(cta, like, bounds.max_k)
        if const_expr(not self.problem.ragged):
            seq = seqlen.dense(index, 0, like.shape[2], causal=self.problem.is_causal)
            self.rows_of_keys(x, w, seq, head, tile)
        else:
            seq = self.sequence(bounds, index, x)
            if tile * TILE < seq.seqlen_k:
                self.rows_of_keys(x, w, seq, head, tile)

    @cute.jit
    def rows_of_keys(self, x, w, seq: cutlass.Constexpr, head, tile):
        """A tile of K."""
        row = tile * TILE + self.row()
        at, to = (seq.batch, head, None, None), seqlen.padded_k(seq)
        k_scale = Float32(0.0)
        first_group = seqlen.group_k(seq, self.problem.block_k)
        if row < seq.keys:
            group = seqlen.behind(first_group, row // self.problem.block_k)
            k_scale = x.k_scale[seq.batch, head, group]
        gX = seqlen.from_row(x.k[at], seq.first_k)
        if const_expr(self.problem.dq_rows > 0):
            smem = self.allocate_transposed(TILE_K)
            rK = self.load_codes(gX, tile, self.packed(seq.seqlen_k))
            into = self.transposed_of(tile, w.k_t[at], w.k_t_scale[at], to, TILE_K)
            self.transpose(rK, k_scale, TILE_K, self.per_channel, *into, smem)
        else:
            self.dequantize(gX, k_scale, seqlen.from_row(w.k_hat[at], to), tile, seq.seqlen_k)

    def packed(self, tokens):
        """Tokens of a sequence where its tensor has others behind them; else None."""
        return tokens if self.problem.lengths == "packed" else None

    @cute.jit
    def values_of_v(self, cta, x, w, bounds):
        """Rows of V: the forward's codes again, not transposed, or what they stand for."""
        index, head, tile = self.position(cta, x.v, bounds.max_k)
        if const_expr(not self.problem.ragged):
            seq = seqlen.dense(index, 0, x.v.shape[2], causal=self.problem.is_causal)
            self.rows_of_v(x, w, seq, head, tile)
        else:
            seq = self.sequence(bounds, index, x)
            if tile * TILE < seq.seqlen_k:
                self.rows_of_v(x, w, seq, head, tile)

    @cute.jit
    def rows_of_v(self, x, w, seq: cutlass.Constexpr, head, tile):
        """A tile of V."""
        tokens, block = seq.seqlen_k, const_expr(self.problem.block_v)
        at, to = (seq.batch, head, None, None), seqlen.padded_k(seq)
        absmax = cutlass.memory.SmemAllocator().allocate_tensor(
            Float32, cute.make_layout(self.threads // 32), byte_alignment=16
        )
        rV = self.load(seqlen.from_row(x.v[at], seq.first_k), tile, seq.keys)
        scales = self.scale(rV, seq.keys, tile, block, None, absmax)
        codes = self.encode(rV, scales, None)
        target = seqlen.from_row(w.v[at], to)
        row = tile * TILE + self.row()
        if const_expr(self.problem.dp == "int8"):
            first_group = to if const_expr(isinstance(to, int)) else to // block
            if self.lane() == 0 and row % block == 0 and row < tokens:
                w.v_scale[seq.batch, head, seqlen.behind(first_group, row // block)] = scales[0]
            self.store_codes(codes, target, tile, self.padded(tile))
        else:
            for v in cutlass.range_constexpr(self.vectors):
                values = codes[None, v].load().to(Float32) * scales[0]
                rV[None, 0, v].store(values.to(target.element_type))
            self.store_rows(rV, target, tile, tokens)

    @cute.jit
    def store_rows(self, rX: cute.Tensor, gX: cute.Tensor, tile, tokens):
        """16-bit rows to gX (tokens, head_dim), as far as there are ``tokens``; None: to all."""
        if tile * TILE + self.row() < (gX.shape[0] if tokens is None else tokens):
            wide = self.tiled_copy(gX.element_type, 128)
            tidx, _, _ = cute.arch.thread_idx()
            self.copy(wide, rX, wide.get_slice(tidx).partition_D(self.tile_of(gX, tile)))

    @cute.jit
    def dequantize(self, gX: cute.Tensor, scale, gOut: cute.Tensor, tile, tokens):
        """Codes gX (tokens, head_dim) times the token's scale, in bfloat16.

        Of a packed batch with zeros behind the tokens of the sequence, up to the end of the tile.
        """
        tidx, _, _ = cute.arch.thread_idx()
        codes, wide = self.tiled_copy(Int8, 64), self.tiled_copy(BFloat16, 128)
        source = codes.get_slice(tidx).partition_S(self.tile_of(gX, tile))
        target = wide.get_slice(tidx).partition_D(self.tile_of(gOut, tile))
        if const_expr(self.problem.lengths == "packed"):
            rX = cute.make_fragment_like(source)
            rX.fill(0)
            if tile * TILE + self.row() < tokens:
                self.copy(codes, source, rX)
            rOut = cute.make_fragment_like(target)
            rOut.store((rX.load().to(Float32) * scale).to(BFloat16))
            self.copy(wide, rOut, target)
        else:
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
