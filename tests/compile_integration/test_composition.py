"""The ops with the rest of torch: autocast, vmap, FLOP counting, checkpointing, DTensor."""

from __future__ import annotations

import textwrap
from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import sage_cute
from sage_cute.compile_integration.checkpointing import SAVE_OPS, save_attention
from sage_cute.compile_integration.flops import visible_pairs
from sage_cute.numerics.reference import visible

SAGE = torch.ops.sage


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_follows_its_dtype_and_casts_mixes(qkv, dtype) -> None:
    q, k, v = (x.requires_grad_() for x in qkv())
    with torch.autocast("cpu", dtype):
        out = SAGE.attn(q, k.detach().bfloat16(), v, is_causal=True, policy="accurate")
        out_lse, lse = sage_cute.attention(q, k, v, return_lse=True)
    assert out.dtype == out_lse.dtype == dtype and lse.dtype == torch.float32
    out.sum().backward()
    assert q.grad.dtype == v.grad.dtype == torch.float32 and q.grad.abs().sum() > 0
    expected = SAGE.attn(
        q.to(dtype), k.bfloat16().to(dtype), v.to(dtype), is_causal=True, policy="accurate"
    )
    assert torch.equal(out, expected)


def test_autocast_leaves_float64_to_the_error(qkv) -> None:
    q, k, v = (x.double() for x in qkv())
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(TypeError, match="float64"):
        SAGE.attn(q, k, v)


def test_autocast_disabled_inside(qkv) -> None:
    tensors = qkv()
    with torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", enabled=False):
        assert SAGE.attn(*tensors).dtype == torch.float32


@pytest.mark.parametrize("dims", [(0, 0, 0), (0, None, None), (None, 1, 1), (2, 0, 1)])
def test_vmap_equals_a_loop(qkv, dims) -> None:
    n, tensors = 3, []
    for x, dim in zip(qkv(), dims, strict=True):
        tensors.append(x if dim is None else torch.stack([x + i for i in range(n)], dim))
    for op in (SAGE.attn, SAGE.attn_with_lse):
        mapped = torch.vmap(partial(op, is_causal=True), in_dims=dims)(*tensors)
        mapped = mapped if isinstance(mapped, tuple) else (mapped,)
        for i in range(n):
            one = [x if d is None else x.select(d, i) for x, d in zip(tensors, dims, strict=True)]
            result = op(*one, is_causal=True)
            result = result if isinstance(result, tuple) else (result,)
            assert all(torch.equal(a[i], b) for a, b in zip(mapped, result, strict=True))


def test_vmap_is_differentiable_and_batches_gradients(qkv) -> None:
    stacked = [torch.stack([x, x + 1]).requires_grad_() for x in qkv()]
    torch.vmap(SAGE.attn)(*stacked).sum().backward()
    for i in range(2):
        one = [x.detach()[i].clone().requires_grad_() for x in stacked]
        SAGE.attn(*one).sum().backward()
        assert all(torch.equal(a.grad[i], b.grad) for a, b in zip(stacked, one, strict=True))
    q, k, v = (x.requires_grad_() for x in qkv())
    douts = torch.randn(3, *q.shape)
    out = SAGE.attn(q, k, v)
    batched = torch.autograd.grad(out, q, douts, is_grads_batched=True, retain_graph=True)[0]
    for dout, grad in zip(douts, batched, strict=True):
        assert torch.equal(torch.autograd.grad(out, q, dout, retain_graph=True)[0], grad)


