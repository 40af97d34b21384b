"""One attention call beside float64 attention: errors of every policy, and what explains them.

Works on one sequence and one key head (with its query heads) at a time, and on ``QUERY_CHUNK``
queries of them: the largest tensors are float64 (query heads of a key head, 512, seqlen_k).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sage_cute.diagnosis.record import Call
from sage_cute.numerics import attention_reference, attention_reference_backward
from sage_cute.numerics.reference import visible
from sage_cute.policies import PRODUCTS, canonical, resolve
from sage_cute.support import is_supported
from sage_cute.testing import TENSORS, Inputs, Result, run_attention

SIXTEEN_BIT = "16-bit"
"""All seven products with operands in 16 bits (bfloat16 for float32 inputs), no smoothing: by the
reference, and on a GPU by torch's SDPA where that computes the same."""
OTHER_SMOOTHING = "smooth_k"
"""The first policy with K smoothing the other way: off where the policy has it."""
QK_NORM = "qk_norm"
"""The first policy on the same Q and K with every token RMS-normalized, beside its own truth."""
QUERY_CHUNK = 512
OUTLIER = 6.0  # times the RMS of a head

_KEY_TENSORS = ("dv", "dk")  # of key heads; the others are of query heads


class Errors(NamedTuple):
    """How far a tensor of a layer is from the truth: by head, and the whole layer's.

    A head whose true gradient is next to nothing (a saturated sink) may be off by more than 1 and
    yet not matter: the layer's figures weigh heads by their norm, as the weights' gradients do.
    """

    rel_l2: list[float]
    cosine: list[float]
    norm: list[float]  # share of a head in the truth's squared norm
    layer_rel_l2: float
    layer_cosine: float


class Deviation:
    """Sums from which :class:`Errors` follow, over any number of calls."""

    def __init__(self, heads: int) -> None:
        self._sums = torch.zeros(4, heads, dtype=torch.float64)  # error^2, truth^2, x^2, x truth

    def add(self, heads: slice, x: Tensor, truth: Tensor) -> None:
        """Takes x and truth, (1, heads of the slice, tokens, head_dim)."""
        x, truth = x.double(), truth.double().to(x.device)
        pairs = (x - truth, x - truth), (truth, truth), (x, x), (x, truth)
        for row, (a, b) in zip(self._sums, pairs, strict=True):
            row[heads] += (a * b).sum((0, 2, 3)).cpu()

    @property
    def errors(self) -> Errors:
        """Relative L2: 0 for equal tensors, inf where only the truth is 0.

        Cosine: 1 for two zeros, 0 where only one of them is.
        """
        every = torch.cat((self._sums, self._sums.sum(1, keepdim=True)), 1)
        error, truth, x, dot = every
        rel_l2 = torch.where(error == 0, 0.0, (error / truth).sqrt()).tolist()
        both = (truth * x).sqrt()
        cosine = torch.where(both != 0, dot / both, (truth == x).double()).tolist()
        norm = (truth[:-1] / truth[-1].clamp_min(1e-300)).tolist()
        return Errors(rel_l2[:-1], cosine[:-1], norm, rel_l2[-1], cosine[-1])


class Measurement:
    """Sums of one layer over sequences and steps.

    ``errors[policy][tensor]`` has one entry a query head (out, dq) or key head (dv, dk);
    ``mean(name)`` the mean of a magnitude over what was added, an entry a head likewise.
    """

    def __init__(self, call: Call, columns: Iterable[str]) -> None:
        self.call = call
        self.heads, self.kv_heads = call.x.q.shape[1], call.x.k.shape[1]
        self.sequences = 0
        self.evaluated_on: dict[str, str] = {}
        heads = {t: self.kv_heads if t in _KEY_TENSORS else self.heads for t in TENSORS}
        self.errors = {c: {t: Deviation(heads[t]) for t in TENSORS} for c in columns}
        self._sums: dict[str, Tensor] = {}

    def add(self, name: str, heads: slice, values: Tensor, *, per_key_head: bool = False) -> None:
        """Adds a sequence's figure of some heads."""
        count = self.kv_heads if per_key_head else self.heads
        sums = self._sums.setdefault(name, torch.zeros(count, dtype=torch.float64))
        sums[heads] += values.double().flatten().cpu()

    def means(self) -> dict[str, list[float]]:
        """Of everything that was added, by name."""
        return {name: (sums / self.sequences).tolist() for name, sums in self._sums.items()}


