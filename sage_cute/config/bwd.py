"""The backward kernel as data: its problem, its tile configuration, what fits."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Literal

from sage_cute.config.arch import Arch
from sage_cute.config.constraints import Status, consumer_registers
from sage_cute.config.problem import DType, Lengths
from sage_cute.limits import HOPPER

if TYPE_CHECKING:
    from sage_cute.policies import Policy

Precision = Literal["int8", "16bit"]
ROW_TILE = 128
"""Rows of the workspace are padded to it: a multiple of every tile of queries."""
TILE_K = 64
"""Keys of a warpgroup of the key kernel, and of a tile of the query kernel: where P^T, dS^T or dS
has one scale for a tile of keys, it is this many."""
SLICE = 64
"""Columns of an INT8 product that are in a thread's registers at once, before they are added up."""
_STATE_REGISTERS = 12  # scales, addresses, loop counters


@dataclasses.dataclass(frozen=True)
class BwdProblem:
    """Everything about a backward call that is compiled into the attention kernel.

    Lengths, batch, heads, strides, the softmax scale and how Q is scaled are dynamic.
    """

    head_dim: int
    dtype: DType  # of dO, V and the gradients
    is_causal: bool
    block_k: int  # keys per scale of K
    block_v: int  # keys per scale of V; 0: dP takes V as given
    dp: Precision
    # INT8 products: over how much of the other side their left operand has one scale.
    dv_keys: int = 0  # keys per scale of P^T: 1 or TILE_K; 0: dV in 16 bit
    dk_keys: int = 0  # keys per scale of dS^T: 1 or TILE_K; 0: dK in 16 bit
    dq_rows: int = 0  # queries per scale of dS: 1, 8 or those of a tile; 0: dQ in 16 bit
    tile_q: int = 0  # queries per scale of P^T, dS^T, dO^T and Q^T; 0: dV and dK in 16 bit
    window: bool = False  # bounds to the left and right of the diagonal, both dynamic
    lengths: Lengths = "dense"

    @property
    def ragged(self) -> bool:
        """Whether queries that see no key may be among the rows.

        The kernels then read a copy of dO in which those are zeros, and ask each sequence what it
        sees (``templates.blocks.seqlen``). Under a dense causal mask they are cut off, unless rows
        share scales with others: tiles of queries are counted from the first query.
        """
        shared = self.tile_q > 0 or self.dq_rows > 1
        return self.window or self.lengths != "dense" or (self.is_causal and shared)

    @property
    def copies_dout(self) -> bool:
        """Whether there is a 16-bit product of such a copy."""
        masks = self.window or self.lengths != "dense"  # else dP masks them, whatever they hold
        return self.ragged and (self.dv_keys == 0 or (masks and self.dp == "16bit"))

    @classmethod
    def of(
        cls,
        policy: Policy,
        *,
        head_dim: int,
        dtype: DType,
        is_causal: bool,
        window: bool = False,
        lengths: Lengths = "dense",
    ) -> BwdProblem:
        """The backward problem of a policy. Ask ``sage_cute.limits`` first.

        A causal mask beside a window is a window whose right bound is 0.
        """
        per_token_v = policy.v_scale == "per_token"
        dv_keys = 1 if policy.p_bwd_scale == "per_key" else policy.bwd_block_k
        dk_keys = 1 if policy.ds_dk_scale == "per_key" else policy.bwd_block_k
        dv_keys, dk_keys = dv_keys * (policy.dv == "int8"), dk_keys * (policy.dk == "int8")
        dq_rows = policy.ds_dq_rows or policy.bwd_block_q
        return cls(
            head_dim=head_dim,
            dtype=dtype,
            is_causal=is_causal and not window,
            window=window,
            lengths=lengths,
            block_k=1 if policy.k_scale == "per_token" else policy.block_k,
            block_v=(1 if per_token_v else policy.block_k) if policy.dequantized_v_in_dp else 0,
            dp=policy.dp,
            dv_keys=dv_keys,
            dk_keys=dk_keys,
            dq_rows=dq_rows if policy.dq == "int8" else 0,
            tile_q=policy.bwd_block_q if dv_keys or dk_keys else 0,
        )

    @property
    def padded_dim(self) -> int:
        """head_dim as the products see it; TMA fills up with zeros."""
        return 64 if self.head_dim <= 64 else 128 if self.head_dim <= 128 else 256


