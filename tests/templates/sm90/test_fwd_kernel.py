"""The forward kernel on a GPU against the CPU implementation on the same codes."""

from __future__ import annotations

import importlib.util
import itertools
import math
import pathlib

import pytest
import torch

from sage_cute.config import AttnProblem, FwdTileConfig, default_fwd_config
from sage_cute.numerics.forward import sage_forward
from sage_cute.policies import resolve

pytestmark = [pytest.mark.gpu, pytest.mark.emulated(slow=True)]

_PATH = pathlib.Path(__file__).with_name("fwd_case.py")
_spec = importlib.util.spec_from_file_location("fwd_case", _PATH)
case = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(case)

SHAPES = [  # batch, heads, kv_heads, seqlen_q, seqlen_k
    (1, 2, 1, 256, 256),
    (2, 4, 2, 200, 200),
    (1, 2, 2, 1, 1),
    (1, 2, 2, 63, 65),
    (1, 2, 1, 127, 300),
    (1, 1, 1, 300, 127),  # causal: rows with no key
    (1, 2, 1, 1000, 1000),
    (1, 1, 1, 5, 640),
    (3, 6, 2, 130, 513),
]
POLICIES = ["fast", "fast:p_scale=per_block", "sagebwd"]
CONFIGS = {
    "default": {},
    "serial": {"overlap": False, "pv_slices": 2},
    "three warpgroups": {
        "overlap": False,
        "pv_slices": 2,
        "num_consumer_wgs": 3,
        "tile_m": 192,
    },
    "eager": {"lazy_rescale": False},
    "polynomial": {"exp_fma_of_8": 4},
    "persistent": {"persistent": True},
    "pingpong": {"pingpong": True},
    "one warpgroup": {"num_consumer_wgs": 1, "tile_m": 64, "num_stages": 2},
}


def compare(
    shape, *, head_dim, policy, causal, dtype, scale=None, sigma=1.0, spread=0.2, config=None
):
    """Within numerics.md's bound for a kernel against the same quantization: rounding of the output
    and of probabilities (to halves), which moves some codes of P by one."""
    policy = resolve(policy)
    scale = head_dim**-0.5 if scale is None else scale
    q, k, v = case.make_inputs(*shape, head_dim, sigma, spread=spread)
    expected = sage_forward(q, k, v, scale=scale, causal=causal, policy=policy)
    tensors = {name: x.cuda() for name, x in case.quantized(q, k, v, policy, causal).items()}
    if config is not None:
        problem = AttnProblem.of(
            policy, head_dim=head_dim, dtype=str(dtype).split(".")[1], is_causal=causal
        )
        config = FwdTileConfig(**{**default_fwd_config(problem).asdict(), **config})
    out, lse = case.launch(
        tensors, dtype=dtype, scale=scale, causal=causal, policy=policy, config=config
    )
    out, lse = out.float().cpu(), lse.cpu()
    assert torch.isfinite(out).all()
    assert torch.equal(torch.isneginf(lse), torch.isneginf(expected.lse))
    seen = torch.isfinite(expected.lse)
    assert (out[~seen] == 0).all()
    if seen.any():
        torch.testing.assert_close(lse[seen], expected.lse[seen], rtol=1e-5, atol=1e-5)
        error = (out - expected.out).norm() / expected.out.norm()
        assert error < 5e-3, error


IN_CI = {("fast", 128, True), ("fast", 64, False), ("sagebwd", 128, True)}


def marks(*case):
    """Of a case that the emulator runs without being asked to."""
    return [pytest.mark.emulated] if case in IN_CI else []


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("policy", "head_dim", "causal"),
    [
        pytest.param(*case, marks=marks(*case))
        for case in itertools.product(POLICIES, (64, 128), (False, True))
    ],
)
def test_shapes(shape, policy, head_dim, causal):
    compare(shape, head_dim=head_dim, policy=policy, causal=causal, dtype=torch.bfloat16)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("causal", [False, True])
def test_values_of_very_different_norm(policy, causal):
    compare(
        (1, 2, 1, 500, 700),
        head_dim=64,
        policy=policy,
        causal=causal,
        dtype=torch.bfloat16,
        spread=2.0,
    )


@pytest.mark.emulated
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "sizes", [(1e-30, 1e-20, 1.0, 0.0, 1e30), (1e30, 1.0, 1e-20, 0.0, 1e-30), (1e-2, 0.0, 0.0)]
)
def test_blocks_of_values_of_any_size(sizes, policy):
    """O is counted in units of the values' scale, from the last block that a row sees on."""
    policy, tokens = resolve(policy), 128 * len(sizes)
    q, k, v = case.make_inputs(1, 1, 1, tokens, tokens, 64)
    v = (v.unflatten(2, (-1, 128)) * torch.tensor(sizes)[:, None, None]).flatten(2, 3)
    v = v.bfloat16().float()
    expected = sage_forward(q, k, v, scale=0.125, causal=True, policy=policy)
    tensors = {name: x.cuda() for name, x in case.quantized(q, k, v, policy, True).items()}
    out, _ = case.launch(tensors, dtype=torch.bfloat16, scale=0.125, causal=True, policy=policy)
    out, largest = out.double().cpu(), expected.out.abs().amax(-1, keepdim=True).clamp(min=1e-37)
    error = (out - expected.out) / largest.double()
    error = error.unflatten(2, (-1, 128)).square().mean((0, 1, 3, 4)).sqrt()
    assert (error < 5e-3).all(), error


