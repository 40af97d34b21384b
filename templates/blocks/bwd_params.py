"""Device-side bundles of the backward, so that device functions take few arguments."""

from typing import Any, NamedTuple


class BwdTensors(NamedTuple):
    """Whole tensors in global memory; operands of products as (rows, columns, heads, batch)."""

    q: Any
    k: Any
    v: Any
    dout: Any  # of dP
    values: Any  # of the gradients' products: dO and Q^, or K^; transposed for INT8
    stats: Any
    k_scale: Any
    v_scale: Any
    out: Any  # gradients: dK and dV, or dQ
    channels: Any = None  # scales of the channels of INT8 values


class BwdShared(NamedTuple):
    """Tiles in shared memory."""

    q: Any
    k: Any
    v: Any
    dout: Any
    values: Any
    stats: Any
    channels: Any = None
    maxima: Any = None  # where warps agree on scales of INT8 products
    partial: Any = None  # where warpgroups that share keys add up their sums


class BwdPipes(NamedTuple):
    """Pipelines: what a CTA keeps; operands of S and dP; operands of the gradients' products."""

    kept: Any
    codes: Any
    values: Any


class BwdWork(NamedTuple):
    """This CTA's work."""

    rows: Any  # queries that see any key; of a ragged problem all
    blind: Any  # queries before them, under a dense causal mask
    seqlen_k: Any
    seq: Any
    offset: Any  # row r sees keys up to r + offset
    group: Any
    tile: Any
    span: Any  # tiles of queries, or of keys, that it walks


class BwdKeyOperands(NamedTuple):
    """Fragments of a consumer thread of the key kernel, and where its elements lie."""

    mmas: Any  # S, dP, dV, dK
    k: Any
    q: Any
    v: Any
    dout: Any
    p: Any  # registers
    dout_t: Any
    ds_t: Any  # registers
    q_t: Any
    p_words: Any
    p_bf16: Any  # P as dS takes it: p_words, or registers of its own for float16
    ds_words: Any
    s_shape: Any
    stats: Any
    quad: Any
    k_scale: Any  # (factors, -MAGIC times them) of the thread's two keys; None: one for the tile
    v_scale: Any  # likewise; None: dP in 16 bit
    first_seen: Any
    seen_end: Any  # of a window; else None


class BwdInt8Operands(NamedTuple):
    """What INT8 products of a consumer thread need beside; where two, of dV and of dK."""

    values: Any  # (slice) -> B
    channels: Any
    groups: Any
    maxima: Any


class BwdQueryOperands(NamedTuple):
    """Fragments of a consumer thread of the query kernel, and where its elements lie."""

    mmas: Any  # S, dP, dQ
    q: Any
    k: Any
    dout: Any
    v: Any
    ds: Any  # registers
    k_t: Any
    ds_words: Any
    s_shape: Any
    stats: Any
    quad: Any
    q_scale: Any
    lse: Any
    delta: Any
    visible: Any
    first_seen: Any  # of a window; else None