@dataclasses.dataclass(frozen=True)
class BwdTileConfig:
    """How the two backward kernels walk their problem; none of it changes what is computed."""

    # dK and dV: a CTA keeps keys and walks queries.
    tile_m: int = 64  # queries of an iteration
    tile_n: int = 128  # keys of a CTA
    num_stages: int = 2  # buffers of queries and their gradients
    num_consumer_wgs: int = 2  # warpgroups that compute, 64 keys each
    query_wgs: int = 1
    """Warpgroups that share 64 keys and each take as large a part of the iteration's queries; their
    sums are added at the end. A scale for 128 queries needs two: a warpgroup's registers hold the
    scores of 64."""
    ahead: int = 4  # column groups (8 queries) whose statistics are loaded before they are needed
    column_splits: int = 1  # CTAs that share the columns of dK and dV (and all repeat S and dP)
    # dQ: a CTA keeps queries and walks keys.
    dq_tile_n: int = 64  # keys of an iteration
    dq_num_stages: int = 2  # buffers of keys and values
    dq_num_consumer_wgs: int = 2  # warpgroups that compute, 64 queries each
    packed_ds: bool = True
    """dS as the product of two packed bfloat16, dP - delta rounded too; else of two floats: about
    .003 instead of .004 off the CPU implementation, for three instructions more a pair."""

    def asdict(self) -> dict[str, Any]:
        """Field names and values, JSON-able."""
        return dataclasses.asdict(self)


def default_bwd_config(problem: BwdProblem) -> BwdTileConfig:
    """Picked by hand from measurements on an H200 (docs/backward-kernel.md)."""
    large = problem.padded_dim == 256 and problem.dp == "16bit"
    # dP in 16 bit reads dO of the next tile while dV still reads that of this one. Scales of single
    # keys and causal masks take registers that statistics of queries would otherwise have.
    ahead = 2 if problem.block_k < 128 else 3 if problem.is_causal else 4
    stages = 2 if problem.dp == "int8" else 3
    config = BwdTileConfig(num_stages=stages, ahead=ahead)
    int8 = problem.tile_q or problem.dq_rows
    if problem.padded_dim == 64 and problem.dp == "int8" and not (int8 or problem.ragged):
        # scales of single keys would not fit into the registers of three warpgroups
        wgs = 2 if problem.block_k < TILE_K else 3
        config = dataclasses.replace(config, num_stages=4, dq_num_consumer_wgs=wgs)
    if problem.padded_dim == 256:
        config = BwdTileConfig(
            tile_m=(32 if problem.lengths == "packed" else 48) if large else 64,
            column_splits=2,
            dq_num_stages=1 if large else 2,
        )
    if problem.tile_q:
        config = dataclasses.replace(
            config,
            tile_m=problem.tile_q,
            tile_n=128 * 64 // problem.tile_q,
            query_wgs=problem.tile_q // 64,
            num_stages=1 if large else 2,
        )
    return config


def bwd_smem_bytes(problem: BwdProblem, config: BwdTileConfig) -> tuple[int, int]:
    """Shared memory of a CTA of the key kernel and of the query kernel."""
    c, d, cols = config, problem.padded_dim, problem.padded_dim // config.column_splits
    int8_dp = problem.dp == "int8"
    v = d if int8_dp else 2 * d  # bytes of a token of V, or of dO, in dP
    # Of a query: dO of dP unless dV takes the same one, of dV, Q of dK; statistics.
    dout = (v if int8_dp or problem.dv_keys else 0) + (
        cols if problem.dv_keys else 2 * cols if int8_dp else 2 * d
    )
    q = cols if problem.dk_keys else 2 * cols
    statistics = 16 if problem.dk_keys and int8_dp else 12
    channels = 4 * cols * (bool(problem.dv_keys) + bool(problem.dk_keys))  # their scales
    exchange = 256 * 4 if problem.tile_q else 0
    keys = c.tile_n * (d + v)
    keys += c.num_stages * (c.tile_m * (d + dout + q + statistics) + channels + exchange)
    queries = 64 * c.dq_num_consumer_wgs * (d + v)
    of_k = d if problem.dq_rows else 2 * d
    queries += c.dq_num_stages * c.dq_tile_n * (d + v + of_k + 8)
    if problem.dq_rows:
        queries += c.dq_num_stages * (4 * d + 128)
    return 2048 + keys, 2048 + queries


