"""Forward and backward against the truth for every shape, mask, group, dtype and policy.

How good INT8 is, test_accuracy says; here an error is compared with a tensor's natural size, which
does not vanish where the truth does (one key: dS = 0). Both catch what is wrong at the edges.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sage_cute import attention
from sage_cute.errors import PolicyError
from sage_cute.numerics import attention_reference, attention_reference_backward, rel_l2
from sage_cute.numerics.tolerances import check
from sage_cute.numerics.visibility import Window
from sage_cute.policies import PRESETS, PRODUCTS, Policy, resolve
from sage_cute.testing import (
    POLICY_FIELDS,
    TENSORS,
    Inputs,
    Result,
    make_inputs,
    run_attention,
    run_reference,
)

NUMERICS, MANY = (settings.get_profile(name) for name in ("numerics", "numerics_many"))
SEQLENS = (0, 1, 2, 9, 63, 64, 65, 127, 128, 129, 200, 333)
HEAD_DIMS = (1, 8, 16, 32, 40, 64, 72, 80, 96, 104, 128, 256)
SIDES = st.sampled_from([None, 0, 1, 2, 17, 63, 64, 100, 127, 128, 400])
WINDOWS = st.tuples(SIDES, SIDES)
GROUPS = ((1, 1), (2, 2), (3, 1), (4, 2), (7, 1), (8, 1))
KINDS = ("g1", "qkn", "qlr", "vm", "dochan")

any_policy = st.fixed_dictionaries({k: st.sampled_from(v) for k, v in POLICY_FIELDS.items()})


def mix(fields: dict[str, object]) -> str:
    """A policy's string; what contradicts other fields falls back to another value."""
    try:
        Policy(**fields)  # type: ignore[arg-type]
    except PolicyError:
        fields = dict(fields)
        fields["smooth_q"] &= fields["qk"] == "int8"
        fields["smooth_v"] &= fields["pv"] == "int8"
        if fields["dp"] == "int8" and fields["v_scale"] == "per_channel":
            fields["v_scale"] = "per_token"
    return "sagebwd:" + ",".join(f"{k}={v}" for k, v in fields.items())


def results_equal(a: Result, b: Result) -> bool:
    return all(torch.equal(s, t) for s, t in zip(a, b, strict=True))


def natural_sizes(x: Inputs, dlse: Tensor | None, **masks: object) -> dict[str, float]:
    """What errors of INT8 products scale with: the products of absolute values, in quadrature.

    Each factor gets a part of its largest value, which sets its scale; dS gets a part of what it
    is the difference of.
    """
    _, mid = attention_reference_backward(x.dout, x.q, x.k, x.v, dlse=dlse, **masks)
    group = x.q.shape[1] // x.k.shape[1]
    k, v = (t.double().repeat_interleave(group, 1) for t in (x.k, x.v))
    q, dout = x.q.double(), x.dout.double()

    def wide(t: Tensor) -> Tensor:
        return t.abs() + t.abs().amax((-2, -1), keepdim=True) / 64

    def per_key_head(t: Tensor) -> Tensor:
        return t.unflatten(1, (-1, group)).sum(2)

    parts = dout.norm(dim=-1, keepdim=True) * v.norm(dim=-1).amax(-1)[..., None, None]
    ds = wide(mid.ds.abs() + mid.p * parts / 16)
    keys = wide((k - k.mean(2, keepdim=True)).abs() + k.abs() / 4)
    squares = {
        "out": mid.p**2 @ wide(v) ** 2,
        "dv": per_key_head(wide(mid.p).mT ** 2 @ wide(dout) ** 2),
        "dq": ds**2 @ keys**2 / x.q.shape[-1],
        "dk": per_key_head(ds.mT**2 @ wide(q) ** 2) / x.q.shape[-1],
    }
    return {name: t.sum().sqrt().item() for name, t in squares.items()}


