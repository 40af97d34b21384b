"""``sage-cute bench``: INT8 attention beside torch's own, on one shape."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from sage_cute.api import attention
from sage_cute.cli.common import (
    Device,
    Json,
    Policies,
    device_name,
    device_of,
    fail,
    numbers,
    one_line_errors,
    show_json,
    show_table,
    split,
)
from sage_cute.numerics import rel_l2
from sage_cute.testing import make_inputs
from sage_cute.tune.timing import interleaved_ms

GATE = 0.1
"""Twice what the coarsest policy differs from torch's attention on normal inputs."""
_BASELINE = "SDPA"


def bench(
    shape: Annotated[
        str,
        typer.Option(metavar="B,H,HKV,S,D", help="Batch, query and key heads, length, head_dim."),
    ] = "1,32,32,4096,128",
    policies: Policies = "default",
    causal: Annotated[bool, typer.Option(help="Causal mask.")] = True,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float16.")] = "bfloat16",
    rounds: Annotated[int, typer.Option(min=1, help="Medians are over these.")] = 7,
    device: Device = None,
    json_: Json = False,
) -> None:
    """Times forward and backward beside torch's scaled_dot_product_attention.

    Quantization is included, rounds are interleaved, the L2 cache is cold. A policy whose results
    are far from torch's gets no time. In a clone, python -m bench.run has more shapes, other
    packages and plots.

    [dim]sage-cute bench --shape 2,16,4,8192,128 --policies fast,accurate[/]
    """
    command = "bench"
    with one_line_errors(command):
        sizes = numbers(shape, command, "--shape")
        if len(sizes) != 5 or not all(sizes):
            fail(command, f"--shape {shape}: five numbers B,H,HKV,S,D above 0")
        if dtype not in ("bfloat16", "float16"):
            fail(command, f"--dtype {dtype}: bfloat16 or float16")
        where = device_of(device, command)
        names = split(policies, command, "--policies")
        rows = _measure(sizes, names, causal, getattr(torch, dtype), where, rounds)
    if json_:
        show_json({"device": device_name(where), "shape": sizes, "causal": causal, "rows": rows})
    else:
        columns = ("what", "forward ms", "backward ms", "TFLOP/s forward", "difference from SDPA")
        cells = [
            (
                row["what"],
                *(f"{row[n]:.3f}" if row[n] else "" for n in ("fwd_ms", "bwd_ms")),
                f"{row['fwd_tflops']:.1f}" if row["fwd_tflops"] else "",
                row["red"] or f"{row['difference']:.4f}",
            )
            for row in rows
        ]
        show_table(f"{device_name(where)}, {shape}, causal={causal}", columns, cells)
    raise typer.Exit(int(any(row["red"] for row in rows)))


def _measure(
    sizes: list[int],
    policies: list[str],
    causal: bool,
    dtype: torch.dtype,
    device: torch.device,
    rounds: int,
) -> list[dict[str, Any]]:
    batch, heads, kv_heads, length, head_dim = sizes
    x = make_inputs(
        "g1", (batch, heads, length, head_dim), kv_heads=kv_heads, dtype=dtype, device=device
    )
    q, k, v = (t.requires_grad_() for t in (x.q, x.k, x.v))

    def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=causal, enable_gqa=heads != kv_heads
        )

    def ours(policy: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        return lambda q, k, v: attention(q, k, v, causal=causal, policy=policy)

    functions = {_BASELINE: sdpa, **{policy: ours(policy) for policy in policies}}
    outputs = {name: function(q, k, v) for name, function in functions.items()}
    rows: list[dict[str, Any]] = []
    calls: dict[tuple[str, str], Callable[[], object]] = {}
    for name, out in outputs.items():
        difference = float(rel_l2(out, outputs[_BASELINE]))
        red = "" if difference <= GATE else f"RED: off by {difference:.3g}"
        rows.append({"what": name, "difference": difference, "red": red})
        if not red:
            calls[name, "fwd"] = _forward(functions[name], q, k, v)
            calls[name, "bwd"] = _backward(out, (q, k, v), x.dout)
    times = interleaved_ms(calls, rounds=rounds, device=device)
    flops = 4 * batch * heads * length * length * head_dim / (2 if causal else 1)
    for row in rows:
        for mode in ("fwd", "bwd"):
            samples = times.get((row["what"], mode))
            row[f"{mode}_ms"] = median(samples) if samples else None
        row["fwd_tflops"] = flops / row["fwd_ms"] * 1e-9 if row["fwd_ms"] else None
    return rows


def _forward(function: Callable[..., Tensor], *tensors: Tensor) -> Callable[[], object]:
    def call() -> object:
        with torch.no_grad():
            return function(*tensors)

    return call


def _backward(out: Tensor, inputs: tuple[Tensor, ...], dout: Tensor) -> Callable[[], object]:
    return lambda: torch.autograd.grad(out, inputs, dout, retain_graph=True)