def bwd_registers(problem: BwdProblem, config: BwdTileConfig) -> tuple[int, int]:
    """Registers that a consumer thread of each kernel keeps alive at the peak of an iteration."""
    c, cols = config, problem.padded_dim // config.column_splits
    if problem.tile_q:  # scores in float, then two slices of an INT8 product; codes, or 16 bit
        rows = c.tile_m // c.query_wgs
        keys = cols + max(rows, 2 * SLICE // 2) + rows // 2
    else:
        more = 0 if problem.dtype == "bfloat16" else c.tile_m // 4  # P for dV and for dS
        keys = cols + c.tile_m + c.tile_m // 2 + more
    queries = problem.padded_dim // 2 + c.dq_tile_n + c.dq_tile_n // 4
    return keys + _STATE_REGISTERS, queries + _STATE_REGISTERS


def operands_in_registers(
    problem: BwdProblem, config: BwdTileConfig, arch: Arch
) -> tuple[bool, bool]:
    """Whether what S and dP read all along stays in registers: K and V, Q and dO of the kernels.

    Where there is room, with a margin that masks take; INT8 gradients' slices leave none.
    """
    more = problem.padded_dim // 8 * (2 if problem.dp == "int8" else 3) + 24
    keys, queries = (need + more for need in bwd_registers(problem, config))
    have = consumer_registers
    return (
        not problem.tile_q and keys <= have(config.num_consumer_wgs, arch),
        not problem.dq_rows and queries <= have(config.dq_num_consumer_wgs, arch),
    )


def supports_bwd(problem: BwdProblem, config: BwdTileConfig, arch: Arch) -> Status:
    """Whether the backward templates take this configuration; the reason if not."""
    for check in (_problem_reason, _shape_reason):
        if reason := check(problem, config):
            return Status(False, reason)
    wgs = config.num_consumer_wgs, config.dq_num_consumer_wgs
    for smem, need, n in zip(
        bwd_smem_bytes(problem, config), bwd_registers(problem, config), wgs, strict=True
    ):
        if smem > arch.smem_bytes:
            return Status(
                False, f"shared memory {smem} of {arch.smem_bytes} bytes: take fewer stages"
            )
        have = consumer_registers(n, arch)
        if need > have + 24:  # a few may be rematerialized
            return Status(False, f"{need} registers a thread of {have}: take smaller tiles")
    return Status(True)


def _problem_reason(problem: BwdProblem, config: BwdTileConfig) -> str:
    if reason := HOPPER.why_not_head_dim(problem.head_dim):
        return reason
    for name in ("block_k", "block_v"):
        if getattr(problem, name) not in (0, 1, 16, 32, 64, 128):
            return f"{name}={getattr(problem, name)}: the kernel takes 16 to 128 keys a scale"
    if problem.tile_q and config.tile_m != problem.tile_q:
        return f"tile_m={config.tile_m}: must be the policy's bwd_block_q={problem.tile_q}"
    if problem.dq_rows and config.dq_tile_n != TILE_K:
        return f"dq_tile_n={config.dq_tile_n}: must be the policy's bwd_block_k={TILE_K}"
    if problem.dq_rows > 8 and 64 * config.dq_num_consumer_wgs % problem.dq_rows:
        return (
            f"dq_num_consumer_wgs={config.dq_num_consumer_wgs}: must be whole tiles of the policy's"
            f" {problem.dq_rows} queries"
        )
    return ""


def _shape_reason(problem: BwdProblem, config: BwdTileConfig) -> str:
    c = config
    if c.num_consumer_wgs not in (1, 2, 3) or c.tile_n * c.query_wgs != 64 * c.num_consumer_wgs:
        return f"tile_n={c.tile_n}: 64 keys for each of 1 to 3 consumer warpgroups"
    if c.query_wgs != max(problem.tile_q // 64, 1):
        return f"query_wgs={c.query_wgs}: one for 64 queries of the policy's scale for P^T and dS^T"
    if c.dq_num_consumer_wgs not in (1, 2, 3):
        return f"dq_num_consumer_wgs={c.dq_num_consumer_wgs}: 1 to 3 consumer warpgroups"
    for name in ("tile_m", "dq_tile_n"):
        if getattr(c, name) % 16 or not 16 <= getattr(c, name) <= 128:
            return f"{name}={getattr(c, name)}: a multiple of 16, 16 to 128"
        if problem.lengths == "packed" and 128 % getattr(c, name):
            return f"{name}={getattr(c, name)}: a packed batch needs a divisor of 128"
    if c.column_splits not in (1, 2) or problem.padded_dim // c.column_splits not in (64, 128):
        return f"column_splits={c.column_splits}: a CTA owns 64 or 128 columns of head_dim"
    if not 1 <= c.ahead <= 16:
        return f"ahead={c.ahead}: 1 to 16 column groups"
    if c.num_stages < (1 if problem.tile_q else 2):
        return f"num_stages={c.num_stages}: queries need two buffers at least"
    if c.dq_num_stages < 1:
        return f"dq_num_stages={c.dq_num_stages}: keys need a buffer"
    return ""