@MANY
@given(
    policy=st.one_of(st.sampled_from(list(PRESETS)), any_policy.map(mix)),
    kind=st.sampled_from(KINDS),
    batch=st.sampled_from([1, 2]),
    heads=st.sampled_from(GROUPS),
    seqlen_q=st.sampled_from(SEQLENS),
    seqlen_k=st.sampled_from(SEQLENS),
    head_dim=st.sampled_from(HEAD_DIMS),
    causal=st.booleans(),
    window=st.one_of(st.just((None, None)), WINDOWS),
    lengths=st.one_of(st.none(), st.lists(st.sampled_from(SEQLENS), min_size=2, max_size=2)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    with_dlse=st.booleans(),
    seed=st.integers(0, 9999),
)
def test_close_to_the_truth(
    policy: str,
    kind: str,
    batch: int,
    heads: tuple[int, int],
    seqlen_q: int,
    seqlen_k: int,
    head_dim: int,
    causal: bool,
    window: Window,
    lengths: list[int] | None,
    dtype: torch.dtype,
    with_dlse: bool,
    seed: int,
) -> None:
    x = make_inputs(
        kind,
        (batch, heads[0], seqlen_q, head_dim),
        kv_heads=heads[1],
        seqlen_k=seqlen_k,
        dtype=dtype,
        seed=seed,
    )
    dlse = None
    if with_dlse:
        dlse = torch.randn(x.q.shape[:3], generator=torch.Generator().manual_seed(seed))
    masks = {"causal": causal, "window": window, "key_lengths": None}
    if lengths is not None:
        masks["key_lengths"] = torch.tensor(lengths[:batch]).clamp_max(seqlen_k)
    got = run_attention(x, policy=policy, dlse=dlse, **masks)
    truth = run_reference(x, dlse=dlse, **masks)
    for tensor, like in zip(got, (x.q, None, x.q, x.k, x.v), strict=True):
        assert torch.isfinite(tensor).all() or tensor is got.lse
        assert like is None or (tensor.shape, tensor.dtype) == (like.shape, like.dtype)
    assert (got.lse.shape, got.lse.dtype) == (x.q.shape[:3], torch.float32)
    no_key = truth.lse == -torch.inf
    assert torch.equal(got.lse == -torch.inf, no_key)
    assert not got.out[no_key].any()
    assert not got.dq[no_key].any()
    if lengths is not None:
        for b, length in enumerate(masks["key_lengths"].tolist()):
            assert not got.dk[b, :, length:].any()
            assert not got.dv[b, :, length:].any()
    if no_key.all():
        assert not any(t.any() for t in (got.out, got.dq, got.dk, got.dv))
        return
    family = policy if policy in PRESETS else "any"
    check("shape_lse", family, (got.lse - truth.lse).nan_to_num().abs().max())
    size = natural_sizes(x, dlse, **masks)
    for name in TENSORS:
        want = getattr(truth, name)
        error = (getattr(got, name).double() - want).norm().item()
        check(f"shape_{name}", family, error / (want.norm().item() + size[name]))


@pytest.mark.parametrize("products", range(2 ** len(PRODUCTS)))
def test_every_combination_of_precisions(products: int) -> None:
    """All 2^7, with the paper's scales for even ones and the default's for odd ones."""
    precisions = {name: "int8" if products >> i & 1 else "16bit" for i, name in enumerate(PRODUCTS)}
    base = "sagebwd" if products.bit_count() % 2 else "fast"
    spec = f"{base}:" + ",".join(f"{k}={v}" for k, v in precisions.items())
    x = make_inputs("qkn", (1, 2, 67, 40), kv_heads=1, seqlen_k=70, seed=products)
    got, truth = run_attention(x, policy=spec, causal=True), run_reference(x, causal=True)
    size = natural_sizes(x, None, causal=True)
    for name in TENSORS:
        want = getattr(truth, name)
        error = (getattr(got, name).double() - want).norm().item()
        check(f"shape_{name}", "any", error / (want.norm().item() + size[name]))
    if "int8" not in precisions.values():
        for name in TENSORS:
            want = getattr(truth, name)
            check("all_16bit", "any", rel_l2(getattr(got, name), want))


@NUMERICS
@given(
    policy=st.sampled_from(list(PRESETS)),
    heads=st.sampled_from(GROUPS),
    seqlen_q=st.sampled_from(SEQLENS[1:8]),
    seqlen_k=st.sampled_from(SEQLENS[1:8]),
    split=st.integers(0, 127),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 999),
)
def test_parts_of_the_keys_merge(
    policy: str,
    heads: tuple[int, int],
    seqlen_q: int,
    seqlen_k: int,
    split: int,
    dtype: torch.dtype,
    seed: int,
) -> None:
    """(O, LSE) of two parts of the keys, merged, is that of all: the LSE is the original K's.

    Each part takes the mean of its own keys off, so an LSE of smoothed keys would merge wrongly. A
    part may be empty: its LSE is -inf, and it weighs nothing.
    """
    x = make_inputs(
        "kb", (2, heads[0], seqlen_q, 32), kv_heads=heads[1], seqlen_k=seqlen_k, dtype=dtype,
        seed=seed,
    )  # fmt: skip
    split = min(split, seqlen_k)
    parts = [
        attention(x.q, k, v, policy=policy, return_lse=True)
        for k, v in zip(*(t.split([split, seqlen_k - split], 2) for t in (x.k, x.v)), strict=True)
    ]
    lse = torch.logsumexp(torch.stack([part[1] for part in parts]), 0)
    merged = sum(out.float() * (part - lse).exp().unsqueeze(-1) for out, part in parts)
    truth = attention_reference(x.q, x.k, x.v)
    check("merged_lse", policy, (lse - truth.lse).abs().max())
    check("merged_out", policy, rel_l2(merged, truth.out))


