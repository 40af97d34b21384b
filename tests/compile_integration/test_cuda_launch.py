"""What the CUDA forward hands to its kernels, on the CPU: kernels are stood in for by numerics."""

from __future__ import annotations

import subprocess
import sys
import textwrap

PROGRAM = textwrap.dedent("""
    import math, types
    import torch
    import sage_cute.compile_integration.cuda as cuda
    from sage_cute.compile import launch, quant_launch
    from sage_cute.compile_integration.schema import LIB
    from sage_cute.errors import DTypeError, UnsupportedError
    from sage_cute.numerics import sage_forward
    from sage_cute.policies import resolve

    calls = []

    def quantize_kernels(spec):
        def run(q, k, v, q_codes, q_scale, k_codes, k_scale, k_mean, v_t, v_scale, partials):
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
        def run(q_codes, q_scale, k_codes, k_scale, v_t, v_scale, out, lse, scale_log2, ctas):
            q, k, v = calls[-1]
            assert (v_t == 7).all()
            causal = plan.problem.is_causal
            scale = scale_log2 / math.log2(math.e)
            f = sage_forward(q, k, v, scale=scale, causal=causal, policy=POLICY)
            assert torch.equal(q_codes, f.saved.q_codes) and torch.equal(k_scale, f.saved.k_scale)
            out.copy_(f.out)
            lse.copy_(f.lse)
        return run

    quant_launch.compiled_quantize, launch.compiled = quantize_kernels, forward_kernel
    launch._num_sms = lambda device: 132
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

    # With the kernels registered, what they do not cover is refused before there is a GPU.
    from torch._subclasses.fake_tensor import FakeTensorMode
    for error, text, dtype, head_dim, policy in (
        (DTypeError, "no CUDA kernel for float32; cast", torch.float32, 64, "fast"),
        (UnsupportedError, "head_dim", torch.bfloat16, 40, "fast"),
        (UnsupportedError, "pv=int8", torch.float16, 64, "fast:pv=16bit,dp=16bit"),
        (UnsupportedError, "smooth_q=false", torch.bfloat16, 64, "fast:smooth_q=true"),
        (UnsupportedError, "p_scale", torch.bfloat16, 64, "fast:p_scale=running"),
    ):
        with FakeTensorMode():
            x = torch.empty(1, 2, 8, head_dim, device="cuda", dtype=dtype)
            try:
                torch.ops.sage.attn(x, x, x, policy=policy)
            except error as raised:
                assert text in str(raised), raised
            else:
                raise SystemExit(f"no error for {text}")
    with FakeTensorMode():
        x = torch.empty(1, 2, 8, 64, device="cuda", dtype=torch.bfloat16)
        out, lse, *saved = torch.ops.sage.attn_fwd(x, x, x, None, True, "fast")
        assert out.device.type == "cuda"
        try:
            torch.ops.sage.attn_backward(out, None, None, None, x, out, lse, *saved, None, True,
                                         "fast")
        except UnsupportedError as raised:
            assert "no CUDA implementation of the backward" in str(raised)
        else:
            raise SystemExit("no error for the backward")
    print("launched")
""")


def test_launches_with_kernels_stood_in_for(tmp_path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    result = subprocess.run(
        [sys.executable, "-W", "ignore", str(program)], capture_output=True, text=True
    )
    assert result.returncode == 0 and "launched" in result.stdout, result.stderr[-3000:]
