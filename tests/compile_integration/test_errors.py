"""Bad input raises one clear error: in eager, in the fake rule, and under torch.compile."""

from __future__ import annotations

import re

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import sage_cute
from sage_cute import support
from sage_cute.errors import DTypeError, PolicyError, ShapeError, UnsupportedError
from sage_cute.limits import HOPPER, MASKS, NEITHER

B, H, S, D = 2, 4, 8, 16


def t(*shape, dtype=torch.float32, device="cpu"):
    return torch.zeros(*shape, dtype=dtype, device=device)


GOOD = (t(B, H, S, D), t(B, 2, S, D), t(B, 2, S, D))
BAD = {
    "three dimensions": (ShapeError, "must be .batch, heads, seqlen", (t(H, S, D),) * 3, {}),
    "five dimensions": (ShapeError, "must be .batch", (t(1, B, H, S, D), *GOOD[1:]), {}),
    "mixed dtypes": (
        DTypeError,
        r"different dtypes .torch.float32, torch.bfloat16, torch.float32.*autocast",
        (GOOD[0], GOOD[1].bfloat16(), GOOD[2]),
        {},
    ),
    "float64": (
        DTypeError,
        "dtype float64: the CPU takes float16, bfloat16 and float32; cast",
        [x.double() for x in GOOD],
        {},
    ),
    "int8": (DTypeError, "dtype int8: the CPU takes .*; cast", [x.char() for x in GOOD], {}),
    "k and v lengths": (ShapeError, "must have the same shape", (*GOOD[:2], t(B, 2, S + 1, D)), {}),
    "head_dim of v": (ShapeError, "head_dim of v other", (*GOOD[:2], t(B, 2, S, D + 8)), {}),
    "head_dim of k": (
        ShapeError,
        "same batch and head_dim",
        (GOOD[0], t(B, 2, S, D + 8), t(B, 2, S, D + 8)),
        {},
    ),
    "batch": (ShapeError, "same batch", (t(1, H, S, D), *GOOD[1:]), {}),
    "GQA 6:4": (
        ShapeError,
        "6 query heads are no multiple of 4",
        (t(B, 6, S, D),) + (t(B, 4, S, D),) * 2,
        {},
    ),
    "fewer query heads": (ShapeError, "no multiple", (t(B, 2, S, D),) + (t(B, 4, S, D),) * 2, {}),
    "no key heads": (ShapeError, "no multiple of 0", (t(B, 2, S, D),) + (t(B, 0, S, D),) * 2, {}),
    "head_dim 257": (
        UnsupportedError,
        "head_dim 257: the CPU takes 1 to 256; use fewer",
        (t(1, 1, S, 257),) * 3,
        {},
    ),
    "head_dim 0": (
        UnsupportedError,
        "head_dim 0: the CPU takes 1 to 256; pad q, k and v with zeros to 1",
        (t(1, 1, S, 0),) * 3,
        {},
    ),
    "devices": (
        UnsupportedError,
        "different devices",
        (GOOD[0], GOOD[1].to("meta"), GOOD[2]),
        {},
    ),
    "infinite scale": (UnsupportedError, "not finite", GOOD, {"scale": float("inf")}),
    "NaN scale": (UnsupportedError, "not finite", GOOD, {"scale": float("nan")}),
    "unknown policy": (
        PolicyError,
        "unknown policy 'fastest'; known policies: sagebwd, fast, accurate, int8, default",
        GOOD,
        {"policy": "fastest"},
    ),
    "unknown field": (PolicyError, "field=value", GOOD, {"policy": "fast:smooth=true"}),
    "window": (ShapeError, "window .-1, 3. must be .left, right.", GOOD, {"window": (-1, 3)}),
    "one side": (ShapeError, "window 3 must be .left, right.", GOOD, {"window": 3}),
    "fraction of a key": (ShapeError, "window .1.5, None. must be", GOOD, {"window": (1.5, None)}),
    "padding mask": (
        ShapeError,
        r"key_lengths must be int32 or int64 of shape .batch,. = .2,., got torch.bool .2, 8.; of a "
        r"padding mask .batch, seqlen_k. with the padding at the end pass mask.sum.-1.",
        GOOD,
        {"key_lengths": torch.ones(B, S, dtype=torch.bool)},
    ),
    "lengths of another batch": (
        ShapeError,
        "key_lengths must be",
        GOOD,
        {"key_lengths": torch.ones(B + 1, dtype=torch.int32)},
    ),
    "lengths as floats": (ShapeError, "key_lengths must", GOOD, {"key_lengths": torch.ones(B)}),
    "lengths elsewhere": (
        UnsupportedError,
        "key_lengths is on meta; move it to cpu",
        GOOD,
        {"key_lengths": torch.ones(B, dtype=torch.int64, device="meta")},
    ),
    "mean a query head": (
        ShapeError,
        r"k_mean must be floating point, .batch, kv_heads, head_dim. = .2, 2, 16., got",
        GOOD,
        {"k_mean": t(B, H, D)},
    ),
    "mean of integers": (ShapeError, "k_mean must", GOOD, {"k_mean": t(B, 2, D).int()}),
    "mean without smoothing": (
        UnsupportedError,
        "k_mean is given, but policy .* has smooth_k=false",
        GOOD,
        {"k_mean": t(B, 2, D), "policy": "fast:smooth_k=false"},
    ),
    "impossible mix": (
        PolicyError,
        "contracts over channels",
        GOOD,
        {"policy": "fast:v_scale=per_channel"},
    ),
}


