"""Kinds 18 to 25: torch.compile, fake tensors, CUDA graphs, streams, checkpointing."""

from __future__ import annotations

import logging
from functools import partial

import numpy as np
import pytest
import torch
from torch._dynamo.source import ConstantSource
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import sage_cute
from sage_cute.policies import PRESETS
from sage_cute.testing import make_inputs

SAGE = torch.ops.sage
BF16 = torch.bfloat16


def grads_of(function, tensors):
    leaves = [t.detach().requires_grad_() for t in tensors]
    out = function(*leaves)
    outputs = [t for t in (out if isinstance(out, tuple) else (out,)) if t.requires_grad]
    grads = torch.autograd.grad(sum(t.float().square().sum() for t in outputs), leaves)
    return [*outputs, *grads]


MODULE = sage_cute.nn.SageAttention(32, qk_norm=True, causal=True, policy="accurate")
ENTRIES = {
    "attention": lambda q, k, v: sage_cute.attention(q, k, v, causal=True),
    "bshd with LSE": lambda q, k, v: sage_cute.attention(
        *(t.transpose(1, 2) for t in (q, k, v)), layout="bshd", return_lse=True
    ),
    "scale": lambda q, k, v: sage_cute.attention(q, k, v, scale=0.3, policy="int8"),
    "window": lambda q, k, v: sage_cute.attention(q, k, v, causal=True, window=(9, 0)),
    "key lengths": lambda q, k, v: sage_cute.attention(
        q, k, v, key_lengths=torch.full((q.shape[0],), 11, dtype=torch.int32, device=q.device)
    ),
    "packed": lambda q, k, v: sage_cute.attention_varlen(
        *(t.transpose(1, 2).flatten(0, 1) for t in (q, k, v)),
        *(torch.tensor([0, 1, 1, n], dtype=torch.int32, device=q.device) for n in (2, 9)),
        causal=True,
        return_lse=True,
    ),
    "op": lambda q, k, v: SAGE.attn(q, k, v, policy="sagebwd"),
    "op with LSE": lambda q, k, v: SAGE.attn_with_lse(q, k, v, is_causal=True),
    "kernel-level op": lambda q, k, v: SAGE.attn_fwd(q, k, v, None, True, "fast")[:2],
    "module": lambda q, k, v: MODULE(q, k, v),
    "merged halves": lambda q, k, v: sage_cute.merge_attention(
        *sage_cute.attention(q, k[:, :, :9], v[:, :, :9], return_lse=True),
        *sage_cute.attention(q, k[:, :, 9:], v[:, :, 9:], return_lse=True),
    ),
}


@pytest.mark.parametrize("entry", ENTRIES)
def test_18_every_public_entry_compiles_whole(device, entry) -> None:
    x = make_inputs("g1", (2, 4, 33, 32), kv_heads=2, seqlen_k=20, dtype=BF16).to(device)
    turned = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in x[:3]]
    MODULE.to(device)
    compiled = torch.compile(ENTRIES[entry], backend="aot_eager", fullgraph=True)
    for tensors in (x[:3], turned):
        for a, b in zip(
            grads_of(compiled, tensors), grads_of(ENTRIES[entry], tensors), strict=True
        ):
            assert a.stride() == b.stride() and a.dtype == b.dtype
            torch.testing.assert_close(a, b, rtol=2e-2, atol=1e-3)


def described(tensors):
    return [(tuple(t.shape), t.stride(), t.dtype, t.device.type) for t in tensors]


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("seqlen_q", [1, 7, 65, 129])
def test_19_fake_and_real_outputs_and_gradients_agree(entry, seqlen_q) -> None:
    x = make_inputs("g1", (2, 4, seqlen_q, 32), kv_heads=2, seqlen_k=21, dtype=BF16)
    forms = (
        lambda t: t,
        lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
        lambda t: t.mT.contiguous().mT,
        lambda t: t[:1, :1].expand(t.shape),
    )
    for form in forms:
        tensors = [form(t) for t in x[:3]]
        with FakeTensorMode() as mode:
            MODULE.to("cpu")
            fakes = [mode.from_tensor(t) for t in tensors]
            if entry == "module":  # its gains are real
                continue
            expected = described(grads_of(ENTRIES[entry], fakes))
        assert described(grads_of(ENTRIES[entry], tensors)) == expected


