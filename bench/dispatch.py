"""Host time of a call to ``torch.ops.sage.attn`` on CPU tensors: ``python -m bench.dispatch``.

The bodies of the kernel-level ops are replaced by their allocators, so that what is left is the
dispatcher, autograd and our own Python. Two figures a row: with the allocators, and without them
(their time, measured alone, taken off). Minimum over interleaved rounds; pin to one core for less
noise (``taskset -c 0``).
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable

import torch

from sage_cute.compile_integration import ops
from sage_cute.compile_integration.schema import LIB, op

TARGET_US = {"no grad": 10.0, "forward": 35.0, "forward + backward": 80.0}


def _best_us(
    functions: dict[str, Callable[[], object]], rounds: int, calls: int
) -> dict[str, float]:
    """Microseconds a call, the best of ``rounds`` rounds that visit all functions in turn."""
    best = dict.fromkeys(functions, float("inf"))
    for _ in range(rounds):
        for name, function in functions.items():
            start = time.perf_counter()
            for _ in range(calls):
                function()
            best[name] = min(best[name], (time.perf_counter() - start) / calls * 1e6)
    return best


def measure(rounds: int, calls: int) -> list[dict[str, float | str]]:
    """One row a mode: microseconds of the whole call, of its bodies, and of the difference."""
    for name, body in (
        ("attn_fwd", ops.fwd_fake),
        ("attn_infer", ops.infer_fake),
        ("attn_backward", ops.backward_fake),
    ):
        LIB.impl(name, body, "CPU", allow_override=True)
    attn = op("attn")
    q, k, v = (torch.randn(1, 2, 16, 64) for _ in range(3))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    static = (None, True, "fast")
    outputs = ops.fwd_fake(q, k, v, *static)
    dout = torch.randn_like(q)

    def forward_backward() -> None:
        attn(*leaves, is_causal=True).backward(dout)
        for leaf in leaves:
            leaf.grad = None

    times = _best_us(
        {
            "no grad": lambda: attn(q, k, v, is_causal=True),
            "forward": lambda: attn(*leaves, is_causal=True),
            "forward + backward": forward_backward,
            "infer body": lambda: ops.infer_fake(q, k, v, *static),
            "fwd body": lambda: ops.fwd_fake(q, k, v, *static),
            "backward body": lambda: ops.backward_fake(
                dout, None, None, None, v, outputs[0], *outputs[1:], *static
            ),
        },
        rounds,
        calls,
    )
    bodies = {
        "no grad": times["infer body"],
        "forward": times["fwd body"],
        "forward + backward": times["fwd body"] + times["backward body"],
    }
    return [
        {
            "mode": mode,
            "call_us": round(times[mode], 1),
            "bodies_us": round(bodies[mode], 1),
            "dispatch_us": round(times[mode] - bodies[mode], 1),
            "target_us": target,
        }
        for mode, target in TARGET_US.items()
    ]


def main() -> None:
    """Prints a Markdown table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--calls", type=int, default=50)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = measure(args.rounds, args.calls)
    if args.json:
        meta = {"torch": torch.__version__, "python": platform.python_version()}
        print(json.dumps({"meta": meta, "rows": rows}))
        return
    print("| mode | call, us | of it bodies | dispatch | target |")
    print("| --- | --- | --- | --- | --- |")
    for row in rows:
        print("| " + " | ".join(str(value) for value in row.values()) + " |")


if __name__ == "__main__":
    main()
