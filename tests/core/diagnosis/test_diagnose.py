"""What a diagnosis measures, on attention whose tensors are known."""

from __future__ import annotations

import functools
import json
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import sage_cute
from sage_cute.diagnosis import Diagnosis, measure
from sage_cute.diagnosis.measure import OTHER_SMOOTHING, QK_NORM, SIXTEEN_BIT
from sage_cute.errors import DiagnosisError, PolicyError
from sage_cute.numerics import attention_reference_backward, cosine
from sage_cute.testing import (
    TENSORS,
    Inputs,
    make_inputs,
    relative_errors,
    run_attention,
    run_reference,
)

SHAPE = (1, 2, 96, 32)


class Known(nn.Module):
    """Attention of given tensors; the gradient of its output is a given one."""

    def __init__(self, x: Inputs, attend=F.scaled_dot_product_attention, **options) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Parameter(t) for t in x[:3])
        self.dout, self.attend, self.options = x.dout, attend, options

    def forward(self, unused: Tensor) -> Tensor:
        out = self.attend(self.q, self.k, self.v, **self.options)
        return (out * self.dout).sum()


def sage(q, k, v, **options):
    return sage_cute.attention(q, k, v, **options)


def diagnose(model: nn.Module, **options) -> Diagnosis:
    return sage_cute.diagnose(model, torch.zeros(1), **{"policies": ["fast"], **options})


