"""Names and schemas of the ops, and the library object that owns them.

``sage::attn``, ``sage::attn_varlen`` and their ``_with_lse`` are what users call. They are
composites: a graph holds ``attn_fwd`` + ``attn_backward`` (``attn_varlen_fwd`` and so on) where
gradients are needed and ``attn_infer`` elsewhere. Tensors are positional (DTensor takes no others)
and everything static is a plain argument; -1 is a window without end.
"""

from __future__ import annotations

import torch

NAMESPACE = "sage"
LIB = torch.library.Library(NAMESPACE, "FRAGMENT")  # deregisters everything when collected
TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)

_PUBLIC = (
    "(Tensor q, Tensor k, Tensor v, Tensor? key_lengths=None, Tensor? k_mean=None, *, "
    "bool is_causal=False, int window_left=-1, int window_right=-1, float? scale=None, "
    'str policy="default")'
)
# What the backward gets too: the forward's arguments but for k_mean, which is among its outputs.
_STATIC = (
    "float? scale, bool is_causal, str policy, Tensor? key_lengths=None, int window_left=-1, "
    "int window_right=-1"
)
_KERNEL = f"(Tensor q, Tensor k, Tensor v, {_STATIC}, Tensor? k_mean=None)"
_SAVED = (
    "Tensor q_codes, Tensor k_codes, Tensor q_scale, Tensor k_scale, Tensor q_mean, Tensor k_mean"
)
# q and k only for policies that do not save their codes.
_GIVEN = (
    f"Tensor dout, Tensor? dlse, Tensor? q, Tensor? k, Tensor v, Tensor out, Tensor lse, {_SAVED}"
)
_PACKED_PUBLIC = (
    "(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, "
    "Tensor? k_mean=None, *, SymInt? max_seqlen_q=None, SymInt? max_seqlen_k=None, "
    "bool is_causal=False, int window_left=-1, int window_right=-1, float? scale=None, "
    'str policy="default")'
)
_PACKED_STATIC = (
    "float? scale, bool is_causal, str policy, Tensor cu_seqlens_q, Tensor cu_seqlens_k, "
    "SymInt? max_seqlen_q, SymInt? max_seqlen_k, int window_left=-1, int window_right=-1"
)
_PACKED_KERNEL = f"(Tensor q, Tensor k, Tensor v, {_PACKED_STATIC}, Tensor? k_mean=None)"
SCHEMAS = {
    "attn": f"{_PUBLIC} -> Tensor",
    "attn_with_lse": f"{_PUBLIC} -> (Tensor out, Tensor lse)",
    # lse is that of the smoothed K: k_mean holds what is missing to the original K's.
    "attn_infer": f"{_KERNEL} -> (Tensor out, Tensor lse, Tensor k_mean)",
    "attn_fwd": f"{_KERNEL} -> (Tensor out, Tensor lse, {_SAVED})",
    "attn_backward": f"({_GIVEN}, {_STATIC}) -> (Tensor dq, Tensor dk, Tensor dv)",
    "attn_varlen": f"{_PACKED_PUBLIC} -> Tensor",
    "attn_varlen_with_lse": f"{_PACKED_PUBLIC} -> (Tensor out, Tensor lse)",
    "attn_varlen_infer": f"{_PACKED_KERNEL} -> (Tensor out, Tensor lse, Tensor k_mean)",
    "attn_varlen_fwd": f"{_PACKED_KERNEL} -> (Tensor out, Tensor lse, {_SAVED})",
    "attn_varlen_backward": (f"({_GIVEN}, {_PACKED_STATIC}) -> (Tensor dq, Tensor dk, Tensor dv)"),
}
for _name, _schema in SCHEMAS.items():
    LIB.define(_name + _schema, tags=TAGS)


def op(name: str) -> torch._ops.OpOverload:
    """The overload of one of our ops, which is cheaper to call than its packet."""
    overload: torch._ops.OpOverload = getattr(getattr(torch.ops, NAMESPACE), name).default
    return overload