@pytest.fixture(params=BAD)
def bad(request):
    return BAD[request.param]


@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize("return_lse", [False, True])
def test_eager(bad, needs_grad, return_lse) -> None:
    error, message, tensors, kwargs = bad
    if needs_grad:
        tensors = [x.clone().requires_grad_(x.is_floating_point()) for x in tensors]
    with pytest.raises(error, match=message):
        sage_cute.attention(*tensors, return_lse=return_lse, **kwargs)


def as_op(kwargs):
    """What the function makes of its keywords for the op; the check of a window is its own."""
    kwargs = dict(kwargs)
    tensors = kwargs.pop("key_lengths", None), kwargs.pop("k_mean", None)
    if "window" in kwargs:
        kwargs |= {"window_left": -2, "window_right": 0}
        del kwargs["window"]
    return tensors, kwargs


def test_kernel_level_ops(bad) -> None:
    error, message, tensors, kwargs = bad
    (lengths, mean), kwargs = as_op(kwargs)
    window = kwargs.get("window_left", -1), kwargs.get("window_right", -1)
    message = "window_left=-2, window_right=0: each" if window != (-1, -1) else message
    static = kwargs.get("scale"), False, kwargs.get("policy", "fast"), lengths, *window, mean
    for op in (torch.ops.sage.attn_fwd, torch.ops.sage.attn_infer):
        with pytest.raises(error, match=message):
            op(*tensors, *static)


def test_fake_rule(bad) -> None:
    error, message, tensors, kwargs = bad
    more, kwargs = as_op(kwargs)
    message = "window_left=-2, window_right=0: each" if "window_left" in kwargs else message
    with FakeTensorMode() as mode:
        fakes = [x if x is None else mode.from_tensor(x) for x in (*tensors, *more)]
        with pytest.raises(error, match=message):
            torch.ops.sage.attn(*fakes, **kwargs)


def test_under_compile(bad) -> None:
    error, message, tensors, kwargs = bad
    compiled = torch.compile(
        lambda *x: sage_cute.attention(*x, **kwargs), backend="aot_eager", fullgraph=True
    )
    # Dynamo wraps what a fake rule raises, or a function that it traces, and keeps the text.
    dynamo = torch._dynamo.exc.TorchRuntimeError, torch._dynamo.exc.Unsupported
    with pytest.raises((error, *dynamo), match=message):
        compiled(*tensors)


def test_is_supported_gives_the_message_as_its_reason(bad) -> None:
    error, _, tensors, kwargs = bad
    status = sage_cute.is_supported(*tensors, **kwargs)
    assert not status
    with pytest.raises(error) as raised:
        sage_cute.attention(*tensors, **kwargs)
    assert status.reason == str(raised.value)


def test_is_supported_of_good_inputs() -> None:
    status = sage_cute.is_supported(*GOOD)
    assert status and status.supported and status.reason == ""


@pytest.mark.parametrize(
    ("name", "value", "instead"),
    [
        ("attn_mask", None, "an arbitrary mask.*key_lengths.*causal and window.*attention_varlen"),
        ("attn_mask", torch.ones(S, S, dtype=torch.bool), "an arbitrary mask"),
        ("key_padding_mask", torch.ones(B, S, dtype=torch.bool), "pass key_lengths"),
        ("dropout_p", 0.1, "dropout in attention"),
        ("is_causal", True, "causal=True is aligned bottom-right"),
        ("enable_gqa", True, "k and v may always have fewer heads"),
        ("sm_scale", 0.1, "it takes causal, window, k_mean, scale, policy, return_lse, key_l"),
    ],
)
def test_unknown_arguments_are_refused(name, value, instead) -> None:
    with pytest.raises(TypeError, match=f"unknown keyword {name}; .*{instead}") as raised:
        sage_cute.attention(*GOOD, **{name: value})
    assert type(raised.value) is sage_cute.errors.ArgumentError
    compiled = torch.compile(sage_cute.attention, backend="aot_eager")
    with pytest.raises(TypeError, match=f"unknown keyword {name}; .*{instead}"):
        compiled(*GOOD, **{name: value})
    if name not in ("is_causal", "enable_gqa"):
        with pytest.raises(RuntimeError, match=name):
            torch.ops.sage.attn(*GOOD, **{name: value})