def columns_of(policies: Sequence[str]) -> dict[str, str]:
    """What is compared: its name, and its policy string.

    Raises:
        PolicyError: an unknown policy.
    """
    first = policies[0]
    smoothed = str(not resolve(first).smooth_k).lower()
    other = f"{first}{',' if ':' in first else ':'}smooth_k={smoothed}"
    sixteen_bit = ",".join(f"{product}=16bit" for product in PRODUCTS)
    return {
        SIXTEEN_BIT: f"sagebwd:{sixteen_bit},smooth_k=false",
        **{policy: canonical(policy) for policy in policies},
        OTHER_SMOOTHING: canonical(other),
        QK_NORM: canonical(first),
    }


def measure(into: Measurement, call: Call, columns: dict[str, str], sequences: int) -> None:
    """Adds the first ``sequences`` sequences of a call."""
    group = into.heads // into.kv_heads
    for index in range(min(sequences, call.x.q.shape[0])):
        into.sequences += 1
        for kv_head in range(into.kv_heads):
            heads, kv = slice(kv_head * group, (kv_head + 1) * group), slice(kv_head, kv_head + 1)
            one = slice(index, index + 1)
            q, k, v, dout = call.x
            x = Inputs(q[one, heads], k[one, kv], v[one, kv], dout[one, heads])
            dlse = None if call.dlse is None else call.dlse[one, heads]
            _measure_head(into, call, x, dlse, heads, kv, columns)


def _measure_head(
    into: Measurement,
    call: Call,
    x: Inputs,
    dlse: Tensor | None,
    heads: slice,
    kv: slice,
    columns: dict[str, str],
) -> None:
    truth = _truth(into, call, x, dlse, heads)
    _describe(into, x, heads, kv)
    normalized = x._replace(q=_rms_norm(x.q), k=_rms_norm(x.k))
    bounded = _truth(None, call, normalized, dlse, heads)
    for column, policy in columns.items():
        of, beside = (normalized, bounded) if column == QK_NORM else (x, truth)
        result = _evaluate(into, call, of, dlse, column, policy)
        for name in TENSORS:
            where = kv if name in _KEY_TENSORS else heads
            into.errors[column][name].add(where, getattr(result, name), getattr(beside, name))


def _evaluate(
    into: Measurement, call: Call, x: Inputs, dlse: Tensor | None, column: str, policy: str
) -> Result:
    """Attention by a policy, where the model is if the op can run it there, else on the CPU."""
    device = x.q.device
    aligned = not call.causal or x.q.shape[2] == x.k.shape[2]
    with torch.enable_grad(), torch.autocast(device.type, enabled=False):
        if column == SIXTEEN_BIT and device.type == "cuda" and dlse is None and aligned:
            into.evaluated_on[column] = f"{device}: SDPA"
            return sdpa_16_bit(x, call.causal, call.scale)
        leaves = (t.detach().requires_grad_() for t in (x.q, x.k, x.v))
        if not is_supported(*leaves, causal=call.causal, scale=call.scale, policy=policy):
            x, dlse = x.to("cpu"), None if dlse is None else dlse.cpu()
        into.evaluated_on[column] = str(x.q.device)
        return run_attention(x, policy=policy, causal=call.causal, scale=call.scale, dlse=dlse)