@pytest.mark.emulated
@pytest.mark.parametrize("policy", ["fast", "sagebwd"])
def test_flat_attention_over_many_keys(policy):
    """O, a mean of random values, is far smaller than what 128 added to their codes makes of it."""
    policy = resolve(policy)
    q, k, v = case.make_inputs(1, 1, 1, 64, 4096, 64)
    q = q * 0
    expected = sage_forward(q, k, v, scale=0.125, causal=False, policy=policy)
    tensors = {name: x.cuda() for name, x in case.quantized(q, k, v, policy).items()}
    out, _ = case.launch(tensors, dtype=torch.float16, scale=0.125, causal=False, policy=policy)
    error = (out.float().cpu() - expected.out).norm() / expected.out.norm()
    assert error < 5e-3, error


@pytest.mark.parametrize("head_dim", [16, 32, 40, 72, 96, 136, 160, 192, 248, 256])
@pytest.mark.parametrize("policy", POLICIES)
def test_other_head_dims(head_dim, policy):
    compare((2, 4, 2, 200, 333), head_dim=head_dim, policy=policy, causal=True, dtype=torch.float16)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("causal", [False, True])
def test_configurations(name, causal):
    compare(
        (2, 4, 2, 500, 700),
        head_dim=128,
        policy="fast",
        causal=causal,
        dtype=torch.bfloat16,
        config=CONFIGS[name],
    )


@pytest.mark.parametrize("sigma", [0.1, 3.0, 10.0])
@pytest.mark.parametrize("scale", [0.1, -0.1, 0.0])
def test_range_of_scores(sigma, scale):
    compare(
        (1, 2, 1, 300, 1000),
        head_dim=128,
        policy="fast",
        causal=False,
        dtype=torch.bfloat16,
        scale=scale,
        sigma=sigma,
    )


@pytest.mark.emulated
def test_nan_scales_poison_the_rows_that_see_them_and_no_others():
    policy, seqlen, at = resolve("fast"), 600, 200
    q, k, v = case.make_inputs(1, 1, 1, seqlen, seqlen, 64)
    arguments = {"dtype": torch.bfloat16, "scale": 0.125, "causal": True, "policy": policy}
    clean = {name: x.cuda() for name, x in case.quantized(q, k, v, policy).items()}
    expected, _ = case.launch(clean, **arguments)
    # K has a scale for 128 keys: the rows that see one of them are poisoned.
    for name, index, first in (("k_scale", at // 128, at // 128 * 128), ("v_scale", at, at)):
        poisoned = {**clean, name: clean[name].clone()}
        poisoned[name][..., index] = math.nan
        out, _ = case.launch(poisoned, **arguments)
        block = at // 128 * 128
        assert torch.equal(out[:, :, :block], expected[:, :, :block])
        # The block's largest V scale may have been the one that is NaN now: other codes, then.
        between = out[:, :, block:first].float(), expected[:, :, block:first].float()
        assert torch.isfinite(between[0]).all()
        assert (between[0] - between[1]).norm() <= 3e-3 * between[1].norm()
        assert out[:, :, first:].isnan().all()
    poisoned = {**clean, "q_scale": clean["q_scale"].clone()}
    poisoned["q_scale"][..., at] = math.nan
    out, _ = case.launch(poisoned, **arguments)
    assert out[:, :, at].isnan().all()
    others = torch.arange(seqlen) != at
    assert torch.equal(out[:, :, others], expected[:, :, others])


def test_fifty_runs_give_the_same_bits():
    policy = resolve("fast")
    q, k, v = case.make_inputs(2, 4, 2, 700, 700, 128)
    tensors = {name: x.cuda() for name, x in case.quantized(q, k, v, policy).items()}
    arguments = {"dtype": torch.bfloat16, "scale": 0.09, "causal": True, "policy": policy}
    out, lse = case.launch(tensors, **arguments)
    for _ in range(50):
        again, lse_again = case.launch(tensors, **arguments)
        assert torch.equal(out, again)
        assert torch.equal(lse, lse_again)


def test_more_than_65535_heads():
    policy = resolve("fast")
    q, k, v = case.make_inputs(1, 70000, 1, 1, 8, 32)
    tensors = {name: x.cuda() for name, x in case.quantized(q, k, v, policy).items()}
    out, lse = case.launch(tensors, dtype=torch.bfloat16, scale=0.2, causal=False, policy=policy)
    expected = sage_forward(q, k, v, scale=0.2, causal=False, policy=policy)
    assert (out.float().cpu() - expected.out).norm() < 3e-3 * expected.out.norm()


def test_sanitizer(sanitize):
    sanitize(_PATH)