@pytest.mark.parametrize("policy", PRESETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_key(policy: str, dtype: torch.dtype) -> None:
    """P = 1 and dS = 0: O = V up to its rounding, dQ = dK = 0, dV = the sum of dO."""
    x = make_inputs("g1", (2, 4, 70, 40), kv_heads=2, seqlen_k=1, dtype=dtype)
    got = run_attention(x, policy=policy)
    v = x.v.repeat_interleave(2, 1).float()
    step = v.abs().amax(-1, keepdim=True) / 127
    assert ((got.out.float() - v).abs() <= step * (0.5 + torch.finfo(dtype).eps * 127)).all()
    assert not got.dq.any()  # the only key less its mean
    dout = x.dout.float().unflatten(1, (2, 2)).sum((2, 3)).unsqueeze(2)
    check("one_key_dv", policy, rel_l2(got.dv, dout))
    size = x.dout.float().norm() * x.v.float().norm() * x.q.float().norm()
    check("one_key_dk", policy, got.dk.float().norm() / size)


@pytest.mark.parametrize("policy", PRESETS)
def test_default_scale_uses_the_true_head_dim(policy: str) -> None:
    for head_dim in (1, 7, 40, 72, 104):
        x = make_inputs("g1", (1, 1, 20, head_dim), dtype=torch.float32)
        a = run_attention(x, policy=policy)
        assert results_equal(a, run_attention(x, policy=policy, scale=head_dim**-0.5))


@pytest.mark.parametrize("policy", PRESETS)
def test_scale_of_zero_and_below(policy: str) -> None:
    x = make_inputs("g1", (1, 2, 60, 16), kv_heads=1, dtype=torch.float32)
    uniform = run_attention(x, policy=policy, scale=0.0)
    truth = run_reference(x, scale=0.0)
    assert torch.allclose(uniform.lse, truth.lse.float(), atol=1e-6)
    assert not uniform.dq.any()
    assert not uniform.dk.any()
    check("shape_out", policy, rel_l2(uniform.out, truth.out))
    negative = run_attention(x, policy=policy, scale=-0.3)
    mirrored = run_attention(x._replace(q=-x.q), policy=policy, scale=0.3)
    assert torch.equal(negative.out, mirrored.out)
    assert torch.equal(negative.dq, -mirrored.dq)
    assert torch.equal(negative.dk, mirrored.dk)


@NUMERICS
@given(
    fields=any_policy,
    seqlen_q=st.sampled_from((1, 2, 9, 63, 65, 129)),
    seqlen_k=st.sampled_from((1, 2, 9, 63, 65, 129)),
    head_dim=st.sampled_from((1, 40, 64)),
    causal=st.booleans(),
)
def test_nothing_unwritten_shows(
    fields: dict[str, object], seqlen_q: int, seqlen_k: int, head_dim: int, causal: bool
) -> None:
    """Bit for bit the same when every new buffer starts as NaN, or as the largest integer."""
    x = make_inputs("g1", (1, 3, seqlen_q, head_dim), kv_heads=1, seqlen_k=seqlen_k)
    dlse = torch.ones(x.q.shape[:3])
    want = run_attention(x, policy=mix(fields), causal=causal, dlse=dlse)
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(1).isnan().all()
        got = run_attention(x, policy=mix(fields), causal=causal, dlse=dlse)
    finally:
        torch.use_deterministic_algorithms(False)
    assert results_equal(got, want)


@pytest.mark.parametrize("policy", PRESETS)
def test_the_same_bits_every_time(policy: str) -> None:
    x = make_inputs("llm", (2, 6, 129, 40), kv_heads=2, seqlen_k=201)
    want = run_attention(x, policy=policy, causal=True)
    for _ in range(5):
        assert results_equal(run_attention(x, policy=policy, causal=True), want)


@pytest.mark.parametrize("policy", PRESETS)
def test_batch_and_heads_do_not_mix(policy: str) -> None:
    """A batch is its members: neither a scale nor a mean crosses heads or batch."""
    x = make_inputs("llm", (3, 4, 70, 24), kv_heads=2, dtype=torch.float32)
    x = Inputs(*(t * torch.tensor([1.0, 50.0, 0.01])[:, None, None, None] for t in x))
    whole = run_attention(x, policy=policy, scale=0.01)
    for b in range(3):
        for h in range(2):
            q = slice(2 * h, 2 * h + 2)
            part = Inputs(
                x.q[b : b + 1, q], x.k[b : b + 1, h : h + 1], x.v[b : b + 1, h : h + 1],
                x.dout[b : b + 1, q],
            )  # fmt: skip
            got = run_attention(part, policy=policy, scale=0.01)
            kv = slice(h, h + 1)
            for name, heads in (("out", q), ("dq", q), ("dk", kv), ("dv", kv)):
                want = getattr(whole, name)[b : b + 1, heads]
                check("part_of_batch", policy, rel_l2(getattr(got, name), want))


def test_many_heads() -> None:
    """More heads than a grid dimension of a GPU holds. Tiles of 8 queries cost little here."""
    x = make_inputs("g1", (1, 65_537, 1, 8), seqlen_k=2, seed=3)
    got, truth = run_attention(x, policy="fast:bwd_block_q=8"), run_reference(x)
    for name in TENSORS:
        check("many_heads", "fast", rel_l2(getattr(got, name), getattr(truth, name)))


def test_every_field_of_a_policy_matters() -> None:
    """None is ignored: each changes some bit of some result."""
    x = make_inputs("llm", (1, 2, 300, 32), kv_heads=1, dtype=torch.float32, seed=5)
    x.v[:, :, :128] = torch.nn.functional.normalize(x.v[:, :, :128], dim=-1)  # a flat block
    for field, values in POLICY_FIELDS.items():
        base = "sagebwd"
        if field in ("do_scale", "p_scale"):  # of an INT8 dP's operand; of V's folded scales
            base = "int8"
        default = getattr(resolve(base), field)
        other = next(value for value in values if value != default)
        a = run_attention(x, policy=base)
        assert not results_equal(a, run_attention(x, policy=f"{base}:{field}={other}")), field