@pytest.mark.parametrize("policy", PRESETS)
def test_20_lengths_of_every_kind_need_few_graphs(device, policy) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    function = partial(sage_cute.attention, causal=True, policy=policy)
    compiled = torch.compile(function, backend=counter, fullgraph=True)
    for seqlen_q, seqlen_k in ((40, 40), (129, 129), (257, 257), (63, 130), (200, 65), (3, 500)):
        x = make_inputs("g1", (1, 2, seqlen_q, 32), seqlen_k=seqlen_k, dtype=BF16).to(device)
        for a, b in zip(grads_of(compiled, x[:3]), grads_of(function, x[:3]), strict=True):
            assert torch.equal(a, b)
    # Static, dynamic and equal, dynamic and unequal; and scales per block of a single block.
    assert counter.frame_count <= 6


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
@pytest.mark.parametrize("policy", PRESETS)
def test_20_no_size_is_made_static_by_our_checks(policy, device_type) -> None:
    """Symbolic in every dimension but the last, for a GPU too: the fake rules decide by guards."""
    context = StatelessSymbolicContext([DimDynamic.DYNAMIC] * 3 + [DimDynamic.STATIC])
    mode, source = FakeTensorMode(shape_env=ShapeEnv()), ConstantSource("q")
    real = torch.empty(3, 5, 100, 64, dtype=BF16)
    sizes = mode.from_tensor(real, symbolic_context=context, source=source).shape
    with mode:
        q = torch.empty(sizes, dtype=BF16, device=device_type)
        out, lse = SAGE.attn_with_lse(q, q, q, is_causal=True, policy=policy)
    assert all(isinstance(n, torch.SymInt) for n in (*out.shape[:3], *lse.shape))


@pytest.mark.gpu
@pytest.mark.parametrize("policy", PRESETS)
def test_21_graphs_replay_forward_and_backward_with_new_values(policy) -> None:
    x = make_inputs("g1", (2, 4, 300, 64), kv_heads=2, dtype=BF16).to("cuda")
    leaves = [t.requires_grad_() for t in x[:3]]

    def step():
        out, lse = SAGE.attn_with_lse(*leaves, is_causal=True, policy=policy)
        return [out, lse, *torch.autograd.grad(out, leaves, x.dout)]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for seed in (1, 2):
        fresh = make_inputs("kb", (2, 4, 300, 64), kv_heads=2, dtype=BF16, seed=seed)
        with torch.no_grad():
            for old, new in zip(x, fresh, strict=True):
                old.copy_(new)
        graph.replay()
        for a, b in zip(captured, step(), strict=True):
            assert torch.equal(a, b)


@pytest.mark.gpu
def test_21_kernels_run_on_the_current_stream_in_both_directions() -> None:
    """Inputs and dO come late on a side stream; nothing synchronizes in between."""
    x = make_inputs("g1", (1, 4, 500, 64), dtype=BF16).to("cuda")
    late = [torch.full_like(t, torch.nan).requires_grad_(i < 3) for i, t in enumerate(x)]
    leaves = [t.requires_grad_() for t in x[:3]]
    out = SAGE.attn(*leaves)
    want = [out, *torch.autograd.grad(out, leaves, x.dout)]
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        with torch.no_grad():
            for a, b in zip(late[:3], x[:3], strict=True):
                a.copy_(b)
        torch.cuda.set_sync_debug_mode("error")
        try:
            out = SAGE.attn(*late[:3])
            late[3].copy_(x.dout)
            got = [out, *torch.autograd.grad(out, late[:3], late[3])]
        finally:
            torch.cuda.set_sync_debug_mode("default")
    side.synchronize()
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