def test_figures_are_those_of_each_head() -> None:
    x = make_inputs("llm", (2, 4, 96, 32), kv_heads=2)
    model = Known(x, is_causal=True, enable_gqa=True)
    (layer,) = diagnose(model, policies=["sagebwd", "fast"]).layers
    assert (layer.name, layer.function, layer.sequences) == ("model", "SDPA", 2)
    assert (layer.causal, layer.policy, layer.dtype) == (True, None, "bfloat16")
    assert layer.shape["kv_heads"] == 2
    for policy in ("sagebwd", "fast"):
        whole = relative_errors(
            run_attention(x, policy=policy, causal=True), run_reference(x, causal=True)
        )
        for name in TENSORS:
            assert layer.errors[policy][name].layer_rel_l2 == pytest.approx(whole[name], rel=1e-6)
            assert sum(layer.errors[policy][name].norm) == pytest.approx(1)
        for head in range(4):
            # Of both sequences together, and the query heads of one key head.
            kv = slice(head // 2, head // 2 + 1)
            group = slice(head // 2 * 2, head // 2 * 2 + 2)
            one = Inputs(x.q[:, group], x.k[:, kv], x.v[:, kv], x.dout[:, group])
            result, truth = (
                run_attention(one, policy=policy, causal=True),
                run_reference(one, causal=True),
            )
            for name in ("out", "dq"):
                of = [getattr(r, name)[:, head % 2] for r in (result, truth)]
                found = layer.errors[policy][name]
                assert found.rel_l2[head] == pytest.approx(
                    float((of[0].double() - of[1]).norm() / of[1].norm()), rel=1e-6
                )
                assert found.cosine[head] == pytest.approx(cosine(*of), rel=1e-9)
            errors = relative_errors(result, truth)
            for name in ("dk", "dv"):
                found = layer.errors[policy][name].rel_l2
                assert len(found) == 2
                assert layer.of_head(found, head) == pytest.approx(errors[name], rel=1e-6)


def test_magnitudes_are_those_of_the_truth() -> None:
    x = make_inputs("sink", SHAPE)
    layer = diagnose(Known(x, is_causal=True)).layers[0]
    _, between = attention_reference_backward(x.dout, *x[:3], causal=True)
    seen = torch.ones(96, 96, dtype=torch.bool).tril()
    for head in range(2):
        for name in ("p", "dp", "ds"):
            rms = getattr(between, name)[0, head][seen].square().mean().sqrt().item()
            assert layer.figures[f"{name}_rms"][head] == pytest.approx(rms, rel=1e-9)
        mass = between.p[0, head].mean(0)
        assert layer.figures["sink_position"][head] == mass.argmax() == 0
        assert layer.figures["sink_mass"][head] == pytest.approx(mass.max().item())
        assert layer.figures["sink_value"][head] < 0.1
    assert layer.figures["q_rms"][0] == pytest.approx(
        x.q[0, 0].double().square().mean().sqrt().item()
    )


def test_outliers_and_offset() -> None:
    x = make_inputs("g1", SHAPE, dtype=torch.float32)
    x.q[0, 1, 5, 7] = 100.0
    x = x._replace(k=x.k + 4.0)
    figures = diagnose(Known(x)).layers[0].figures
    assert figures["q_outliers"] == [0.0, pytest.approx(1 / (96 * 32))]
    assert figures["k_offset"] == pytest.approx([4.0, 4.0], rel=0.1)
    assert figures["k_outliers"] == [0.0, 0.0]
    x.k[0, 0, 2, 2] = 100.0
    figures = diagnose(Known(x)).layers[0].figures
    assert figures["k_outliers"] == [pytest.approx(1 / (96 * 32)), 0.0]
    assert figures["k_outliers_smoothed"] == figures["k_outliers"]


@pytest.mark.parametrize("lengths", [(96, 96), (70, 96), (96, 70)])
def test_chunks_of_queries_change_nothing(lengths, monkeypatch) -> None:
    seqlen_q, seqlen_k = lengths
    x = make_inputs("llm", (1, 2, seqlen_q, 32), kv_heads=1, seqlen_k=seqlen_k)
    model = Known(x, sage, causal=True)
    whole = diagnose(model).layers[0]
    monkeypatch.setattr(measure, "QUERY_CHUNK", 16)
    parts = diagnose(model).layers[0]
    for name in TENSORS:
        assert parts.errors["fast"][name].rel_l2 == pytest.approx(
            whole.errors["fast"][name].rel_l2, rel=1e-6
        )
    for name, values in whole.figures.items():
        assert parts.figures[name] == pytest.approx(values, rel=1e-9), name


def test_gradient_of_the_lse_counts() -> None:
    x = make_inputs("g1", SHAPE)
    dlse = 10 * torch.randn(SHAPE[:3])

    class WithLse(Known):
        def forward(self, unused: Tensor) -> Tensor:
            out, lse = sage_cute.attention(self.q, self.k, self.v, policy="fast", return_lse=True)
            return (out * self.dout).sum() + (lse * dlse).sum()

    layer = diagnose(WithLse(x)).layers[0]
    assert layer.policy == "fast"
    truth, result = run_reference(x, dlse=dlse), run_attention(x, policy="fast", dlse=dlse)
    for head in range(2):
        of = result.dq[:, head].double(), truth.dq[:, head]
        expected = ((of[0] - of[1]).norm() / of[1].norm()).item()
        assert layer.errors["fast"]["dq"].rel_l2[head] == pytest.approx(expected, rel=1e-6)
    without = diagnose(Known(x, sage, policy="fast")).layers[0]
    assert without.figures["ds_rms"] != pytest.approx(layer.figures["ds_rms"], rel=0.1)


def test_the_model_is_left_as_it_was() -> None:
    model = Known(make_inputs("g1", SHAPE), sage)
    model.q.grad = grad = torch.ones_like(model.q)
    before, state = {n: p.clone() for n, p in model.named_parameters()}, torch.get_rng_state()
    model.register_forward_hook(lambda *_: torch.rand(1) and None)
    hooks = len(model._forward_hooks), len(model._forward_pre_hooks)
    sdpa = F.scaled_dot_product_attention
    diagnose(model)
    assert model.q.grad is grad and (grad == 1).all() and model.k.grad is None
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    assert torch.equal(torch.get_rng_state(), state)
    with pytest.raises(DiagnosisError):
        diagnose(model, loss=lambda output: output.detach())
    assert F.scaled_dot_product_attention is sdpa and model.q.grad is grad
    assert (len(model._forward_hooks), len(model._forward_pre_hooks)) == hooks


CAUSAL = torch.ones(96, 96, dtype=torch.bool).tril()


@pytest.mark.parametrize(
    "mask",
    [
        CAUSAL,
        torch.zeros(1, 1, 96, 96).masked_fill(~CAUSAL, -math.inf),
        torch.zeros(96, 96).masked_fill(~CAUSAL, torch.finfo(torch.float32).min),
    ],
    ids=["bool", "-inf", "smallest"],
)
def test_a_causal_mask_counts_as_causal(mask) -> None:
    x = make_inputs("g1", SHAPE, dtype=torch.float32)
    layer = diagnose(Known(x, attn_mask=mask)).layers[0]
    assert layer.causal
    assert layer.errors == diagnose(Known(x, is_causal=True)).layers[0].errors


def test_a_mask_that_hides_nothing_is_none() -> None:
    x = make_inputs("g1", SHAPE, dtype=torch.float32)
    for mask in (torch.ones(96, 1, dtype=torch.bool), torch.zeros(1, 96)):
        assert not diagnose(Known(x, attn_mask=mask)).layers[0].causal


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"attn_mask": CAUSAL & (torch.arange(96) > 3)}, "mask is not causal"),
        ({"attn_mask": torch.randn(96, 96)}, "mask is not causal"),
        ({"dropout_p": 0.5}, "dropout of 0.5"),
    ],
    ids=["padding", "bias", "dropout"],
)
def test_what_cannot_be_examined_says_why(options, reason) -> None:
    x = make_inputs("g1", SHAPE, dtype=torch.float32)
    with pytest.raises(DiagnosisError, match=reason):
        diagnose(Known(x, **options))
    both = nn.ModuleDict({"good": Known(x), "bad": Known(x, **options)})
    both.forward = lambda unused: both["good"](unused) + both["bad"](unused)
    found = diagnose(both)
    assert [layer.name for layer in found.layers] == ["good"]
    assert reason in found.skipped["bad"] and "Not examined: 1 calls" in str(found)


