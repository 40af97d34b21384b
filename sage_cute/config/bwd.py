"""The backward kernel as data: its problem, its tile configuration, what fits."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Literal

from sage_cute.config.arch import Arch
from sage_cute.config.constraints import Status, consumer_registers
from sage_cute.config.problem import DType
from sage_cute.limits import HOPPER

if TYPE_CHECKING:
    from sage_cute.policies import Policy

Precision = Literal["int8", "16bit"]
ROW_TILE = 128
"""Rows of the workspace are padded to it: a multiple of every tile of queries."""
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

    @classmethod
    def of(cls, policy: Policy, *, head_dim: int, dtype: DType, is_causal: bool) -> BwdProblem:
        """The backward problem of a policy. Ask ``sage_cute.limits`` first."""
        per_token_v = policy.v_scale == "per_token"
        return cls(
            head_dim=head_dim,
            dtype=dtype,
            is_causal=is_causal,
            block_k=1 if policy.k_scale == "per_token" else policy.block_k,
            block_v=(1 if per_token_v else policy.block_k) if policy.dequantized_v_in_dp else 0,
            dp=policy.dp,
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
    if problem.padded_dim == 256:
        small = problem.dp == "16bit"
        return BwdTileConfig(
            tile_m=48 if small else 64,
            column_splits=2,
            dq_num_stages=1 if small else 2,
        )
    # dP in 16 bit reads dO of the next tile while dV still reads that of this one. Scales of single
    # keys and causal masks take registers that statistics of queries would otherwise have.
    ahead = 2 if problem.block_k < 128 else 3 if problem.is_causal else 4
    return BwdTileConfig(num_stages=2 if problem.dp == "int8" else 3, ahead=ahead)


def bwd_smem_bytes(problem: BwdProblem, config: BwdTileConfig) -> tuple[int, int]:
    """Shared memory of a CTA of the key kernel and of the query kernel."""
    c, d, cols = config, problem.padded_dim, problem.padded_dim // config.column_splits
    int8_dp = problem.dp == "int8"
    v = d if int8_dp else 2 * d  # bytes of a token of V, or of dO, in dP
    dout = d + 2 * cols if int8_dp else 2 * d
    keys = c.tile_n * (d + v) + c.num_stages * c.tile_m * (d + dout + 2 * cols + 12)
    queries = 64 * c.dq_num_consumer_wgs * (d + v)
    queries += c.dq_num_stages * c.dq_tile_n * (d + v + 2 * d + 8)
    return 2048 + keys, 2048 + queries


def bwd_registers(problem: BwdProblem, config: BwdTileConfig) -> tuple[int, int]:
    """Registers that a consumer thread of each kernel keeps alive at the peak of an iteration."""
    c = config
    more = 0 if problem.dtype == "bfloat16" else c.tile_m // 4  # P for dV and for dS
    keys = problem.padded_dim // c.column_splits + c.tile_m + c.tile_m // 2 + more
    queries = problem.padded_dim // 2 + c.dq_tile_n + c.dq_tile_n // 4
    return keys + _STATE_REGISTERS, queries + _STATE_REGISTERS


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
    return ""


def _shape_reason(problem: BwdProblem, config: BwdTileConfig) -> str:
    c = config
    if c.num_consumer_wgs not in (1, 2, 3) or c.tile_n != 64 * c.num_consumer_wgs:
        return f"tile_n={c.tile_n}: 64 keys for each of 1 to 3 consumer warpgroups"
    if c.dq_num_consumer_wgs not in (1, 2, 3):
        return f"dq_num_consumer_wgs={c.dq_num_consumer_wgs}: 1 to 3 consumer warpgroups"
    for name in ("tile_m", "dq_tile_n"):
        if getattr(c, name) % 16 or not 16 <= getattr(c, name) <= 128:
            return f"{name}={getattr(c, name)}: a multiple of 16, 16 to 128"
    if c.column_splits not in (1, 2) or problem.padded_dim // c.column_splits not in (64, 128):
        return f"column_splits={c.column_splits}: a CTA owns 64 or 128 columns of head_dim"
    if not 1 <= c.ahead <= 16:
        return f"ahead={c.ahead}: 1 to 16 column groups"
    if c.num_stages < 2:
        return f"num_stages={c.num_stages}: queries need two buffers at least"
    if c.dq_num_stages < 1:
        return f"dq_num_stages={c.dq_num_stages}: keys need a buffer"
    return ""
