"""Names of policies, and the strings by which ops receive them.

A policy travels through ``torch.ops.sage.attn`` as a string: ``"fast"``, or a preset with changes,
``"fast:dp=16bit,smooth_k=false"``. The string says everything, so a compiled graph, a cache key or
a log line never depends on what was registered in a process.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, get_type_hints

from sage_cute.errors import PolicyError
from sage_cute.policies.policy import Policy

_SAGEBWD = Policy()
_INT8 = Policy(
    dp="int8",
    block_k=128,
    q_scale="per_token",
    v_scale="per_token",
    p_max=255,
    p_scale="bounded",
    bwd_block_q=64,
    p_bwd_scale="per_key",
    ds_dk_scale="per_key",
    ds_dq_rows=1,
    do_scale="per_token",
    transposed_scale="per_channel",
)
_FAST = _INT8.replace(dv="16bit", dk="16bit", dq="16bit")
PRESETS: dict[str, Policy] = {
    "sagebwd": _SAGEBWD,
    "fast": _FAST,
    "accurate": _FAST.replace(dp="16bit", dp_v="dequantized", p_scale="per_block"),
    "int8": _INT8,
}
"""``int8`` is all seven products in INT8; ``fast`` and ``accurate`` are what the rule in the README
makes of the one GPU family with kernels, Hopper, whose 16-bit dV, dK and dQ take fewer instructions
than INT8 ones (which must quantize P^T and dS^T) and are more accurate."""

DEFAULT = "fast"
"""By the rule: ``accurate`` only if it takes at most 10 % longer than ``fast``."""


def policies() -> dict[str, Policy]:
    """Every preset by name, ``"default"`` included; ``print`` one to see its mix."""
    return {**PRESETS, "default": PRESETS[DEFAULT]}


@functools.lru_cache(maxsize=256)
def resolve(spec: str) -> Policy:
    """The mix that a policy string stands for.

    Args:
        spec: ``NAME`` or ``NAME:field=value,...`` with a preset's name (or ``default``) and fields
            of :class:`Policy`.

    Raises:
        PolicyError: an unknown name (the message lists the known ones), field or value.
    """
    name, _, changes = spec.partition(":")
    known = policies()
    if name not in known:
        raise PolicyError(f"unknown policy {name!r}; known policies: {', '.join(known)}")
    return known[name].replace(**_parse(changes)) if changes else known[name]


@functools.lru_cache(maxsize=256)
def canonical(spec: str) -> str:
    """The shortest string for the same mix: ``default`` named, unchanged fields dropped."""
    policy = resolve(spec)
    name = spec.partition(":")[0]
    base_name = DEFAULT if name == "default" else name
    base = PRESETS[base_name].asdict()
    changes = [f"{k}={_show(v)}" for k, v in policy.asdict().items() if v != base[k]]
    return f"{base_name}:{','.join(changes)}" if changes else base_name


def _show(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _parse(changes: str) -> dict[str, Any]:
    hints = get_type_hints(Policy)
    integers = {f.name for f in dataclasses.fields(Policy) if isinstance(f.default, int)}
    overrides: dict[str, Any] = {}
    for item in changes.split(","):
        field, eq, text = (part.strip() for part in item.partition("="))
        if not eq or field not in hints:
            raise PolicyError(
                f"policy change {item!r}: write field=value with a field of "
                + ", ".join(f.name for f in dataclasses.fields(Policy))
            )
        if hints[field] is bool:
            if text.lower() not in ("true", "false"):
                raise PolicyError(f"policy field {field}={text}: true or false")
            overrides[field] = text.lower() == "true"
        elif field in integers:
            try:
                overrides[field] = int(text)
            except ValueError:
                raise PolicyError(f"policy field {field}={text}: an integer") from None
        else:
            overrides[field] = text
    return overrides
