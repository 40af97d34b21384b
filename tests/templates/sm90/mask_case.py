"""Quantization, forward and backward kernels on masks, key lengths and packed batches."""

from __future__ import annotations

import math
from typing import NamedTuple
from unittest import mock

import torch

from sage_cute.compile import bwd_launch, launch, quant_launch, tensors
from sage_cute.compile.tensors import empty_codes
from sage_cute.compile.visibility import Packed
from sage_cute.numerics.backward import sage_backward
from sage_cute.numerics.forward import Saved, sage_forward
from sage_cute.policies import resolve

Pair = tuple[int, int]


class Case(NamedTuple):
    """A batch of sequences of (queries, keys), packed or (of one size) dense."""

    sizes: tuple[Pair, ...]
    heads: Pair = (2, 1)
    head_dim: int = 64
    policy: str = "fast"
    causal: bool = False
    window: tuple[int | None, int | None] = (None, None)
    key_lengths: tuple[int, ...] | None = None
    given_mean: bool = False
    packed: bool = False
    outside: Pair = (0, 0)  # tokens of no sequence before and behind a packed batch
    dtype: torch.dtype = torch.bfloat16
    spread: float = 0.2

    @property
    def mix(self):
        return resolve(self.policy)

    @property
    def scale(self):
        return self.head_dim**-0.5


class Inputs(NamedTuple):
    """(sequences of) q, k, v, dout as (heads, tokens, head_dim), and a mean of K."""

    q: list[torch.Tensor]
    k: list[torch.Tensor]
    v: list[torch.Tensor]
    dout: list[torch.Tensor]
    k_mean: torch.Tensor | None


def make_inputs(case, seed=0):
    """Keys with a mean, values whose norms differ; NaN where nobody may look."""
    rng = torch.Generator().manual_seed(seed)
    normal = lambda *shape: torch.randn(*shape, generator=rng)
    (heads, kv_heads), d = case.heads, case.head_dim
    q = [normal(heads, n, d) for n, _ in case.sizes]
    dout = [normal(heads, n, d) for n, _ in case.sizes]
    k = [normal(kv_heads, n, d) + 2 * normal(kv_heads, 1, d) for _, n in case.sizes]
    v = [
        normal(kv_heads, n, d) * (case.spread * normal(kv_heads, n, 1)).exp() for _, n in case.sizes
    ]
    mean = None
    if case.given_mean:
        # Near the true one, as of other tokens of a text: far from it dQ is a difference of large
        # numbers, and rounding dS to bfloat16 alone makes it differ by more than the bound.
        mean = torch.stack([x.mean(1) for x in k]) + 0.3 * normal(len(k), kv_heads, d)
    for b, length in enumerate(case.key_lengths or ()):
        k[b][:, length:] = v[b][:, length:] = math.nan
    return Inputs(*([x.to(case.dtype) for x in xs] for xs in (q, k, v, dout)), mean)


