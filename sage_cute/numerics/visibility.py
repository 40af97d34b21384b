"""Which keys a query sees: a band around the diagonal, over the keys that are there.

Key j is visible to query i iff  p - left <= j <= p + right  with  p = i + seqlen_k - seqlen_q  (the
sizes of the tensors: bottom-right). Causal is right = 0. Padding takes keys off the end and leaves
the diagonal where it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

Window = tuple[int | None, int | None]
"""How many keys before and after its own position a query sees; None: all of them."""

EVERYTHING: Window = (None, None)
QUERY_TILE = 64
"""Queries that share the choice of :meth:`Visibility.bounded`: those of a kernel's warpgroup."""


class Visibility(NamedTuple):
    """The rule above for one sequence, or a batch of sequences of the same lengths."""

    seqlen_q: int
    seqlen_k: int  # keys that are there, without padding
    offset: int  # position of query 0 among the keys
    left: int | None
    right: int | None

    @classmethod
    def of(
        cls, seqlen_q: int, seqlen_k: int, causal: bool, window: Window = EVERYTHING
    ) -> Visibility:
        """The rule for tensors of these lengths; a window's sizes are at least 0."""
        left, right = window
        return cls(seqlen_q, seqlen_k, seqlen_k - seqlen_q, left, 0 if causal else right)

    def padded_from(self, length: int) -> Visibility:
        """The same rule where only the first ``length`` keys are there."""
        return self._replace(seqlen_k=length)

    def _between(self, first: int, last: int) -> slice:
        """Queries of which key ``first`` is within the right reach and ``last`` within the left."""
        start = 0 if self.right is None else max(0, first - self.offset - self.right)
        stop = self.seqlen_q
        if self.left is not None:
            stop = min(stop, last - self.offset + self.left + 1)
        return slice(start, stop) if start < stop else slice(0, 0)

    def seeing(self, keys: slice | None = None) -> slice:
        """The queries that see one of these keys at least; None: of all keys."""
        keys = slice(0, self.seqlen_k) if keys is None else keys
        return self._between(keys.start, keys.stop - 1) if keys.start < keys.stop else slice(0, 0)

    def seeing_all(self, keys: slice) -> slice:
        """The queries that see each of these keys, of which there is one at least."""
        return self._between(keys.stop - 1, keys.start)

    def bounded(self, keys: slice, block: int) -> slice:
        """The queries whose P of a block of keys may be quantized against its bound (``p_scale``).

        Kernels take the exact way wherever they mask: in a block that the keys do not fill, and for
        a group of ``QUERY_TILE`` queries unless the first and the last of it see the whole block,
        the last one whether it exists or not. (And everywhere under a negative softmax scale.)
        """
        if keys.stop - keys.start < block:
            return slice(0, 0)
        unending = self._replace(seqlen_q=-(-self.seqlen_q // QUERY_TILE) * QUERY_TILE)
        rows = unending.seeing_all(keys)
        start = -(-rows.start // QUERY_TILE) * QUERY_TILE
        stop = min(rows.stop // QUERY_TILE * QUERY_TILE, self.seqlen_q)
        return slice(start, stop) if start < stop else slice(0, 0)

    def blocks(self, block: int, tile: int = 1) -> Iterator[tuple[slice, slice, Tensor | None]]:
        """Yields (keys, queries, which queries see which; None: all) for every block that is seen.

        The queries are those that see a key of the block, from the start of a tile of ``tile`` on.
        """
        for start in range(0, self.seqlen_k, block):
            keys = slice(start, min(start + block, self.seqlen_k))
            rows = self.seeing(keys)
            if rows.start == rows.stop:
                continue
            rows = slice(rows.start // tile * tile, rows.stop)
            every = self.seeing_all(keys)
            whole = every.start <= rows.start and rows.stop <= every.stop
            yield keys, rows, None if whole else self._mask(keys, rows)

    def _mask(self, keys: slice, queries: slice) -> Tensor:
        positions = torch.arange(queries.start, queries.stop).unsqueeze(-1) + self.offset
        distance = torch.arange(keys.start, keys.stop) - positions
        mask = torch.ones_like(distance, dtype=torch.bool)
        if self.left is not None:
            mask &= distance >= -self.left
        if self.right is not None:
            mask &= distance <= self.right
        return mask


def only(x: Tensor, tokens: slice) -> Tensor:
    """X (..., seqlen, head_dim), 0 but for some tokens.

    What queries hold that see no key must not set a scale of others, nor bring them a NaN.
    """
    seqlen = x.shape[-2]
    if tokens == slice(0, seqlen):
        return x
    pads = (0, 0, tokens.start, seqlen - tokens.stop)
    return torch.nn.functional.pad(x[..., tokens, :], pads)
