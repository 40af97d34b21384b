"""Policies as data: what is valid, what it says of itself, and the strings that name it."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sage_cute.errors import PolicyError
from sage_cute.policies import (
    DEFAULT,
    PRESETS,
    PRODUCTS,
    Policy,
    canonical,
    policies,
    resolve,
)
from sage_cute.testing import POLICY_FIELDS

FEW = settings(deadline=None, max_examples=50, derandomize=True)
any_fields = st.fixed_dictionaries({}, optional={
    name: st.sampled_from(values) for name, values in POLICY_FIELDS.items()
})  # fmt: skip


def valid(fields: dict[str, object]) -> bool:
    try:
        Policy(**fields)  # type: ignore[arg-type]
    except PolicyError:
        return False
    return True


def test_presets_are_those_of_the_contract() -> None:
    """numerics.md, part I, as Hopper's kernels adapt it: 16-bit dV, dK and dQ; finer INT8 ones."""
    in_int8 = {
        name: [p for p in PRODUCTS if getattr(policy, p) == "int8"]
        for name, policy in PRESETS.items()
    }
    assert in_int8["sagebwd"] == ["qk", "pv", "s", "dv", "dq", "dk"]
    assert in_int8["int8"] == list(PRODUCTS)
    assert in_int8["fast"] == ["qk", "pv", "s", "dp"]
    assert in_int8["accurate"] == ["qk", "pv", "s"]
    paper = PRESETS["sagebwd"]
    assert (paper.block_q, paper.block_k, paper.p_max) == (128, 64, 127)
    assert {paper.q_scale, paper.k_scale, paper.v_scale} == {"per_block"}
    assert paper.dp_v == "exact"
    for name in ("fast", "accurate", "int8"):
        policy = PRESETS[name]
        assert {policy.q_scale, policy.v_scale} == {"per_token"}
        assert (policy.k_scale, policy.block_k) == ("per_block", 128)
        assert policy.p_max == 255
        assert policy.p_scale == ("per_block" if name == "accurate" else "bounded")
        assert policy.dequantized_v_in_dp
        assert policy.p_bwd_scale == policy.ds_dk_scale == "per_key"
        assert policy.transposed_scale == "per_channel"
        assert (policy.bwd_block_q, policy.ds_dq_rows) == (64, 1)
    assert all(p.smooth_k and not p.smooth_q and not p.smooth_v for p in PRESETS.values())


def test_default_is_a_preset_and_listed() -> None:
    assert policies()["default"] == PRESETS[DEFAULT] == resolve("default")
    assert set(policies()) == {*PRESETS, "default"}
    policies().clear()
    assert policies(), "what is returned is the caller's own"


@FEW
@given(fields=any_fields, name=st.sampled_from(list(PRESETS)))
def test_strings_say_everything(fields: dict[str, object], name: str) -> None:
    changes = ",".join(f"{k}={str(v).lower()}" for k, v in fields.items())
    try:
        policy = PRESETS[name].replace(**fields)
    except PolicyError:
        with pytest.raises(PolicyError):
            resolve(f"{name}:{changes}")
        return
    spec = f"{name}:{changes}" if changes else name
    assert resolve(spec) == policy
    short = canonical(spec)
    assert resolve(short) == policy
    assert canonical(short) == short
    assert len(short) <= len(spec)
    assert short.count("=") == sum(
        getattr(policy, f) != getattr(PRESETS[name], f) for f in POLICY_FIELDS
    )


def test_canonical_names_the_default() -> None:
    assert canonical("default") == DEFAULT
    assert canonical("default:dq=int8") == f"{DEFAULT}:dq=int8"
    assert canonical("sagebwd:dq=int8") == "sagebwd"
    assert canonical("sagebwd: smooth_k = False , dq = 16bit") == "sagebwd:dq=16bit,smooth_k=false"


@pytest.mark.parametrize("spec", ["nonsense", "", "Fast", "nonsense:dq=int8"])
def test_an_unknown_name_lists_the_known_ones(spec: str) -> None:
    with pytest.raises(PolicyError, match="known policies: sagebwd, fast, accurate, int8, default"):
        resolve(spec)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ("dq=int4", "dq='int4': choose one of int8, 16bit"),
        ("nonsense=1", "write field=value with a field of qk, pv"),
        ("dq", "write field=value"),
        ("=int8", "write field=value"),
        ("smooth_k=maybe", "smooth_k=maybe: true or false"),
        ("smooth_k=1", "smooth_k=1: true or false"),
        ("block_q=many", "block_q=many: an integer"),
        ("p_max=128", "p_max=128: choose one of 127, 255"),
        ("p_scale=running", "p_scale='running': choose one of per_block, bounded"),
        ("block_q=0", "block_q=0: 1 to 512"),
        ("block_k=513", "block_k=513: 1 to 512"),
        ("bwd_block_q=1024", "bwd_block_q=1024: 1 to 512"),
        ("ds_dq_rows=7", "must divide bwd_block_q=128"),
        ("ds_dq_rows=-1", "must divide"),
        ("qk=16bit,smooth_q=true", "smooth_q only changes an INT8 qk"),
        ("pv=16bit,smooth_v=true", "smooth_v only changes an INT8 pv"),
        ("dp=int8,v_scale=per_channel", "V's scale may not vary over them"),
        ("dq=int8,", "write field=value"),
    ],
)
def test_invalid_changes_say_why(changes: str, message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        resolve(f"sagebwd:{changes}")


@pytest.mark.parametrize("field", POLICY_FIELDS)
def test_every_field_has_a_closed_set_or_a_range(field: str) -> None:
    with pytest.raises(PolicyError):
        Policy(**{field: "nonsense" if isinstance(getattr(Policy(), field), (str, bool)) else -3})


def test_policies_are_values() -> None:
    policy = Policy()
    assert policy == PRESETS["sagebwd"]
    assert len({policy, Policy(), policy.replace(dq="16bit")}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.dq = "16bit"  # type: ignore[misc]
    assert json.loads(json.dumps(policy.asdict())) == policy.asdict()
    assert Policy(**policy.asdict()) == policy
    with pytest.raises(PolicyError):
        policy.replace(dq="int4")


@FEW
@given(fields=any_fields.filter(valid))
def test_a_policy_prints_its_mix(fields: dict[str, object]) -> None:
    policy = Policy(**fields)  # type: ignore[arg-type]
    text = str(policy)
    for product in PRODUCTS:
        assert f"{product}={getattr(policy, product)}" in text
    scales = ("q_scale", "k_scale", "v_scale", "p_scale", "p_bwd_scale", "transposed_scale")
    for scale in (getattr(policy, name) for name in scales):
        assert scale in text
    assert ("smoothing: none" in text) == (
        not (policy.smooth_k or policy.smooth_q or policy.smooth_v)
    )


@FEW
@given(fields=any_fields.filter(valid))
def test_what_the_backward_gets(fields: dict[str, object]) -> None:
    policy = Policy(**fields)  # type: ignore[arg-type]
    assert policy.saves_q_codes == (policy.qk == "int8")
    assert policy.saves_k_codes == (policy.qk == "int8" and not policy.smooth_q)
    if policy.dp == "int8":
        assert policy.dequantized_v_in_dp
    elif policy.pv == "16bit" or policy.dp_v == "exact":
        assert not policy.dequantized_v_in_dp


def test_the_fields_to_draw_from_are_all_fields() -> None:
    assert list(POLICY_FIELDS) == [f.name for f in dataclasses.fields(Policy)]
    for name, values in POLICY_FIELDS.items():
        assert len(set(values)) == len(values) > 1
        assert getattr(Policy(), name) in values