def _offsets(lengths, before):
    return torch.tensor([before, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def gather(case, xs, side, fill=math.nan):
    """Sequences (heads, tokens, ...) as the kernels take them: (batch, heads, tokens, ...)."""
    if not case.packed:
        return torch.stack(xs).cuda()
    total = torch.cat(xs, 1)
    around = [total.new_full((total.shape[0], n, *total.shape[2:]), fill) for n in case.outside]
    total = torch.cat([around[0], total, around[1]], 1)
    return total.transpose(0, 1).contiguous().transpose(0, 1).unsqueeze(0).cuda()


def split(case, x, side):
    """The opposite of ``gather``."""
    if not case.packed:
        return list(x.cpu())
    lengths = [size[side] for size in case.sizes]
    return list(x[0].cpu()[:, case.outside[0] :].split([*lengths, case.outside[1]], 1))[:-1]


def sight(case):
    """Keyword arguments of all launches."""
    packed = lengths = None
    if case.packed:
        cu = [_offsets([s[side] for s in case.sizes], case.outside[0]).cuda() for side in (0, 1)]
        packed = Packed(*cu, *(max(s[side] for s in case.sizes) for side in (0, 1)))
    if case.key_lengths is not None:
        lengths = torch.tensor(case.key_lengths, dtype=torch.int32, device="cuda")
    return {
        "is_causal": case.causal,
        "window": case.window,
        "key_lengths": lengths,
        "packed": packed,
    }


def poisoned(shape, dtype):
    if dtype == torch.int8:
        return empty_codes(torch.zeros((), device="cuda"), shape).fill_(77)
    value = 77 if dtype == torch.uint8 else math.nan
    return torch.full(shape, value, dtype=dtype, device="cuda")


def forward(case, inputs):
    """(out, lse, outputs of quantization) of the kernels, on poisoned memory."""
    q, k, v = gather(case, inputs.q, 0), gather(case, inputs.k, 1), gather(case, inputs.v, 1)
    how = sight(case)
    static = launch.Visibility(**how).static
    spec = quant_launch.quant_spec(
        case.mix, q.dtype, q.shape[3], static=static, mean_given=case.given_mean
    )
    packed = how["packed"]
    sizes = () if packed is None else (packed.sequences, packed.max_k)
    shapes = quant_launch.output_shapes(spec, q.shape, k.shape, *sizes)
    made = {name: poisoned(*x) for name, x in shapes.items()}
    if case.given_mean:
        made["k_mean"] = inputs.k_mean.cuda()
    quant_launch.quantize(q, k, v, policy=case.mix, mean_given=case.given_mean, **how, **made)
    out, lse = poisoned(q.shape, q.dtype), poisoned(q.shape[:3], torch.float32)
    operands = [made[n] for n in ("q_codes", "q_scale", "k_codes", "k_scale", "v_t", "v_scale")]
    launch.forward(*operands, out, lse, scale=case.scale, policy=case.mix, **how)
    return out, lse, made


def expected(case, inputs):
    """The CPU implementation, a sequence at a time."""
    found = []
    for b in range(len(case.sizes)):
        lengths = None if case.key_lengths is None else torch.tensor(case.key_lengths[b : b + 1])
        found.append(
            sage_forward(
                *(x[b][None] for x in inputs[:3]),
                scale=case.scale,
                causal=case.causal,
                policy=case.mix,
                window=case.window,
                key_lengths=lengths,
                k_mean=None if inputs.k_mean is None else inputs.k_mean[b : b + 1],
            )
        )
    return found


def saved_of(case, made, b):
    """What quantization made for sequence b, as the CPU saves it."""
    size_q, size_k = case.sizes[b]
    block_q = 1 if case.mix.q_scale == "per_token" else case.mix.block_q
    block_k = case.mix.block_k
    groups = -(-size_q // block_q), -(-size_k // block_k)
    cpu = {name: x.cpu() for name, x in made.items()}
    if not case.packed:
        one = {n: cpu[n][b] for n in ("q_codes", "k_codes", "q_scale", "k_scale", "k_mean")}
    else:
        cu = [_offsets([s[side] for s in case.sizes], case.outside[0])[b].item() for side in (0, 1)]
        start_q = cu[0] if block_q == 1 else cu[0] // block_q + b
        start_k = cu[1] // block_k + b
        one = {
            "q_codes": cpu["q_codes"][0, :, cu[0] : cu[0] + size_q],
            "k_codes": cpu["k_codes"][0, :, cu[1] : cu[1] + size_k],
            "q_scale": cpu["q_scale"][0, :, start_q : start_q + groups[0]],
            "k_scale": cpu["k_scale"][0, :, start_k : start_k + groups[1]],
            "k_mean": cpu["k_mean"][b],
        }
    none = torch.empty(1, case.heads[0], 0, case.head_dim)
    return Saved(q_mean=none, **{name: x[None] for name, x in one.items()})


def check_forward(case, seed=0):
    """Codes, scales and means bit for bit; out and lse as near as on the same codes."""
    inputs = make_inputs(case, seed)
    out, lse, made = forward(case, inputs)
    outs, lses = split(case, out, 0), split(case, lse, 0)
    for b, want in enumerate(expected(case, inputs)):
        keys = case.sizes[b][1] if case.key_lengths is None else case.key_lengths[b]
        if case.sizes[b][0] == 0:
            continue
        if keys:
            saved = saved_of(case, made, b)
            for name in ("q_codes", "k_codes", "q_scale", "k_scale", "k_mean"):
                got, ref = getattr(saved, name), getattr(want.saved, name)
                assert torch.equal(got, ref), (b, name, (got != ref).nonzero()[:4].tolist())
        got_lse, got = lses[b], outs[b].float()
        assert torch.isfinite(got).all(), b
        seen = torch.isfinite(want.lse[0])
        assert torch.equal(torch.isneginf(got_lse), ~seen), b
        assert (got[~seen] == 0).all(), b
        if seen.any():
            torch.testing.assert_close(got_lse[seen], want.lse[0][seen], rtol=1e-5, atol=1e-5)
            error = (got - want.out[0].float()).norm() / want.out[0].float().norm()
            assert error < 5e-3, (b, error)
    if case.packed:
        for x in (out[0], lse[0]):  # not written
            assert x[:, : case.outside[0]].isnan().all()
            assert x[:, x.shape[1] - case.outside[1] :].isnan().all()


def backward(case, inputs, out, lse, made, dlse=None):
    """(dq, dk, dv) of the kernels on what the forward left; workspace and outputs poisoned."""
    how = sight(case)
    q, k, v = (gather(case, x, side) for x, side in zip(inputs[:3], (0, 1, 1), strict=True))
    grads = [poisoned(x.shape, x.dtype) for x in (q, k, v)]
    with (
        mock.patch.object(bwd_launch.torch, "empty", _poisoned_empty),
        mock.patch.object(tensors, "empty_codes", lambda x, shape: poisoned(shape, torch.int8)),
    ):
        bwd_launch.backward(
            gather(case, inputs.dout, 0),
            dlse,
            v,
            out,
            lse,
            *(made[name] for name in ("q_codes", "k_codes", "q_scale", "k_scale")),
            *grads,
            scale=case.scale,
            policy=case.mix,
            **how,
        )
    return grads


_EMPTY = torch.empty


def _poisoned_empty(*args, **kwargs):
    return _EMPTY(*args, **kwargs).fill_(math.nan)


def check_backward(case, limit=7e-3, seed=0):
    """Gradients against the CPU implementation on the kernels' own codes, out and lse."""
    inputs = make_inputs(case, seed)
    out, lse, made = forward(case, inputs)
    outs, lses = split(case, out, 0), split(case, lse, 0)
    for b, x in enumerate(lses):  # what queries hold that see no key
        inputs.dout[b][x.isneginf()] = math.nan
    grads = backward(case, inputs, out, lse, made)
    found = [split(case, x, side) for x, side in zip(grads, (0, 1, 1), strict=True)]
    for b in range(len(case.sizes)):
        lengths = None if case.key_lengths is None else torch.tensor(case.key_lengths[b : b + 1])
        want = sage_backward(
            inputs.dout[b][None],
            None,
            *(x[b][None] for x in inputs[:3]),
            outs[b][None],
            lses[b][None],
            saved_of(case, made, b),
            scale=case.scale,
            causal=case.causal,
            policy=case.mix,
            window=case.window,
            key_lengths=lengths,
        )
        keys = slice(case.sizes[b][1] if case.key_lengths is None else case.key_lengths[b], None)
        assert (found[0][b][lses[b].isneginf()] == 0).all(), b
        assert (found[1][b][:, keys] == 0).all(), b
        assert (found[2][b][:, keys] == 0).all(), b
        for name, x, y in zip(("dq", "dk", "dv"), found, want, strict=True):
            got, ref = x[b].float(), y[0].float()
            assert torch.isfinite(got).all(), (b, name, (~got.isfinite()).nonzero()[:4].tolist())
            error, norm = (got - ref).norm().item(), ref.norm().item()
            assert error <= limit * norm, (b, name, error, norm)
    if case.packed:
        for x in grads:  # not written
            assert x[0, :, : case.outside[0]].isnan().all()
            assert x[0, :, x.shape[2] - case.outside[1] :].isnan().all()
