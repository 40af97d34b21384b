"""How far a tensor is from the truth."""

from __future__ import annotations

from torch import Tensor


def rel_l2(x: Tensor, truth: Tensor) -> float:
    """|x - truth| / |truth| in the 2-norm over all elements; 0 for equal tensors."""
    x, truth = x.double(), truth.double()
    error = (x - truth).norm().item()
    return error / truth.norm().clamp_min(1e-300).item() if error else 0.0


def cosine(x: Tensor, truth: Tensor) -> float:
    """Cosine between the flattened tensors; 1 for two zero tensors."""
    x, truth = x.double().flatten(), truth.double().flatten()
    norms = (x.norm() * truth.norm()).item()
    return (x @ truth).item() / norms if norms else float(x.norm() == truth.norm())