def test_vmap_of_padded_batches(qkv) -> None:
    stacked = [torch.stack([x, x + 1]).requires_grad_() for x in qkv()]
    lengths, mean = torch.tensor([[70, 3], [9, 70]]), torch.randn(2, 2, 2, 32)
    call = partial(SAGE.attn, is_causal=True, window_left=9)
    dims = (0, 0, 0, 0, 1)
    out = torch.vmap(call, in_dims=dims)(*stacked, lengths, mean.transpose(0, 1))
    out.sum().backward()
    for i in range(2):
        one = [x.detach()[i].clone().requires_grad_() for x in stacked]
        result = call(*one, lengths[i], mean[i])
        result.sum().backward()
        assert torch.equal(out[i], result)
        assert all(torch.equal(a.grad[i], b.grad) for a, b in zip(stacked, one, strict=True))
    # A mapped query over keys and lengths that are not.
    one = torch.vmap(call, in_dims=(0, None, None, None))(
        stacked[0].detach(), *(x.detach()[0] for x in stacked[1:]), lengths[0]
    )
    expected = call(*(x.detach()[0] for x in stacked), lengths[0])
    assert torch.equal(one[0], expected)


@pytest.mark.parametrize("lengths", [(70, 70), (3, 8), (8, 3), (1, 1), (5, 0)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [(-1, -1), (2, 0), (0, 1), (-1, 3), (40, -1), (100, 100)])
def test_flops_count_visible_pairs(qkv, lengths, causal, window) -> None:
    sides = tuple(None if side < 0 else side for side in window)
    pairs = int(visible(*lengths, causal, torch.device("cpu"), sides).sum())
    assert visible_pairs(*lengths, causal, *window) == pairs
    q, k, v = qkv(seqlen_q=lengths[0], seqlen_k=lengths[1], requires_grad=True)
    product = 2 * 2 * 4 * 32 * pairs  # multiply-add, batch, query heads, head_dim
    masks = {"is_causal": causal, "window_left": window[0], "window_right": window[1]}
    with FlopCounterMode(display=False) as counter:
        out = SAGE.attn(q, k, v, **masks)
    assert counter.get_total_flops() == 2 * product
    with FlopCounterMode(display=False) as counter:
        out.sum().backward()
    assert counter.get_total_flops() == 5 * product


def count_forwards(function):
    """How often attn_fwd runs while function does."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            Count.calls += func is SAGE.attn_fwd.default
            return func(*args, **(kwargs or {}))

    with Count():
        function()
    return Count.calls


@pytest.mark.parametrize("selective", [False, True])
def test_checkpointing_gives_the_same_gradients_bitwise(qkv, selective) -> None:
    function = lambda q, k, v: sage_cute.attention(q.sin(), k, v, causal=True).cos()
    contexts = partial(create_selective_checkpoint_contexts, save_attention)
    kwargs = {"context_fn": contexts} if selective else {}
    tensors = qkv(dtype=torch.bfloat16)
    plain, saved = ([x.clone().requires_grad_() for x in tensors] for _ in range(2))
    function(*plain).sum().backward()
    calls = count_forwards(
        lambda: checkpoint(function, *saved, use_reentrant=False, **kwargs).sum().backward()
    )
    assert calls == (1 if selective else 2)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(plain, saved, strict=True))


def test_selective_checkpointing_under_compile(qkv, graphs_of) -> None:
    body = lambda q, k, v: sage_cute.attention(q.sin(), k, v).cos()
    contexts = partial(create_selective_checkpoint_contexts, list(SAVE_OPS))
    tensors = [x.requires_grad_() for x in qkv()]
    for kwargs, backward in (
        ({"context_fn": contexts}, ["sage.attn_backward.default"]),
        ({}, ["sage.attn_fwd.default", "sage.attn_backward.default"]),
    ):
        function = lambda *x, kwargs=kwargs: checkpoint(body, *x, use_reentrant=False, **kwargs)
        assert graphs_of(function, *tensors) == [["sage.attn_fwd.default"], backward]


@pytest.mark.parametrize("budget", [0.9, 0.0])
def test_activation_memory_budget_knows_the_cost(qkv, graphs_of, budget) -> None:
    tensors = [x.requires_grad_() for x in qkv()]
    with torch._functorch.config.patch(activation_memory_budget=budget):
        graphs = graphs_of(lambda q, k, v: SAGE.attn(q.sin().exp(), k, v).cos(), *tensors)
    # Not free to recompute, so recomputed only where there is no memory at all.
    assert graphs[1].count("sage.attn_fwd.default") == (0 if budget else 1)


SHARDED = textwrap.dedent("""
    import sys
    import torch, torch.distributed as dist
    import sage_cute
    from torch.distributed.device_mesh import init_device_mesh
    assert "torch.distributed.tensor.experimental" not in sys.modules
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    for kv_heads, placement, expected in (
        (2, Shard(0), Shard(0)),
        (2, Shard(1), Shard(1)),
        (2, Replicate(), Replicate()),
        (2, Shard(2), None),         # a sharded sequence is redistributed
        (1, Shard(1), None),         # one key head cannot be split,
        (3, Shard(1), None),         # and three not evenly
    ):
        whole = [torch.randn(2, h, 40, 32) for h in (12, kv_heads, kv_heads)]
        single = [x.clone().requires_grad_() for x in whole]
        out, lse = sage_cute.attention(*single, causal=True, return_lse=True)
        (out.square().sum() + lse.sin().sum()).backward()
        parts = [distribute_tensor(x, mesh, [placement]).requires_grad_() for x in whole]
        if kv_heads % 2:
            parts = [parts[0], *(distribute_tensor(x, mesh, [Replicate()]).requires_grad_()
                                 for x in whole[1:])]
        sharded, sharded_lse = sage_cute.attention(*parts, causal=True, return_lse=True)
        if expected is not None:
            assert sharded.placements == (expected,), sharded.placements
        (sharded.square().sum() + sharded_lse.sin().sum()).backward()
        torch.testing.assert_close(sharded.full_tensor(), out, rtol=0, atol=0)
        torch.testing.assert_close(sharded_lse.full_tensor(), lse)
        for a, b in zip(single, parts):
            torch.testing.assert_close(b.grad.full_tensor(), a.grad)
        lengths, mean = torch.tensor([40, 17]), torch.randn(2, kv_heads, 32)
        masked = sage_cute.attention(*whole, window=(9, 3), key_lengths=lengths, k_mean=mean)
        on = Shard(0) if placement == Shard(0) else Replicate()
        of_mean = placement if expected is not None else Replicate()
        local = sage_cute.attention(
            *(x.detach() for x in parts), window=(9, 3),
            key_lengths=distribute_tensor(lengths, mesh, [on]),
            k_mean=distribute_tensor(mean, mesh, [of_mean]),
        )
        if expected is not None:
            assert local.placements == (expected,), local.placements
        torch.testing.assert_close(local.full_tensor(), masked, rtol=0, atol=0)
        compiled = torch.compile(sage_cute.attention, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(
            compiled(*(x.detach() for x in parts), causal=True).full_tensor(), out
        )
    from torch.distributed.tensor.experimental import local_map
    whole = [torch.randn(50, h, 32) for h in (4, 2, 2)]
    cu = torch.tensor([0, 20, 50], dtype=torch.int32)
    parts = [distribute_tensor(x, mesh, [Shard(1)]).requires_grad_() for x in whole]
    try:
        sage_cute.attention_varlen(*parts, cu, cu)
    except sage_cute.errors.UnsupportedError as error:
        assert "local_map" in str(error)
    else:
        raise AssertionError("a DTensor in a packed batch")
    single = [x.clone().requires_grad_() for x in whole]
    sage_cute.attention_varlen(*single, cu, cu).square().sum().backward()
    by_head = local_map(lambda q, k, v: sage_cute.attention_varlen(q, k, v, cu, cu),
                        out_placements=[Shard(1)], in_placements=([Shard(1)],) * 3,
                        device_mesh=mesh)
    by_head(*parts).square().sum().backward()
    for a, b in zip(single, parts):
        torch.testing.assert_close(b.grad.full_tensor(), a.grad)
    dist.destroy_process_group()
    print("sharded ok")
""")


def test_dtensor_on_two_processes(tmp_path, on_two_processes) -> None:
    program = tmp_path / "sharded.py"
    program.write_text(SHARDED)
    on_two_processes(program, prints="sharded ok")
