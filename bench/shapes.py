"""The shapes that are measured."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Shape:
    """One attention problem: self-attention of ``seqlen`` tokens."""

    batch: int
    heads: int
    kv_heads: int
    seqlen: int
    head_dim: int
    causal: bool
    window: int | None = None  # with causal: keys before its own that a query sees; None: all

    @property
    def name(self) -> str:
        """Short, for tables."""
        heads = str(self.heads) if self.heads == self.kv_heads else f"{self.heads}:{self.kv_heads}"
        return f"({self.batch}, {heads}, {self.seqlen}, {self.head_dim}) {self.mask}"

    @property
    def mask(self) -> str:
        """Which keys are seen, in words."""
        if self.window is not None:
            return f"causal, window {self.window}"
        return "causal" if self.causal else "full"

    def flops(self, mode: str) -> int:
        """4 b h n n d operations forward, 10 backward, half for causal: the usual count.

        With a window those of the pairs of query and key that it leaves.
        """
        products = {"fwd": 2, "bwd": 5, "fwd_bwd": 7}[mode]
        n = self.seqlen
        pairs = n * n // 2 if self.causal else n * n
        if self.window is not None:
            seen = min(self.window + 1, n)  # by all queries but the first ones
            pairs = seen * (seen + 1) // 2 + (n - seen) * seen
        return 2 * products * self.batch * self.heads * pairs * self.head_dim


def _square(batch_heads: int, seqlen: int) -> list[Shape]:
    return [
        Shape(1, batch_heads, batch_heads, seqlen, head_dim, causal)
        for head_dim in (128, 64)
        for causal in (False, True)
    ]


PRESETS: dict[str, list[Shape]] = {
    "main": [
        *_square(32, 1024),
        *_square(32, 4096),
        *_square(16, 16384),
        *_square(8, 32768),
        Shape(1, 32, 8, 8192, 128, True),  # GQA
        Shape(1, 24, 24, 32760, 128, False),  # video diffusion, ragged
        Shape(1, 16, 16, 16384, 128, True, window=1024),
    ],
    "goals": [
        Shape(1, 16, 16, 16384, 128, False),
        Shape(1, 16, 16, 16384, 128, True),
        Shape(1, 16, 16, 16384, 64, False),
        Shape(1, 32, 32, 4096, 128, False),
        Shape(1, 32, 32, 1024, 128, False),
    ],
    "smoke": [
        Shape(1, 4, 2, 130, 64, True),
        Shape(1, 2, 2, 100, 32, False),
        Shape(1, 2, 1, 300, 32, True, window=40),
    ],
}
