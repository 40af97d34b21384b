"""What the host entry accepts and refuses; needs no GPU: refusals come before any launch."""

import pytest
import torch

from sage_cute.compile.quant_launch import output_shapes, quant_spec, quantize
from sage_cute.errors import DTypeError, ShapeError, UnsupportedError
from sage_cute.policies import resolve

TOKEN, PAPER = resolve("fast:k_scale=per_token"), resolve("sagebwd")


def make(policy, q, k, v):
    spec = quant_spec(policy, q.dtype, q.shape[-1])
    shapes = output_shapes(spec, q.shape, k.shape)
    out = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in shapes.items()}
    return (q, k, v), out


def inputs(seqlen_q=100, seqlen_k=70, dtype=torch.bfloat16):
    return [
        torch.zeros(2, h, s, 64, dtype=dtype)
        for h, s in ((4, seqlen_q), (2, seqlen_k), (2, seqlen_k))
    ]


def test_shapes_per_token():
    shapes = output_shapes(quant_spec(TOKEN, torch.bfloat16, 64), (2, 4, 100, 64), (2, 2, 70, 64))
    assert {name: shape for name, (shape, _) in shapes.items()} == {
        "q_codes": (2, 4, 100, 64),
        "q_scale": (2, 4, 100),
        "k_codes": (2, 2, 70, 64),
        "k_scale": (2, 2, 70),
        "k_mean": (2, 2, 64),
        "mean_partials": (4, 1, 64),
        "v_t": (2, 2, 64, 128),
        "v_scale": (2, 2, 128),
    }


def test_shapes_per_block():
    shapes = output_shapes(quant_spec(PAPER, torch.bfloat16, 64), (2, 4, 300, 64), (2, 2, 70, 64))
    assert shapes["q_scale"][0] == (2, 4, 3)
    assert shapes["k_scale"][0] == shapes["v_scale"][0] == (2, 2, 2)


def test_16_bit_operands_have_no_outputs():
    policy = TOKEN.replace(pv="16bit", dp_v="exact", dp="16bit")
    spec = quant_spec(policy, torch.float16, 128)
    assert "v_t" not in output_shapes(spec, (1, 1, 8, 128), (1, 1, 8, 128))
    policy = TOKEN.replace(qk="16bit")
    spec = quant_spec(policy, torch.float16, 128)
    assert set(output_shapes(spec, (1, 1, 8, 128), (1, 1, 8, 128))) == {"v_t", "v_scale"}


@pytest.mark.parametrize(
    "change",
    [{"smooth_q": True}, {"smooth_v": True}, {"v_scale": "per_channel", "dp": "16bit"}],
)
def test_unsupported_policy(change):
    with pytest.raises(UnsupportedError):
        quant_spec(TOKEN.replace(**change), torch.bfloat16, 64)


def test_unsupported_dtype():
    with pytest.raises(DTypeError, match="float32"):
        quant_spec(TOKEN, torch.float32, 64)


def test_refuses_strided_head_dim():
    x, out = make(TOKEN, *inputs())
    strided = torch.zeros(2, 4, 64, 100, dtype=torch.bfloat16).transpose(2, 3)
    with pytest.raises(UnsupportedError, match="q.contiguous"):
        quantize(strided, *x[1:], policy=TOKEN, **out)


def test_refuses_unaligned_rows():
    x, out = make(TOKEN, *inputs())
    odd = torch.zeros(2, 2, 70, 66, dtype=torch.bfloat16)[..., :64]
    with pytest.raises(UnsupportedError, match="k.contiguous"):
        quantize(x[0], odd, x[2], policy=TOKEN, **out)


@pytest.mark.parametrize("name", ["q_codes", "k_mean", "v_t", "v_scale", "mean_partials"])
def test_refuses_wrong_outputs(name):
    x, out = make(TOKEN, *inputs())
    with pytest.raises(ShapeError, match=name):
        quantize(*x, policy=TOKEN, **{**out, name: None})
    with pytest.raises(ShapeError, match=name):
        quantize(*x, policy=TOKEN, **{**out, name: out[name][:1]})


def test_refuses_outputs_that_are_not_written():
    policy = TOKEN.replace(smooth_k=False)
    x, out = make(policy, *inputs())
    with pytest.raises(ShapeError, match="k_mean"):
        quantize(*x, policy=policy, **out, k_mean=torch.empty(2, 2, 64))


def test_nothing_to_do_launches_nothing():
    x, out = make(TOKEN, *inputs(0, 0))
    out["k_mean"].fill_(7.0)
    quantize(*x, policy=TOKEN, **out)
    assert (out["k_mean"] == 0).all()
