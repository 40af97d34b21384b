"""Which sequence a CTA works on, and which keys each of its queries sees.

Every role of every kernel asks here, so that those who load and those who compute walk the same
tiles. Query i of a sequence is at p = i + seqlen_k - seqlen_q among the keys and sees key j iff

    p - left <= j <= p + right  and  j < keys

with keys = seqlen_k, or the key length of the batch entry. Causal is right = 0. Lengths are

    dense    those of the tensors
    padded   likewise, with key_lengths: keys from there on do not count
    packed   sequences one behind the other: sequence b has tokens cu[b] .. cu[b + 1] - 1 of tensors
             whose batch is 1. Blocks of tokens are counted from the start of a sequence: those of
             sequence b begin at index cu[b] // block + b, which leaves room for a block that is not
             full. Where rows are padded to 128 (V^T, the backward's workspace), they begin at
             128 (cu[b] // 128 + b).
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from sage_cute.templates.blocks import ptx

TILE = 128


class Bounds(NamedTuple):
    """A kernel's arguments about masks and lengths; None: not there, whatever the problem says."""

    left: Any = None  # int32
    right: Any = None  # int32
    key_lengths: Any = None  # int32 (batch,)
    cu_q: Any = None  # int32 (batch + 1,)
    cu_k: Any = None  # int32 (batch + 1,)
    max_q: Any = None  # int32, no sequence is longer
    max_k: Any = None  # int32


class Sequence(NamedTuple):
    """One sequence, and what its queries see. Integers of Python where that is known at once."""

    index: Any
    batch: Any  # of tensors of tokens
    first_q: Any  # its first token, likewise
    first_k: Any
    seqlen_q: Any
    seqlen_k: Any
    keys: Any
    left: Any  # None: no bound
    right: Any


# Functions, not methods: the DSL takes a method call in a dynamic branch for a change of its
# object, and makes its integers of Python dynamic.


def group_q(seq: Sequence, block: int):
    """Index of the sequence's first block of queries."""
    return _first_group(seq.first_q, seq.index, block)


def group_k(seq: Sequence, block: int):
    """Index of its first block of keys."""
    return _first_group(seq.first_k, seq.index, block)


def padded_q(seq: Sequence):
    """Its first row where queries are padded to 128."""
    return _first_group(seq.first_q, seq.index, TILE) * TILE


def padded_k(seq: Sequence):
    """Its first row where keys are padded to 128."""
    return _first_group(seq.first_k, seq.index, TILE) * TILE


def _first_group(first, index, block: int):
    if isinstance(first, int) or block == 1:
        return first
    return first // block + index


def sequence(lengths: str, is_causal: bool, bounds: Bounds, index, seqlen_q, seqlen_k) -> Sequence:
    """Sequence ``index``; seqlen_q and seqlen_k are those of the tensors."""
    right = 0 if is_causal else bounds.right
    if const_expr(lengths == "packed"):
        first_q, first_k = bounds.cu_q[index], bounds.cu_k[index]
        num_q, num_k = bounds.cu_q[index + 1] - first_q, bounds.cu_k[index + 1] - first_k
        return Sequence(index, 0, first_q, first_k, num_q, num_k, num_k, bounds.left, right)
    keys = seqlen_k
    if const_expr(lengths == "padded"):
        keys = cutlass.max(cutlass.min(bounds.key_lengths[index], seqlen_k), 0)
    return Sequence(index, index, 0, 0, seqlen_q, seqlen_k, keys, bounds.left, right)


def dense(batch, seqlen_q, seqlen_k, *, causal: bool) -> Sequence:
    """An entry of a dense batch without a window."""
    right = 0 if causal else None
    return Sequence(batch, batch, 0, 0, seqlen_q, seqlen_k, seqlen_k, None, right)


def num_sequences(bounds: Bounds, tensor):
    """How many there are; ``tensor`` is (..., batch)."""
    return tensor.shape[3] if const_expr(bounds.cu_q is None) else bounds.cu_q.shape[0] - 1


def rows_from(tensor, head, batch, first):
    """Rows from ``first`` on of one head of a tensor (rows, columns, heads, batch)."""
    of_head = tensor[None, None, head, batch]
    return from_row(of_head, first)


def behind(first, i):
    """Index i, counted from ``first``."""
    return i if const_expr(isinstance(first, int)) else first + i


def from_row(tensor, first):
    """A tensor (rows, columns) from row ``first`` on."""
    return tensor if const_expr(isinstance(first, int)) else cute.domain_offset((first, 0), tensor)


def from_column(tensor, first):
    """A tensor (rows, columns) from column ``first`` on."""
    return tensor if const_expr(isinstance(first, int)) else cute.domain_offset((0, first), tensor)


def from_index(vector, first):
    """A vector from index ``first`` on."""
    return vector if const_expr(isinstance(first, int)) else cute.domain_offset((first,), vector)


def seeing(seq: Sequence):
    """(first, end) of the queries that see a key."""
    first, end, offset = Int32(0), seq.seqlen_q, seq.seqlen_k - seq.seqlen_q
    if const_expr(seq.right is not None):
        first = cutlass.max(-offset - seq.right, 0)
    if const_expr(seq.left is not None):
        end = cutlass.min(end, seq.keys - offset + seq.left)
    return first, ptx.select(seq.keys > 0, end, Int32(0))


def key_end(row, seq: Sequence):
    """Keys below this one are visible to query ``row`` (as far as they are not below key_start)."""
    if const_expr(seq.right is None):
        return seq.keys
    end = row + 1 + seq.seqlen_k - seq.seqlen_q
    if const_expr(not isinstance(seq.right, int)):
        end = end + seq.right
    return cutlass.min(end, seq.keys)


def key_start(row, seq: Sequence):
    """The first key that query ``row`` sees."""
    return cutlass.max(row + seq.seqlen_k - seq.seqlen_q - seq.left, 0)


class KeyBlocks(NamedTuple):
    """Blocks of keys, walked from the last one down to ``first``."""

    first: Any
    count: Any


def block_of(blocks: KeyBlocks, step):
    """The block of a step."""
    if const_expr(isinstance(blocks.first, int)):
        return blocks.count - 1 - step
    return blocks.first + blocks.count - 1 - step


def key_blocks(tile, rows: int, seq: Sequence, block: int) -> KeyBlocks:
    """Blocks of keys of which some query of a tile of ``rows`` sees one."""
    count = cute.ceil_div(cutlass.max(key_end((tile + 1) * rows - 1, seq), 0), block)
    first = 0
    if const_expr(seq.left is not None):
        first = key_start(tile * rows, seq) // block
        count = cutlass.max(count - first, 0)
    if const_expr(not isinstance(seq.first_q, int)):  # a tile behind a packed sequence
        count = ptx.select(tile * rows < seq.seqlen_q, count, Int32(0))
    return KeyBlocks(first, count)


def whole_blocks(first_row, rows: int, seq: Sequence, block: int) -> KeyBlocks:
    """Blocks that each of the queries sees whole, whether it exists or not: they need no mask."""
    count = cutlass.max(key_end(first_row, seq), 0) // block
    if const_expr(seq.left is None):
        return KeyBlocks(0, count)
    first = cute.ceil_div(key_start(first_row + rows - 1, seq), block)
    return KeyBlocks(first, count - first)