@pytest.mark.parametrize(
    ("masks", "reason"),
    [
        ({"window": (9, None)}, "window: a diagnosis examines plain and causal"),
        ({"key_lengths": torch.tensor([9] * SHAPE[0])}, "key_lengths: a diagnosis"),
    ],
)
def test_masks_of_sage_attn_are_not_examined(masks, reason) -> None:
    x = make_inputs("g1", SHAPE, dtype=torch.float32)
    with pytest.raises(DiagnosisError, match=reason):
        diagnose(Known(x, sage, **masks))


def test_packed_batches_are_not_examined() -> None:
    x = make_inputs("g1", SHAPE, dtype=torch.float32)
    cu = torch.tensor([0, 10, 96], dtype=torch.int32)

    def packed(*x: Tensor) -> Tensor:
        tokens = (t[0].transpose(0, 1) for t in x)
        return sage_cute.attention_varlen(*tokens, cu, cu).transpose(0, 1).unsqueeze(0)

    with pytest.raises(DiagnosisError, match="packed sequences: a diagnosis"):
        diagnose(Known(x, packed))


def test_top_left_causal_of_sdpa_is_refused() -> None:
    x = make_inputs("g1", SHAPE, seqlen_k=120)
    with pytest.raises(DiagnosisError, match="top-left"):
        diagnose(Known(x, is_causal=True))


class Stack(nn.Module):
    """Two layers of attention, a second call in the last, under checkpointing or not."""

    def __init__(self, how: str, function=F.scaled_dot_product_attention, **options) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 96) for _ in range(2))
        self.attends = nn.ModuleList(Attend(function, options) for _ in range(2))
        self.how = how

    def layer(self, index: int, x: Tensor) -> Tensor:
        return x + self.attends[index](self.layers[index](x))

    def forward(self, x: Tensor) -> Tensor:
        for index in (0, 1, 1):
            if self.how == "none":
                x = self.layer(index, x)
            else:
                layer = functools.partial(self.layer, index)
                x = checkpoint(layer, x, use_reentrant=self.how == "reentrant")
        return x.square().mean()


class Attend(nn.Module):
    def __init__(self, function, options) -> None:
        super().__init__()
        self.function, self.options = function, options or {"is_causal": True}

    def forward(self, qkv: Tensor) -> Tensor:
        q, k, v = qkv.unflatten(-1, (3, 2, 16)).transpose(1, 3).unbind(2)
        return self.function(q, k, v, **self.options).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("function", [F.scaled_dot_product_attention, torch.ops.sage.attn, sage])
@pytest.mark.parametrize("how", ["reentrant", "saved", "compiled"])
def test_checkpointing_and_compilation_change_nothing(how, function) -> None:
    torch.manual_seed(0)
    options = {"causal": True} if function is sage else {}
    plain = Stack("none", function, **options)
    other = Stack("none" if how == "compiled" else how, function, **options)
    other.load_state_dict(plain.state_dict())
    # Reentrant checkpointing needs an input that asks for gradients.
    x = torch.randn(1, 40, 32, requires_grad=True)
    expected = sage_cute.diagnose(plain, x, policies=["fast"])
    names = [layer.name for layer in expected.layers]
    assert names == ["attends.0", "attends.1", "attends.1#2"]
    model = torch.compile(other) if how == "compiled" else other
    found = sage_cute.diagnose(model, x, policies=["fast"])
    if how == "reentrant":  # recomputed last first, so that the two calls change their names
        assert {layer.name for layer in found.layers} == set(names)
    else:
        assert [layer.errors for layer in found.layers] == [la.errors for la in expected.layers]
    assert sorted(str(la.figures["ds_rms"]) for la in found.layers) == sorted(
        str(la.figures["ds_rms"]) for la in expected.layers
    )


