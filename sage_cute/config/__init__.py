"""What a kernel is compiled for, as data: standard library only, importable anywhere."""

from sage_cute.config.arch import ARCHS, Arch
from sage_cute.config.constraints import Status, fwd_registers, fwd_smem_bytes, supports_fwd
from sage_cute.config.defaults import default_fwd_config
from sage_cute.config.problem import AttnProblem
from sage_cute.config.tile_config import FwdTileConfig

__all__ = [
    "ARCHS",
    "Arch",
    "AttnProblem",
    "FwdTileConfig",
    "Status",
    "default_fwd_config",
    "fwd_registers",
    "fwd_smem_bytes",
    "supports_fwd",
]
