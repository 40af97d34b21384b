"""Quantization policies: which products are INT8, and at which granularity."""

from sage_cute.policies.policy import PRODUCTS, Policy
from sage_cute.policies.registry import DEFAULT, PRESETS, canonical, policies, resolve

__all__ = ["DEFAULT", "PRESETS", "PRODUCTS", "Policy", "canonical", "policies", "resolve"]
