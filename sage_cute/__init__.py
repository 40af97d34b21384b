"""Attention that trains in INT8: ``torch.ops.sage.attn`` and :func:`sage_cute.attention`.

Importing this registers the ops. It needs no GPU, no driver and no CuTe DSL.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import sage_cute.compile_integration  # noqa: F401  registers torch.ops.sage
from sage_cute import errors, nn
from sage_cute._version import __version__
from sage_cute.api import attention, attention_varlen
from sage_cute.merge import merge_attention
from sage_cute.policies import policies
from sage_cute.support import Support, is_supported

if TYPE_CHECKING:
    from sage_cute.diagnosis import diagnose

__all__ = [
    "Support",
    "__version__",
    "attention",
    "attention_varlen",
    "diagnose",
    "errors",
    "is_supported",
    "merge_attention",
    "nn",
    "policies",
]


def __getattr__(name: str) -> Any:
    """``diagnose`` when it is asked for: what it needs is a fifth of the time of an import."""
    if name != "diagnose":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from sage_cute.diagnosis import diagnose

    return diagnose
