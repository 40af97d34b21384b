"""The table of what is supported against those who do the work, and those who tell of it."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import sage_cute
from sage_cute import limits, support
from sage_cute.compile import bwd_launch, launch, quant_launch
from sage_cute.compile.tensors import num_sms
from sage_cute.errors import DTypeError, UnsupportedError
from sage_cute.limits import CPU, FAMILIES, HOPPER, MASKS
from sage_cute.policies import PRESETS, resolve

CHANGES = (
    *("qk=16bit", "pv=16bit,dp=16bit", "s=16bit", "dv=int8", "dq=int8", "dk=int8", "dp=16bit"),
    *("smooth_k=false", "smooth_q=true", "smooth_v=true", "k_scale=per_token", "q_scale=per_block"),
    *("v_scale=per_block", "v_scale=per_channel,dp=16bit", "dp=int8,do_scale=per_block"),
    *("block_k=64", "block_k=32", "block_k=16", "block_k=48", "block_k=256", "p_max=127"),
    *("block_q=64", "q_scale=per_block,block_q=16", "q_scale=per_block,block_q=100"),
    *("p_scale=per_block", "dp=16bit,dp_v=exact", "bwd_block_q=64", "bwd_block_k=96"),
    *("dv=int8,bwd_block_q=32", "dq=int8,ds_dq_rows=16"),
)
POLICIES = (*PRESETS, *(f"{p}:{c}" for p, c in itertools.product(("fast", "sagebwd"), CHANGES)))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_table_says_what_the_kernels_take(policy, dtype) -> None:
    """Every head_dim and many mixes: yes exactly where quantization and attention can be built."""
    mix, torch_dtype = resolve(policy), getattr(torch, dtype)
    for head_dim, is_causal in itertools.product(range(8, 288, 8), (False, True)):
        call = {"head_dim": head_dim, "dtype": torch_dtype, "is_causal": is_causal}
        masks = ("causal",) if is_causal else ()
        forward = bool(launch.supports(mix, **call))
        if forward:
            try:
                quant_launch.quant_spec(mix, torch_dtype, head_dim, launch.V_SCALE_FORM)
            except UnsupportedError:
                forward = False
        assert forward == supported("forward", mix, head_dim, masks), call
        if forward:  # else there is nothing to differentiate
            backward = bool(bwd_launch.supports(mix, **call))
            assert backward == supported("backward", mix, head_dim, masks), call


def supported(direction, mix, head_dim, masks) -> bool:
    return not (HOPPER.why_not_head_dim(head_dim) or HOPPER.why_not(direction, mix, masks))


def test_every_rule_is_broken_by_a_mix_and_its_remedy_mends_it() -> None:
    mixes = [resolve(p) for p in POLICIES]
    for family, direction in itertools.product(FAMILIES, limits.BOTH):
        assert set(family.masks) == set(MASKS)
        for rule in family.rules[direction]:
            broken = [mix for mix in mixes if rule.why_not(mix)]
            assert broken, rule
            for mix in broken:
                assert rule.why_not(mix).startswith(f"{rule.field}=")
                assert not rule.why_not(mix.replace(**{rule.field: rule.values[0]}))


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.name)
def test_head_dims_and_dtypes_say_what_to_do(family) -> None:
    for head_dim in range(0, 300):
        reason = family.why_not_head_dim(head_dim)
        assert (reason is None) == (head_dim in family.head_dims)
        if reason and head_dim < max(family.head_dims):
            padded = int(reason.split("zeros to ")[1].split()[0])
            assert padded > head_dim and padded in family.head_dims
    assert "cast" in family.why_not_dtype("float64")


def test_the_remedy_for_a_head_dim_gives_the_same_attention() -> None:
    """Zeros appended, and the scale given: nothing but the shape changes."""
    q, k, v = (torch.randn(1, 2, 40, 41) for _ in range(3))
    assert "pad q, k and v with zeros to 48 and give scale" in HOPPER.why_not_head_dim(41)
    padded = (torch.nn.functional.pad(x, (0, 7)) for x in (q, k, v))
    out = sage_cute.attention(*padded, scale=41**-0.5)[..., :41]
    torch.testing.assert_close(out, sage_cute.attention(q, k, v))


def test_a_mask_that_a_family_lacks_is_refused_by_name(monkeypatch) -> None:
    support._why_not.cache_clear()
    monkeypatch.setitem(CPU.masks, "causal", limits.FORWARD_ONLY)
    q = torch.ones(1, 1, 4, 8, requires_grad=True)
    with pytest.raises(UnsupportedError, match="backward on the CPU: no kernel for a causal mask"):
        sage_cute.attention(q, q, q, causal=True)
    assert "causal mask" in sage_cute.is_supported(q, q, q, causal=True).reason
    assert sage_cute.attention(q.detach(), q.detach(), q.detach(), causal=True).shape == q.shape
    assert "| forward | forward and backward |" in limits.markdown()
    support._why_not.cache_clear()


def test_an_unknown_gpu_is_told_what_is_supported(monkeypatch) -> None:
    old = SimpleNamespace(name="NVIDIA A100", major=8, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: old)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    support._family_of_gpu.cache_clear()
    message = r"NVIDIA A100 has compute capability 8\.0.*use CPU and NVIDIA Hopper .*9\.0"
    with pytest.raises(UnsupportedError, match=message):
        support._family(torch.device("cuda", 0))
    with pytest.raises(UnsupportedError, match=message):
        num_sms(7)
    support._family_of_gpu.cache_clear()


def test_float32_on_a_gpu_is_a_type_error() -> None:
    reason = HOPPER.why_not_dtype("float32")
    assert "cast" in reason
    with FakeTensorMode(), pytest.raises(DTypeError, match=reason):
        q = torch.empty(1, 1, 4, 64, device="cuda")
        torch.ops.sage.attn(q, q, q)


def test_the_table_has_a_text_for_everything() -> None:
    rows = limits.table()
    assert all(len(row) == len(limits.columns()) and all(row) for row in rows)
    assert {row[0] for row in rows} >= set(MASKS.values())
    for text in limits.REFUSED.values():
        assert ": " in text and text in limits.markdown()
