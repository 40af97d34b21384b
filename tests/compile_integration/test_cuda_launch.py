"""What the CUDA ops hand to their kernels, on the CPU: kernels are stood in for by numerics."""

from __future__ import annotations

import subprocess
import sys
import textwrap

PROGRAM = textwrap.dedent("""
    import math, types
    import torch
    import sage_cute.compile_integration.cuda as cuda
    from sage_cute.compile import bwd_launch, launch, quant_launch
    from sage_cute.compile_integration.schema import LIB
    from sage_cute.numerics import Saved, sage_backward, sage_forward
    from sage_cute.compile.catalog import problem_of
    from sage_cute.config.space import SPACES
    from sage_cute.policies import resolve
    from sage_cute.tune import select

    torch.manual_seed(0)
    calls = []

    def tuned(direction, call, shape, device):  # the tables' choice: not the default one
        space, problem = SPACES[direction], problem_of(direction, call)
        return space.neighbours(problem, space.default(problem))[-1]

    select.tile_config = tuned

    def quantize_kernels(spec):
        def run(q, k, v, q_codes, q_scale, k_codes, k_scale, k_mean, v_t, v_scale, partials, *seen):
            assert seen[2:] == (None,) * 5  # no key lengths, no packed batch
            calls.append((q, k, v))
            for x in (q, k, v):
                assert x.stride(-1) == 1 and x.data_ptr() % 16 == 0
            f = sage_forward(q, k, v, scale=1.0, causal=False, policy=POLICY)
            for buffer, value in ((q_codes, f.saved.q_codes), (q_scale, f.saved.q_scale),
                                  (k_codes, f.saved.k_codes), (k_scale, f.saved.k_scale)):
                buffer.copy_(value)
            if k_mean is not None:
                k_mean.copy_(f.saved.k_mean)
            v_t.fill_(7)
        return run

    def forward_kernel(plan):
        def run(q_codes, q_scale, k_codes, k_scale, v_t, v_scale, out, lse, log2, grid, *seen):
            assert seen == (None,) * 6
            q, k, v = calls[-1]
            assert (v_t == 7).all()
            causal = plan.problem.is_causal
            assert plan.config != SPACES["fwd"].default(plan.problem)
            scale = log2 / math.log2(math.e)
            f = sage_forward(q, k, v, scale=scale, causal=causal, policy=POLICY)
            assert torch.equal(q_codes, f.saved.q_codes) and torch.equal(k_scale, f.saved.k_scale)
            out.copy_(f.out)
            lse.copy_(f.lse)
        return run

    def preprocess_kernel(plan):
        def run(dout, out, lse, dlse, q_codes, q_scale, k_codes, k_scale, v, *rest):
            for x in (dout, out):
                assert x.stride(-1) == 1 and x.data_ptr() % 16 == 0
            assert (dlse is not None) == plan.has_dlse
            calls.append((dout, dlse, out, lse, q_codes, k_codes, q_scale, k_scale))
        return run

    def grads_of(plan, v, scale):
        dout, dlse, out, lse, q_codes, k_codes, q_scale, k_scale = calls[-1]
        none = q_scale.new_empty(2, 4, 0, 64)
        saved = Saved(q_codes, k_codes, q_scale, k_scale, none, none)
        return sage_backward(dout, dlse, out, V, V, out, lse, saved, scale=scale,
                             causal=plan.problem.is_causal, policy=POLICY)

    def keys_kernel(plan):
        assert plan.config != SPACES["bwd"].default(plan.problem)

        def run(*arguments):
            *_, dk, dv, scale = arguments[:-6]  # the rest says which keys are seen: all None
            grads = grads_of(plan, arguments[2], scale)
            dk.copy_(grads.dk)
            dv.copy_(grads.dv)
        return run

    def queries_kernel(plan):
        def run(*arguments):
            *_, dq, rows, scale = arguments[:-5]
            dq.copy_(grads_of(plan, arguments[2], scale).dq)
        return run

    bwd_launch.compiled_preprocess = preprocess_kernel
    bwd_launch.compiled_keys, bwd_launch.compiled_queries = keys_kernel, queries_kernel
    bwd_launch.num_sms = lambda device: 132
    LIB.impl("attn_backward", cuda.backward_cuda, "CPU", allow_override=True)
    quant_launch.compiled_quantize, launch.compiled = quantize_kernels, forward_kernel
    launch.num_sms = lambda device: 132
    torch.cuda.current_device = lambda: None       # index of a CPU tensor's device
    LIB.impl("attn_fwd", cuda.fwd_cuda, "CPU", allow_override=True)
    LIB.impl("attn_infer", cuda.infer_cuda, "CPU", allow_override=True)

    for policy in ("fast", "sagebwd", "fast:smooth_k=false"):
        POLICY = resolve(policy)
        for layout in (lambda x: x, lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
                       lambda x: torch.stack([x, x], -1)[..., 0],
                       lambda x: torch.cat([x.flatten(), x.flatten()[:1]])[1:].view(x.shape)):
            for sq, sk in ((70, 70), (1, 200), (0, 5), (5, 0)):
                q, k, v = (layout(torch.randn(2, h, s, 64, dtype=torch.bfloat16))
                           for h, s in ((4, sq), (2, sk), (2, sk)))
                for causal, scale in ((True, None), (False, 0.3)):
                    expected = sage_forward(q, k, v, scale=scale or 0.125, causal=causal,
                                            policy=POLICY)
                    outputs = torch.ops.sage.attn_fwd(q, k, v, scale, causal, policy)
                    out, lse, k_mean = torch.ops.sage.attn_infer(q, k, v, scale, causal, policy)
                    assert torch.equal(out, outputs[0]) and torch.equal(lse, outputs[1])
                    torch.testing.assert_close(out, expected.out)
                    torch.testing.assert_close(lse, expected.lse)
                    if sq and sk:
                        for a, b in zip(outputs[2:], expected.saved):
                            assert torch.equal(a, b)
                        assert torch.equal(k_mean, expected.saved.k_mean)

    for policy in ("fast", "accurate", "sagebwd", "int8"):
        POLICY = resolve(policy)
        for sq, sk in ((70, 70), (90, 40), (0, 5)):
            q, k, V = (torch.randn(2, h, s, 64, dtype=torch.bfloat16)
                       for h, s in ((4, sq), (2, sk), (2, sk)))
            f = sage_forward(q, k, V, scale=0.3, causal=True, policy=POLICY)
            dlse = torch.randn(2, 4, sq)
            for dout in (torch.randn(1).bfloat16().expand(q.shape),
                         torch.randn(2, 4, 64, sq).bfloat16().mT,
                         torch.randn(q.numel() + 1).bfloat16()[1:].view(q.shape)):
                for gradient in (None, dlse):
                    expected = sage_backward(dout, gradient, q, k, V, f.out, f.lse, f.saved,
                                             scale=0.3, causal=True, policy=POLICY)
                    actual = torch.ops.sage.attn_backward(
                        dout, gradient, None, None, V, f.out, f.lse, *f.saved, 0.3, True, policy)
                    # The kernel's float32 scale may tip a code at a tie: one element, not many.
                    for a, b in zip(actual, expected):
                        error = (a.double() - b.double()).norm()
                        assert error <= 1e-3 * b.double().norm(), error
    print("launched")
""")


def test_launches_with_kernels_stood_in_for(tmp_path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    result = subprocess.run(
        [sys.executable, "-W", "ignore", str(program)], capture_output=True, text=True
    )
    assert result.returncode == 0 and "launched" in result.stdout, result.stderr[-3000:]
