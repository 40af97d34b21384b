"""Bandwidth of the quantization kernels: ``python -m bench.quantization [--json FILE]``.

GB/s count the bytes that must move: K once for the mean, Q, K and V once more, codes and scales
once. ``copy`` is a device-to-device copy of as many bytes in the same run. Each shape has enough
input sets to be three times the L2 cache; launches are queued behind each other and timed by
events, interleaved, medians of several rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys

import torch

from sage_cute.compile.quant_launch import output_shapes, quant_spec, quantize
from sage_cute.policies import resolve

SHAPES = [  # batch, heads, kv heads, seqlen, head_dim
    (1, 16, 16, 16384, 128),
    (1, 32, 8, 16384, 128),
    (1, 8, 8, 32768, 128),
    (4, 8, 8, 4096, 128),
    (4, 8, 8, 1024, 128),
    (1, 24, 24, 32760, 128),
    (1, 16, 16, 16384, 64),
    (1, 16, 16, 16384, 96),
    (1, 16, 16, 16384, 256),
]
POLICIES = ["fast", "sagebwd", "fast:smooth_k=false"]


def bytes_moved(policy, q, k, v, out) -> int:
    """Bytes that have to cross the memory bus."""
    tensors = [q, k, v, *(x for name, x in out.items() if name != "mean_partials")]
    return sum(x.numel() * x.element_size() for x in tensors) + (
        k.numel() * k.element_size() if policy.smooth_k else 0
    )


def prepare(policy, shape, seed):
    """A call on fresh tensors, and the bytes that it moves."""
    batch, heads, kv_heads, seqlen, head_dim = shape
    generator = torch.Generator("cuda").manual_seed(seed)
    q, k, v = [
        torch.randn(batch, h, seqlen, head_dim, device="cuda", generator=generator).bfloat16()
        for h in (heads, kv_heads, kv_heads)
    ]
    shapes = output_shapes(quant_spec(policy, q.dtype, head_dim), q.shape, k.shape)
    out = {n: torch.empty(s, dtype=d, device="cuda") for n, (s, d) in shapes.items()}

    def call():
        quantize(q, k, v, policy=policy, **out)

    return call, bytes_moved(policy, q, k, v, out)


def graph_of(calls):
    """All calls in one CUDA graph, so that the host's part is not measured.

    Whoever replays it keeps the calls: they own the tensors.
    """
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def time_us(graph, count, repeats) -> float:
    """Microseconds of one call."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3 / (count * repeats)


def measure(shape, rounds=5):
    """Rows of one shape, every policy and the copy interleaved."""
    runs = {}
    for name in POLICIES:
        policy = resolve(name)
        one, size = prepare(policy, shape, 0)
        sets = max(3, min(24, 200_000_000 // size + 1))
        calls = [one] + [prepare(policy, shape, s)[0] for s in range(1, sets)]
        runs[name] = graph_of(calls), calls, size
    half = runs["fast"][2] // 2 // 512 * 512  # aligned: or the copy is a slow one
    buffers = [torch.empty(2, half, dtype=torch.int8, device="cuda") for _ in range(4)]
    calls = [lambda b=b: b[0].copy_(b[1]) for b in buffers]
    runs["copy"] = graph_of(calls), calls, 2 * half
    times = {name: [] for name in runs}
    for _ in range(rounds + 1):
        for name, (graph, calls, size) in runs.items():
            repeats = max(2, int(2e-3 / (len(calls) * size / 4e12)))
            times[name].append(time_us(graph, len(calls), repeats))
    rows = []
    for name, (_, _, size) in runs.items():
        us = statistics.median(times[name][1:])
        rows.append({"shape": shape, "policy": name, "us": us, "gb_s": size / us * 1e-3})
    return rows


def main() -> int:
    """Prints one line a shape and policy."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", help="also write the rows to this file")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU: nothing to measure")
        return 1
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    print(f"{'batch, heads, kv, seqlen, D':32} {'policy':20} {'us':>8} {'GB/s':>6}")
    rows = []
    for shape in SHAPES:
        rows += measure(shape)
        for row in rows[-len(POLICIES) - 1 :]:
            print(
                f"{row['shape']!s:32} {row['policy']:20} {row['us']:8.1f} {row['gb_s']:6.0f}",
                flush=True,
            )
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump({"gpu": torch.cuda.get_device_name(), "rows": rows}, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