def sdpa_16_bit(x: Inputs, causal: bool, scale: float | None) -> Result:
    """Torch's attention in 16 bits: what no kernel of this package does."""
    dtype = torch.bfloat16 if x.q.dtype == torch.float32 else x.q.dtype
    q, k, v = (t.detach().to(dtype).requires_grad_() for t in (x.q, x.k, x.v))
    out = F.scaled_dot_product_attention(
        q, k, v, is_causal=causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    grads = torch.autograd.grad(out, (q, k, v), x.dout.to(dtype))
    return Result(out.detach(), out.new_empty(0), *grads)


def _truth(
    into: Measurement | None, call: Call, x: Inputs, dlse: Tensor | None, heads: slice
) -> Result:
    """Float64 attention of one key head by chunks of queries; magnitudes go ``into``."""
    q, k, v, dout = x
    outs, dqs = [], []
    dk, dv = torch.zeros_like(k, dtype=torch.float64), torch.zeros_like(v, dtype=torch.float64)
    squares: defaultdict[str, Tensor] = defaultdict(lambda: torch.zeros((), dtype=torch.float64))
    mass = torch.zeros(q.shape[1], k.shape[2], dtype=torch.float64, device=q.device)
    pairs = 0
    for queries, keys in _chunks(q.shape[2], k.shape[2], call.causal):
        part = (dout[:, :, queries], q[:, :, queries], k[:, :, keys], v[:, :, keys])
        out = attention_reference(*part[1:], scale=call.scale, causal=call.causal).out
        part_dlse = None if dlse is None else dlse[:, :, queries]
        grads, between = attention_reference_backward(
            *part, dlse=part_dlse, scale=call.scale, causal=call.causal
        )
        outs.append(out)
        dqs.append(grads.dq)
        dk[:, :, keys] += grads.dk
        dv[:, :, keys] += grads.dv
        seen = visible(out.shape[2], part[2].shape[2], call.causal, q.device)
        pairs += int(seen.sum())
        for name in ("p", "dp", "ds"):
            values = getattr(between, name).masked_fill(~seen, 0.0)
            squares[name] = squares[name] + values.square().sum((0, 2, 3)).cpu()
        mass[:, keys] += between.p.sum((0, 2))
    if into is not None:
        for name, sums in squares.items():
            into.add(f"{name}_rms", heads, (sums / max(pairs, 1)).sqrt())
        sink_mass, sink = (mass / q.shape[2]).max(-1)
        norms = v[0, 0].double().norm(dim=-1)
        into.add("sink_mass", heads, sink_mass)
        into.add("sink_position", heads, sink)
        into.add("sink_value", heads, norms[sink] / norms.mean().clamp_min(1e-300))
    dq = torch.cat(dqs, 2)
    return Result(torch.cat(outs, 2), dq.new_empty(0), dq, dk, dv)


def _chunks(seqlen_q: int, seqlen_k: int, causal: bool) -> Iterator[tuple[slice, slice]]:
    """Queries and the keys that they see: attention of a chunk is aligned bottom-right again."""
    for start in range(0, seqlen_q, QUERY_CHUNK):
        stop = min(start + QUERY_CHUNK, seqlen_q)
        yield slice(start, stop), slice(0, max(0, stop + seqlen_k - seqlen_q) if causal else None)


def _describe(into: Measurement, x: Inputs, heads: slice, kv: slice) -> None:
    """Sizes of Q and K and what stands out of them."""
    q, k = x.q.double(), x.k.double()
    mean = k.mean(-2, keepdim=True)
    smooth = k - mean
    into.add("q_rms", heads, _rms(q))
    into.add("q_outliers", heads, _outliers(q))
    into.add("k_rms", kv, _rms(k), per_key_head=True)
    into.add("k_outliers", kv, _outliers(k), per_key_head=True)
    into.add("k_outliers_smoothed", kv, _outliers(smooth), per_key_head=True)
    into.add("k_offset", kv, _rms(mean) / _rms(smooth).clamp_min(1e-300), per_key_head=True)


def _rms(x: Tensor) -> Tensor:
    return x.square().mean((0, 2, 3)).sqrt()


def _outliers(x: Tensor) -> Tensor:
    """The share of elements beyond ``OUTLIER`` times the head's RMS."""
    return (x.abs() > OUTLIER * _rms(x)[:, None, None]).double().mean((0, 2, 3))


def _rms_norm(x: Tensor) -> Tensor:
    return F.rms_norm(x.float(), x.shape[-1:]).to(x.dtype)
