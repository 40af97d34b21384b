"""Kernels for Hopper: TMA, wgmma, warp specialization."""