@pytest.mark.parametrize("lengths", [[3, S + 1], [-1, 3]])
def test_lengths_beyond_the_keys_are_refused_on_the_cpu(lengths) -> None:
    with pytest.raises(
        ShapeError, match=f"key_lengths are {min(lengths)} to {max(lengths)}; k has 8"
    ):
        sage_cute.attention(*GOOD, key_lengths=torch.tensor(lengths))


def test_layout_and_scale_of_the_python_api() -> None:
    with pytest.raises(ShapeError, match="'bhsd' or 'bshd'"):
        sage_cute.attention(*GOOD, layout="sbhd")
    with pytest.raises(ShapeError, match="layout 'bshd': expected"):
        sage_cute.attention(*(x[0] for x in GOOD), layout="bshd")
    with pytest.raises(DTypeError, match="scale must be a number"):
        sage_cute.attention(*GOOD, scale="auto")
    with pytest.raises(DTypeError, match="scale must be a number, got Tensor"):
        sage_cute.attention(*GOOD, scale=torch.ones(2))


@pytest.mark.parametrize(
    ("error", "text", "dtype", "head_dim", "policy"),
    [
        (
            DTypeError,
            "dtype float32: NVIDIA Hopper takes float16 and bfloat16; cast",
            torch.float32,
            64,
            "fast",
        ),
        (UnsupportedError, "pad q, k and v with zeros to 48", torch.bfloat16, 44, "fast"),
        (UnsupportedError, "pv=int8", torch.float16, 64, "fast:pv=16bit,dp=16bit"),
        (UnsupportedError, "smooth_q=false", torch.bfloat16, 64, "fast:smooth_q=true"),
        (UnsupportedError, "k_scale=per_block", torch.bfloat16, 64, "fast:k_scale=per_token"),
    ],
)
def test_what_no_kernel_covers_is_refused_in_the_fake_rule_too(
    error, text, dtype, head_dim, policy
) -> None:
    with FakeTensorMode():
        # (torch aborts on a fake CUDA leaf that requires grad where there is no CUDA.)
        q = torch.empty(1, 2, 8, head_dim, device="cuda", dtype=dtype)
        for call in (
            lambda: torch.ops.sage.attn(q, q, q, policy=policy),
            lambda: torch.ops.sage.attn_fwd(q, q, q, None, False, policy),
        ):
            with pytest.raises(error, match=text):
                call()
        assert text in sage_cute.is_supported(q, q, q, policy=policy).reason


@pytest.mark.parametrize("mask", ["causal", "window", "key_lengths", "k_mean"])
def test_a_mask_without_a_kernel_is_refused_in_the_fake_rule_too(mask, monkeypatch) -> None:
    monkeypatch.setitem(HOPPER.masks, mask, NEITHER)
    support._why_not.cache_clear()
    text = re.escape(f"forward on NVIDIA Hopper: no kernel for a {MASKS[mask]}; move q, k and v to")
    with FakeTensorMode():
        q = torch.empty(1, 2, 8, 64, device="cuda", dtype=torch.bfloat16)
        op, ours = {
            "causal": ({"is_causal": True}, {"causal": True}),
            "window": ({"window_left": 9}, {"window": (9, None)}),
            "key_lengths": ({"key_lengths": torch.empty(1, device="cuda", dtype=torch.int32)},) * 2,
            "k_mean": ({"k_mean": torch.empty(1, 2, 64, device="cuda")},) * 2,
        }[mask]
        with pytest.raises(UnsupportedError, match=text):
            torch.ops.sage.attn(q, q, q, **op)
        assert re.search(text, sage_cute.is_supported(q, q, q, **ours).reason)
    support._why_not.cache_clear()


def test_other_devices_are_named() -> None:
    with FakeTensorMode(), pytest.raises((UnsupportedError, NotImplementedError), match="(?i)xpu"):
        q = torch.empty(1, 2, 8, 64, device="xpu", dtype=torch.bfloat16)
        torch.ops.sage.attn_fwd(q, q, q, None, True, "fast")


def test_wrong_gradients_are_refused() -> None:
    q, k, v = GOOD
    out, lse, *saved = torch.ops.sage.attn_fwd(q, k, v, None, False, "fast")
    with pytest.raises(ShapeError, match="dout"):
        torch.ops.sage.attn_backward(
            out[..., :-1], None, None, None, v, out, lse, *saved, None, False, "fast"
        )
    out, lse, *saved = torch.ops.sage.attn_fwd(q, k, v, None, False, "fast:qk=16bit,s=16bit")
    with pytest.raises(ShapeError, match="does not save codes"):
        torch.ops.sage.attn_backward(
            out, None, None, None, v, out, lse, *saved, None, False, "fast:qk=16bit,s=16bit"
        )


def test_out_of_memory_stays_a_catchable_error() -> None:
    q = torch.zeros(1, 1, 1, 64).expand(1 << 12, 1 << 12, 1 << 14, 64)
    with pytest.raises(RuntimeError, match="(?i)memory|alloc"):
        sage_cute.attention(q, q, q)
    assert sage_cute.attention(*GOOD).shape == GOOD[0].shape
