"""What the ops compute, on any machine: the float64 truth and INT8 attention in plain torch."""

from sage_cute.numerics.backward import sage_backward
from sage_cute.numerics.forward import SageForward, Saved, sage_forward, saved_shapes
from sage_cute.numerics.metrics import cosine, rel_l2
from sage_cute.numerics.packed import (
    sage_backward_varlen,
    sage_forward_varlen,
    saved_shapes_varlen,
)
from sage_cute.numerics.quantize import Quantized, quantize
from sage_cute.numerics.reference import (
    Attention,
    Gradients,
    attention_reference,
    attention_reference_backward,
)

__all__ = [
    "Attention",
    "Gradients",
    "Quantized",
    "SageForward",
    "Saved",
    "attention_reference",
    "attention_reference_backward",
    "cosine",
    "quantize",
    "rel_l2",
    "sage_backward",
    "sage_backward_varlen",
    "sage_forward",
    "sage_forward_varlen",
    "saved_shapes",
    "saved_shapes_varlen",
]
