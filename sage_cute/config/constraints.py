"""Which configurations can run: the only place with shared-memory and register arithmetic."""

from __future__ import annotations

import dataclasses

from sage_cute.config.arch import Arch
from sage_cute.config.problem import AttnProblem
from sage_cute.config.tile_config import FwdTileConfig
from sage_cute.limits import HOPPER

PRODUCER_REGISTERS = 24
_ROW_STATE_REGISTERS = 36  # row statistics, column factors in flight, addresses, loop counters


@dataclasses.dataclass(frozen=True)
class Status:
    """Whether something is supported, and if not why, with the remedy."""

    ok: bool
    reason: str = ""

    def __bool__(self) -> bool:
        return self.ok


def fwd_smem_bytes(problem: AttnProblem, config: FwdTileConfig) -> int:
    """Shared memory of a CTA: Q, the stages of K, V and scales, barriers, alignment."""
    q = config.tile_m * problem.padded_dim
    kv = 2 * config.tile_n * problem.padded_dim
    scales = config.tile_n * 2 + 8  # half a word a key; (k, v) a block
    barriers = 16 * (1 + config.num_stages)
    return q + config.num_stages * (kv + scales) + barriers + 3 * 1024


def consumer_registers(num_consumer_wgs: int, arch: Arch) -> int:
    """Registers a consumer thread gets once the producer has given up its own.

    ``setmaxnreg`` moves registers within what the CTA was launched with, an equal multiple of 8 for
    each thread: asking for more than that waits forever.
    """
    threads = 128 * (1 + num_consumer_wgs)
    launched = min(arch.registers // threads // 8 * 8, 248) * threads
    left = launched - 128 * PRODUCER_REGISTERS
    return min(arch.max_registers, left // (128 * num_consumer_wgs) // 8 * 8)


def fwd_registers(problem: AttnProblem, config: FwdTileConfig) -> int:
    """Registers that a consumer thread keeps alive at the peak of an iteration."""
    scores, output = config.tile_n // 2, problem.padded_dim // 2
    if config.overlap:  # scores and the product in flight live together
        live = scores + 2 * output + config.tile_n // 8
    else:
        live = output + max(scores, output // config.pv_slices + config.tile_n // 8)
    return live + _ROW_STATE_REGISTERS


def supports_fwd(problem: AttnProblem, config: FwdTileConfig, arch: Arch) -> Status:
    """Whether the forward template takes this configuration; the reason if not."""
    for check in (_problem_reason, _shape_reason, _resource_reason):
        if reason := check(problem, config, arch):
            return Status(False, reason)
    return Status(True)


def _problem_reason(problem: AttnProblem, config: FwdTileConfig, arch: Arch) -> str:
    if reason := HOPPER.why_not_head_dim(problem.head_dim):
        return reason
    if problem.block_k not in (32, 64, 128):
        return f"block_k={problem.block_k}: the kernel takes 32, 64 or 128 keys a block"
    return ""


def _shape_reason(problem: AttnProblem, config: FwdTileConfig, arch: Arch) -> str:
    c = config
    if c.tile_n != problem.block_k:
        return f"tile_n={c.tile_n}: must be the policy's block_k={problem.block_k}"
    if c.num_consumer_wgs not in (1, 2, 3) or c.tile_m != 64 * c.num_consumer_wgs:
        return f"tile_m={c.tile_m}: 64 queries for each of 1 to 3 consumer warpgroups"
    if c.num_stages < 2:
        return f"num_stages={c.num_stages}: K and V need two buffers at least"
    if c.pv_slices < 1 or problem.padded_dim % (16 * c.pv_slices):
        return f"pv_slices={c.pv_slices}: slices of head_dim must be multiples of 16"
    if c.overlap and c.pv_slices > 1:
        return f"pv_slices={c.pv_slices}: with overlap P V is one product; set overlap=False"
    if not 0 <= c.exp_fma_of_8 <= 8:
        return f"exp_fma_of_8={c.exp_fma_of_8}: 0 to 8"
    if c.pingpong and c.num_consumer_wgs < 2:
        return "pingpong=True needs two consumer warpgroups"
    if c.longest_first and not problem.is_causal:
        return "longest_first=True: tiles differ in length under a causal mask only"
    return ""


def _resource_reason(problem: AttnProblem, config: FwdTileConfig, arch: Arch) -> str:
    smem = fwd_smem_bytes(problem, config)
    if smem > arch.smem_bytes:
        return f"shared memory {smem} of {arch.smem_bytes} bytes: take fewer stages"
    need, have = fwd_registers(problem, config), consumer_registers(config.num_consumer_wgs, arch)
    if need > have + 24:  # a few may be rematerialized
        return f"{need} registers a thread of {have}: take fewer warpgroups or no overlap"
    return ""
