"""The ops under torch.compile: one graph, the same numbers, few recompiles, no stale caches."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

import sage_cute

SAGE = torch.ops.sage


def block(q, k, v, causal=True, policy="default"):
    """Attention between pointwise producers and consumers, as in a model."""
    return sage_cute.attention(q.sin(), k * 2, v.cos(), causal=causal, policy=policy).square()


def run(function, tensors):
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    out = function(*leaves)
    out.sum().backward()
    return [out.detach(), *(x.grad for x in leaves)]


def assert_close(actual, expected) -> None:
    for a, b in zip(actual, expected, strict=True):
        assert a.stride() == b.stride() and a.dtype == b.dtype
        # Fused producers may differ in the last bit, and move a code at a tie.
        torch.testing.assert_close(a, b, rtol=1e-3, atol=2e-3 * b.abs().max().item())


@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune"])
def test_inductor_fullgraph_equals_eager_in_every_mode(qkv, mode) -> None:
    tensors = qkv("bshd", seqlen_q=65, seqlen_k=65)
    compiled = torch.compile(block, fullgraph=True, mode=mode)
    assert_close(run(compiled, tensors), run(block, tensors))


@pytest.mark.parametrize("policy", ["sagebwd", "accurate:dv=16bit", "fast:smooth_q=true"])
@pytest.mark.parametrize("layout", ["packed", "last_stride_2"])
def test_aot_equals_eager_over_layouts_and_policies(qkv, layout, policy) -> None:
    tensors = qkv(layout, dtype=torch.bfloat16)
    function = lambda q, k, v: sage_cute.attention(q, k, v, causal=True, policy=policy)
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    for a, b in zip(run(compiled, tensors), run(function, tensors), strict=True):
        assert torch.equal(a, b)


def test_graphs_hold_the_kernel_level_ops_once(qkv, graphs_of) -> None:
    assert graphs_of(block, *qkv(requires_grad=True)) == [
        ["sage.attn_fwd.default"],
        ["sage.attn_backward.default"],
    ]
    assert graphs_of(block, *qkv()) == [["sage.attn_infer.default"]]


def test_no_grad_region_inside_a_training_graph(qkv, graphs_of) -> None:
    def function(q, k, v):
        with torch.no_grad():
            hint = SAGE.attn(q, k, v)
        return SAGE.attn(q + hint, k, v)

    assert graphs_of(function, *qkv(requires_grad=True))[0] == [
        "sage.attn_infer.default",
        "sage.attn_fwd.default",
    ]


def test_lse_under_compile(qkv) -> None:
    def function(q, k, v):
        out, lse = sage_cute.attention(q, k, v, causal=True, return_lse=True)
        return out * torch.sigmoid(lse).unsqueeze(-1)

    tensors = qkv(seqlen_q=70, seqlen_k=90)
    compiled = torch.compile(function, fullgraph=True)
    assert_close(run(compiled, tensors), run(function, tensors))


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_inference(qkv, guard) -> None:
    tensors = qkv(dtype=torch.bfloat16)
    with guard():
        compiled = torch.compile(lambda *x: SAGE.attn(*x), backend="aot_eager", fullgraph=True)
        assert torch.equal(compiled(*tensors), SAGE.attn(*tensors))


@pytest.mark.parametrize(
    ("policy", "graphs"), [("fast:k_scale=per_token", 2), ("fast", 3), ("sagebwd", 4)]
)
def test_dynamic_lengths_need_few_graphs(qkv, policy, graphs) -> None:
    """Static and dynamic; scales per block add one where one block of queries, or of keys, does."""
    counter = CompileCounterWithBackend("aot_eager")
    function = lambda q, k, v: sage_cute.attention(q, k, v, causal=True, policy=policy)
    compiled = torch.compile(function, backend=counter, fullgraph=True)
    for seqlen in (100, 128, 200, 333, 64, 1000, 130, 257):
        tensors = qkv(seqlen_q=seqlen, seqlen_k=seqlen, batch=1)
        for a, b in zip(run(compiled, tensors), run(function, tensors), strict=True):
            assert torch.equal(a, b)
    assert counter.frame_count <= graphs


def test_dynamic_batch_and_heads_and_other_lengths_of_k(qkv) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(SAGE.attn, backend=counter, fullgraph=True, dynamic=True)
    for batch, heads, sq, sk in ((2, 4, 33, 65), (3, 6, 70, 20), (5, 8, 129, 64)):
        tensors = qkv(batch=batch, heads=heads, seqlen_q=sq, seqlen_k=sk)
        assert torch.equal(compiled(*tensors), SAGE.attn(*tensors))
    assert counter.frame_count <= 2


def test_default_scale_and_equal_scales_do_not_recompile(qkv) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(
        lambda q, k, v, scale: sage_cute.attention(q, k, v, scale=scale), backend=counter
    )
    tensors = qkv()
    for scale in (0.25, 0.25, 0.25):
        compiled(*tensors, scale)
    assert counter.frame_count == 1


def test_autocast_under_compile(qkv) -> None:
    tensors = qkv()

    def function(q, k, v):
        with torch.autocast("cpu", torch.bfloat16):
            return SAGE.attn(q, k, v, is_causal=True)

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    results = [run(f, tensors) for f in (compiled, function)]
    assert results[0][0].dtype == torch.bfloat16 and results[0][1].dtype == torch.float32
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_export_keeps_the_op_and_decomposes_to_infer(qkv) -> None:
    class Model(torch.nn.Module):
        def forward(self, q, k, v):
            return sage_cute.attention(q, k, v, causal=True)

    seqlen = torch.export.Dim("seqlen", min=2, max=4096)
    tensors = qkv()
    program = torch.export.export(Model(), tensors, dynamic_shapes=[{2: seqlen}] * 3, strict=False)
    targets = lambda p: [str(n.target) for n in p.graph.nodes if n.op == "call_function"]
    assert targets(program) == ["sage.attn.default"]
    assert "sage.attn_infer.default" in targets(program.run_decompositions())
    other = qkv(seqlen_q=131, seqlen_k=131)
    assert torch.equal(program.module()(*other), Model()(*other))


def test_cache_key_carries_version_and_abi(monkeypatch) -> None:
    from sage_cute.compile_integration import cache_key

    tag = torch.compiler.config.cache_key_tag
    assert f"sage_cute-{sage_cute.__version__}-{cache_key.abi()}" in tag
    cache_key.extend_cache_key()
    assert torch.compiler.config.cache_key_tag == tag  # once is enough
    sources = cache_key.abi_sources()
    assert {"schema.py", "ops.py", "autograd.py", "policy.py", "forward.py"} <= {
        p.name for p in sources
    }


PROGRAM = textwrap.dedent("""
    import sys
    import torch
    import sage_cute
    from sage_cute.compile_integration import schema
    from torch._dynamo.utils import counters

    if sys.argv[1] != "same":  # an update of the package that only changes a body of Python
        schema.LIB.impl("attn", lambda q, k, v, **_: q * float(sys.argv[1]),
                        "CompositeImplicitAutograd", allow_override=True)
        if sys.argv[2] == "tagged":
            torch.compiler.config.cache_key_tag += "|new abi"
    q = torch.ones(1, 1, 4, 8)
    compiled = torch.compile(lambda q: torch.ops.sage.attn(q, q, q) + 1, fullgraph=True)
    print(float(compiled(q)[0, 0, 0, 0]), counters["aot_autograd"]["autograd_cache_hit"])
""")


def test_stale_cache_trap_is_real_and_the_tag_springs_it(tmp_path) -> None:
    import os

    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}

    def result(*args: str) -> list[str]:
        command = [sys.executable, "-W", "ignore", str(program), *args]
        return subprocess.run(
            command, env=env, capture_output=True, text=True, check=True
        ).stdout.split()

    assert result("same", "") == ["2.0", "0"]
    assert result("5", "untagged") == ["2.0", "1"]  # wrong, from the cache: what the tag is for
    assert result("5", "tagged") == ["6.0", "0"]


def test_repeated_calls_compile_once(qkv) -> None:
    counters.clear()
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    for _ in range(3):
        compiled(*qkv(requires_grad=True)).sum().backward()
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