@pytest.mark.gpu
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_22_a_first_call_inside_a_capture_works_or_says_so(direction) -> None:
    """No kernel of this mix exists yet. The capture must be usable, or have failed clearly."""
    policy = {"forward": "fast:p_max=127,block_k=32", "backward": "fast:block_k=32"}[direction]
    x = make_inputs("g1", (1, 2, 100, 96), dtype=BF16).to("cuda")
    leaves = [t.requires_grad_() for t in x[:3]]

    def step():
        out = SAGE.attn(*leaves, policy=policy)
        return [out, *torch.autograd.grad(out, leaves, x.dout)]

    if direction == "backward":
        with torch.no_grad():
            SAGE.attn(*leaves, policy=policy)  # the forward's kernels are there
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            captured = step()
    except RuntimeError as error:
        assert "captur" in str(error)
        captured = None
    want = step()  # the context has survived
    assert all(t.isfinite().all() for t in want)
    if captured is not None:
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(captured, want, strict=True))


@pytest.mark.gpu
def test_23_one_compilation_for_all_lengths_calls_and_kinds_of_scale(caplog) -> None:
    caplog.set_level(logging.INFO, "sage_cute")
    policy = "fast:p_max=127"  # used nowhere else: nothing of it is in memory

    def compilations() -> int:
        return sum("compiled in" in r.message or "loaded" in r.message for r in caplog.records)

    def call(seqlen: int, scale: object, batch: int = 1) -> None:
        x = make_inputs("g1", (batch, 4, seqlen, 64), kv_heads=2, dtype=BF16).to("cuda")
        leaves = [t.requires_grad_() for t in x[:3]]
        sage_cute.attention(*leaves, scale=scale, policy=policy).backward(x.dout)

    call(100, None)
    first = compilations()
    for seqlen in (1, 64, 129, 1000):
        for scale in (None, 0.1, 1, np.float32(0.2), np.float64(0.3), torch.tensor(0.4)):
            call(seqlen, scale, batch=1 + seqlen % 3)
    assert compilations() == first


def test_24_checkpointing_of_every_kind_gives_the_same_gradients_bitwise(device) -> None:
    x = make_inputs("g1", (1, 2, 33, 32), kv_heads=1, seqlen_k=40, dtype=BF16).to(device)
    function = lambda q, k, v: sage_cute.attention(q.sin(), k, v * 2, causal=True).cos()
    want = grads_of(function, x[:3])

    def by_name(ctx, op, *args, **kwargs):
        save = str(op) == "sage.attn_fwd.default"
        return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.MUST_RECOMPUTE

    for kwargs in (
        {"use_reentrant": False},
        {
            "use_reentrant": False,
            "context_fn": partial(create_selective_checkpoint_contexts, by_name),
        },
    ):
        run = lambda *t, kw=kwargs: checkpoint(function, *t, **kw)
        for a, b in zip(grads_of(run, x[:3]), want, strict=True):
            assert torch.equal(a, b)
    leaves = [t.detach().requires_grad_() for t in x[:3]]
    out = checkpoint(function, *leaves, use_reentrant=True)
    out.float().square().sum().backward()
    for leaf, grad in zip(leaves, want[1:], strict=True):
        assert torch.equal(leaf.grad, grad)


@pytest.fixture
def mesh():
    """One rank: placements and shapes are found as for many, without other processes."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_25_dtensors_of_one_policy_after_another(mesh) -> None:
    """What DTensor keeps of one call must not be taken for another's (saved tensors differ)."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    x = make_inputs("g1", (2, 4, 130, 16), kv_heads=2, dtype=BF16)
    for policy in (*PRESETS, "fast:smooth_k=false", "fast:qk=16bit,s=16bit", "fast"):
        function = partial(sage_cute.attention, policy=policy, return_lse=True)
        want = grads_of(function, x[:3])
        for placement in (Shard(0), Shard(1), Replicate()):
            parts = [distribute_tensor(t, mesh, [placement]) for t in x[:3]]
            for a, b in zip(grads_of(function, parts), want, strict=True):
                torch.testing.assert_close(a.full_tensor(), b)


def test_25_a_mix_with_plain_tensors_says_what_to_do(mesh) -> None:
    from torch.distributed.tensor import Shard, distribute_tensor

    q = torch.randn(2, 4, 9, 16)
    sharded = distribute_tensor(q, mesh, [Shard(0)])
    with pytest.raises(RuntimeError, match="need to convert all torch.Tensor to DTensor"):
        sage_cute.attention(sharded, q, q)
