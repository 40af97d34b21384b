"""Which keys queries see, as launches take it: what of it is compiled in, and what is dynamic."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from sage_cute.config.problem import Lengths
from sage_cute.errors import DTypeError, ShapeError, UnsupportedError

Window = tuple[int | None, int | None]
EVERYTHING: Final[Window] = (None, None)
UNBOUNDED: Final = 1 << 30  # beyond any sequence; positions less and plus it still fit 32 bits


class Packed(NamedTuple):
    """Sequences one behind the other, in tensors (1, heads, total tokens, head_dim)."""

    cu_q: Tensor  # int32 (sequences + 1,), on the device: where queries of a sequence start
    cu_k: Tensor  # likewise for keys
    max_q: int  # no sequence has more queries: it bounds the grid
    max_k: int

    @property
    def sequences(self) -> int:
        """How many."""
        return self.cu_q.shape[0] - 1

    @property
    def is_empty(self) -> bool:
        """Whether there is no sequence, no query or no key, as far as the host knows."""
        return 0 in (self.sequences, self.max_q, self.max_k)


class Static(NamedTuple):
    """What kernels are compiled for: fields of a problem."""

    is_causal: bool
    window: bool = False
    lengths: Lengths = "dense"


class Visibility(NamedTuple):
    """Query i sees key j iff p - left <= j <= p + right, p = i + seqlen_k - seqlen_q.

    And iff j is below the key length, if there are any.
    """

    is_causal: bool  # right = 0
    window: Window = EVERYTHING  # (left, right); None: no bound
    key_lengths: Tensor | None = None  # int32 (batch,)
    packed: Packed | None = None

    @property
    def static(self) -> Static:
        """What is compiled in. A window that only says causal is causal."""
        left, right = self.window
        window = left is not None or (right is not None and right > 0 and not self.is_causal)
        lengths: Lengths = "dense" if self.packed is None else "packed"
        lengths = lengths if self.key_lengths is None else "padded"
        causal = self.is_causal or (right is not None and right <= 0)
        return Static(causal and not window, window, lengths)

    @property
    def is_dense(self) -> bool:
        """Whether nothing but is_causal says what is seen."""
        return self.static[1:] == (False, "dense")

    def reach(self) -> tuple[int, int]:
        """(left, right), whatever says so."""
        left, right = (UNBOUNDED if b is None else min(b, UNBOUNDED) for b in self.window)
        return left, 0 if self.is_causal else right

    def bounds(self) -> tuple[int | None, int | None]:
        """(left, right) for a kernel with a window; None, None without."""
        return self.reach() if self.static.window else (None, None)

    def offsets(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """(key_lengths, cu_q, cu_k) for a kernel."""
        packed = self.packed
        return self.key_lengths, packed and packed.cu_q, packed and packed.cu_k

    def check(self, batch: int, device: torch.device) -> None:
        """Raises where tensors are not as kernels read them."""
        if self.key_lengths is not None and self.packed is not None:
            raise UnsupportedError(
                "key_lengths of a packed batch: leave the tokens out of cu_seqlens_k instead"
            )
        expected: dict[str, tuple[Tensor, int]] = {}
        if self.key_lengths is not None:
            expected["key_lengths"] = self.key_lengths, batch
        if self.packed is not None:
            sequences = self.packed.cu_q.shape[0]
            expected["cu_seqlens_q"] = self.packed.cu_q, sequences
            expected["cu_seqlens_k"] = self.packed.cu_k, sequences
        for name, (x, size) in expected.items():
            if x.shape != (size,) or not x.is_contiguous():
                raise ShapeError(f"{name} is {tuple(x.shape)}: expected ({size},), contiguous")
            if x.dtype != torch.int32 or x.device != device:
                raise DTypeError(f"{name} is {x.dtype} on {x.device}: expected int32 on {device}")


class Layout:
    """Sizes of what has a row or a scale for some tokens, dense or packed."""

    def __init__(self, tokens: int, sequences: int | None) -> None:
        """Of ``tokens`` in each entry of a batch; or, of a packed one, in all ``sequences``."""
        self.tokens, self.sequences = tokens, sequences

    def groups(self, block: int) -> int:
        """How many scales, one for ``block`` tokens."""
        if block == 1 or self.sequences is None:
            return -(-self.tokens // block)
        return self.tokens // block + self.sequences

    def padded(self, tile: int = 128) -> int:
        """Rows where those of each sequence are padded to a tile."""
        return self.groups(tile) * tile


def vectors(lengths: Lengths) -> tuple[Any, Any, Any]:
    """(key_lengths, cu_q, cu_k) to compile with: symbolic sizes."""
    import cutlass
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_tensor

    def vector(there: bool) -> Any:
        if not there:
            return None
        return make_fake_tensor(cutlass.Int32, (cute.sym_int(),), (1,), assumed_align=4)

    packed = lengths == "packed"
    return vector(lengths == "padded"), vector(packed), vector(packed)


def numbers(there: bool) -> tuple[Any, Any]:
    """Two int32 to compile with, or None twice."""
    import cutlass

    return (cutlass.Int32(1), cutlass.Int32(1)) if there else (None, None)