def test_torch_modules_that_call_sdpa_themselves_are_seen() -> None:
    layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    found = sage_cute.diagnose(
        encoder, torch.randn(1, 24, 32), loss=lambda y: y.square().mean(), policies=["fast"]
    )
    assert [la.name for la in found.layers] == ["layers.0.self_attn", "layers.1.self_attn"]
    assert found.layers[0].shape["heads"] == 2


def test_autocast_is_seen_as_sdpa_sees_it() -> None:
    x = make_inputs("g1", SHAPE, dtype=torch.float32)

    class Autocast(Known):
        def forward(self, unused: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return super().forward(unused)

    layer = diagnose(Autocast(x)).layers[0]
    assert layer.dtype == "bfloat16"
    exact = x._replace(q=x.q.bfloat16(), k=x.k.bfloat16(), v=x.v.bfloat16())
    bfloat16 = diagnose(Known(exact)).layers[0]
    assert layer.figures["p_rms"] == pytest.approx(bfloat16.figures["p_rms"])


def test_batches_and_sequences() -> None:
    model = Stack("none")
    first, second = torch.randn(3, 40, 32), torch.randn(1, 40, 32)
    found = sage_cute.diagnose(model, first, [second], policies=["fast"], sequences=2)
    assert found.steps == 2 and found.layers[0].sequences == 3
    alone = [sage_cute.diagnose(model, x, policies=["fast"]) for x in (first[:2], second)]
    # The loss is a mean over the batch: relative errors do not see that, magnitudes do.
    masses = [la.layers[0].figures["sink_mass"] for la in alone]
    expected = [(2 * a + b) / 3 for a, b in zip(*masses, strict=True)]
    assert found.layers[0].figures["sink_mass"] == pytest.approx(expected)
    assert found.loss == pytest.approx((model(first) + model(second)).item() / 2)


def test_losses_and_batches_of_every_kind() -> None:
    model = Known(make_inputs("g1", SHAPE))

    class Wrapped(nn.Module):
        def __init__(self, wrap) -> None:
            super().__init__()
            self.inner, self.wrap = model, wrap

        def forward(self, unused, *, key=None):
            return self.wrap(self.inner(unused))

    class Output:
        def __init__(self, loss) -> None:
            self.loss = loss

    expected = diagnose(model).layers[0].errors
    batch = {"unused": torch.zeros(1), "key": 1}
    for wrap in (Output, lambda loss: {"loss": loss}):
        assert (
            sage_cute.diagnose(Wrapped(wrap), batch, policies=["fast"]).layers[0].errors == expected
        )
    chosen = sage_cute.diagnose(
        Wrapped(lambda loss: (loss, 0)), batch, loss=lambda out: out[0], policies=["fast"]
    )
    assert chosen.layers[0].errors == expected


def test_errors_say_what_to_do() -> None:
    model = Known(make_inputs("g1", SHAPE))
    with pytest.raises(DiagnosisError, match=r"diagnose\(model, batch\)"):
        sage_cute.diagnose(model)
    with pytest.raises(DiagnosisError, match="pass loss="):
        sage_cute.diagnose(nn.Linear(4, 4), torch.ones(2, 4))
    with pytest.raises(DiagnosisError, match=r"must call sage_cute\.attention"):
        sage_cute.diagnose(nn.Linear(4, 1), torch.ones(1, 4))
    with pytest.raises(PolicyError, match="unknown policy"):
        diagnose(model, policies=["fastest"])
    with pytest.raises(DiagnosisError, match="policy"):
        diagnose(model, policies=[])
    with pytest.raises(DiagnosisError, match="sequences=0"):
        diagnose(model, sequences=0)


# The verdict


def test_verdict_of_a_model_with_qk_norm() -> None:
    found = diagnose(Known(make_inputs("qkn", SHAPE), is_causal=True), policies=["fast", "sagebwd"])
    assert found.verdict[0].startswith("fast: holds. Worst layer model: d")
    assert found.verdict[2] == "Use fast."
    assert any(line.startswith("QK-norm: little to gain") for line in found.verdict)
    assert "INT8" not in str(found.skipped) and "Attention sinks" not in str(found)


def test_verdict_of_large_scores() -> None:
    found = diagnose(Known(make_inputs("g10", SHAPE)), policies=["sagebwd"])
    assert found.verdict[0].startswith("sagebwd: at risk.")
    assert found.verdict[1].startswith("No policy keeps dQ and dK of every layer within .1000")
    assert any(line.startswith("QK-norm: would help") for line in found.verdict)
    layer = found.layers[0]
    assert (
        layer.errors[QK_NORM]["dq"].layer_rel_l2
        < 0.1
        < 0.3
        < layer.errors["sagebwd"]["dq"].layer_rel_l2
    )


def test_verdict_of_an_offset() -> None:
    x = make_inputs("kb", SHAPE)
    for policy in ("sagebwd", "sagebwd:smooth_k=false"):
        found = diagnose(Known(x), policies=[policy])
        line = next(s for s in found.verdict if s.startswith("K smoothing"))
        assert "keep it on" in line
        errors = {
            c: found.layers[0].errors[c]["dq"].layer_rel_l2
            for c in (policy, OTHER_SMOOTHING, SIXTEEN_BIT)
        }
        smooth, raw = errors[policy], errors[OTHER_SMOOTHING]
        if policy.endswith("false"):
            smooth, raw = raw, smooth
        assert raw > 4 * smooth and f"{smooth:.4f}"[1:] in line


def test_verdict_of_a_sink() -> None:
    found = diagnose(
        Known(make_inputs("sink", (1, 2, 256, 64)), is_causal=True), policies=["fast", "sagebwd"]
    )
    line = next(s for s in found.verdict if s.startswith("Attention sinks"))
    assert "2 of 2 heads" in line and "sagebwd would round it away" in line


def test_not_a_number_is_at_risk_and_still_json(tmp_path) -> None:
    good, bad = make_inputs("g1", SHAPE), make_inputs("g1", SHAPE)
    bad.q[0, 0, 3, 3] = math.nan
    both = nn.ModuleDict({"good": Known(good), "bad": Known(bad), "last": Known(good)})
    both.forward = lambda unused: sum(layer(unused) for layer in both.values())
    found = diagnose(both)
    assert found.verdict[0].startswith("fast: at risk. Worst layer bad:")
    assert math.isnan(found.worst["fast"]["dq"]) and found.worst["16-bit"].keys() == set(TENSORS)
    assert sum("cannot be told" in line for line in found.verdict) == 2
    found.write_json(tmp_path / "d.json")
    assert "NaN" not in (tmp_path / "d.json").read_text()


# What is written


def test_table_json_and_heat_map(tmp_path) -> None:
    found = sage_cute.diagnose(Stack("none"), torch.randn(2, 40, 32))
    assert found.policies == ("default", "accurate", "sagebwd")
    assert len(found.table().splitlines()) == 2 + 3
    assert len(found.table(heads=True).splitlines()) == 2 + 3 * 2
    assert "attends.1#2 head 1" in found.table(heads=True)
    found.write_json(tmp_path / "d.json")
    content = json.loads((tmp_path / "d.json").read_text())
    assert content["verdict"] == found.verdict and content["format"] == 1
    assert content["layers"][0]["errors"]["sagebwd"]["dq"]["cosine"][1] == pytest.approx(
        found.layers[0].errors["sagebwd"]["dq"].cosine[1]
    )
    assert content["mean"]["default"]["dq"] <= content["worst"]["default"]["dq"]
    assert "qk=int8" in content["mixes"]["default"]
    assert 0 < found.step_seconds < found.seconds
    found.write_heatmap(tmp_path / "d.png")
    assert (tmp_path / "d.png").read_bytes().startswith(b"\x89PNG")


def test_sixteen_bit_attention_of_torch_is_that_of_the_reference() -> None:
    x = make_inputs("llm", (1, 4, 96, 32), kv_heads=2)
    truth = run_reference(x, causal=True, scale=0.2)
    by_sdpa = relative_errors(measure.sdpa_16_bit(x, True, 0.2), truth)
    mix = measure.columns_of(["fast"])[SIXTEEN_BIT]
    by_reference = relative_errors(run_attention(x, policy=mix, causal=True, scale=0.2), truth)
    for name in TENSORS:
        assert 0 < by_sdpa[name] < 0.01 > by_reference[name] > 0


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    x = make_inputs("llm", (1, 4, 300, 64), kv_heads=2, device="cuda")
    model = Known(x, is_causal=True, enable_gqa=True)
    layer = diagnose(model, policies=["fast"]).layers[0]
    on_cpu = diagnose(Known(x.to("cpu"), is_causal=True, enable_gqa=True)).layers[0]
    assert layer.evaluated_on["fast"].startswith("cuda")
    assert layer.evaluated_on[SIXTEEN_BIT] == "cuda:0: SDPA"
    for name in TENSORS:
        assert layer.errors["fast"][name].layer_rel_l2 == pytest.approx(
            on_cpu.errors["fast"][name].layer_rel_l2, rel=0.1
        )
    for name, values in on_cpu.figures.items():
        assert layer.figures[name] == pytest.approx(values, rel=0.05), name
