"""How far each policy is from float64 attention, over inputs like those of trained models.

    python -m bench.accuracy                 prints a table, writes bench/results/accuracy-cpu.json
    python -m bench.accuracy --readme        also puts the table into README.md

Relative L2 errors of O, dV, dQ and dK, means over seeds. ``16-bit`` is torch's own attention in
bfloat16. On a CPU these are the errors of the numerics that the kernels must reproduce.
"""

from __future__ import annotations

import argparse
from statistics import mean
from typing import Any

import torch

from bench import result_files
from sage_cute.testing import (
    INPUT_CLASSES,
    TENSORS,
    Inputs,
    Result,
    make_inputs,
    relative_errors,
    run_attention,
    run_reference,
)

CLASSES = (*(f"g{sigma}" for sigma in (1, 3, 5)), *list(INPUT_CLASSES)[1:])
CAUSAL = {"qkn", "qlr", "sink", "sinkv1", "diag", "llm"}  # as a decoder would see them
BASELINE = "16-bit"


def run_sdpa(x: Inputs, causal: bool) -> Result:
    """Torch's attention in the inputs' dtype."""
    q, k, v = (t.detach().requires_grad_() for t in (x.q, x.k, x.v))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
    grads = torch.autograd.grad(out, (q, k, v), x.dout)
    return Result(out.detach(), out.new_empty(0), *grads)


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each input class and policy."""
    policies = [BASELINE, *args.policies]
    rows = []
    for kind in CLASSES:
        causal = kind in CAUSAL
        errors: dict[str, list[dict[str, float]]] = {policy: [] for policy in policies}
        for seed in range(args.seeds):
            shape = (1, args.heads, args.seqlen, args.head_dim)
            x = make_inputs(kind, shape, seed=seed, device=args.device)
            truth = run_reference(x, causal=causal)
            for policy in policies:
                result = (
                    run_sdpa(x, causal)
                    if policy == BASELINE
                    else run_attention(x, policy=policy, causal=causal)
                )
                errors[policy].append(relative_errors(result, truth))
        rows += [
            {
                "input": kind,
                "causal": causal,
                "policy": policy,
                **{name: mean(e[name] for e in errors[policy]) for name in TENSORS},
            }
            for policy in policies
        ]
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: a line an input class, a column a policy, each with the four errors in 1e-4."""
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    lines = [
        "| input | " + " | ".join(policies) + " |",
        "| --- |" + " --- |" * len(policies),
    ]
    for kind in dict.fromkeys(row["input"] for row in rows):
        of_kind = {row["policy"]: row for row in rows if row["input"] == kind}
        cells = (
            " ".join(f"{of_kind[policy][name]:.4f}".removeprefix("0") for name in TENSORS)
            for policy in policies
        )
        what = INPUT_CLASSES.get(kind, f"normal, standard deviation of Q and K {kind[1:]}")
        causal = " (causal)" if kind in CAUSAL else ""
        lines.append(f"| {what.split(';')[0].rstrip('.')}{causal} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def describe(meta: dict[str, Any]) -> str:
    """Where the figures come from, in one line."""
    return (
        f"Relative L2 error against float64 of O, dV, dQ, dK; bfloat16 inputs {meta['shape']}, "
        f"{meta['seeds']} seeds. {result_files.source(meta)}"
    )


def main() -> None:
    """Measures, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seqlen", type=int, default=1024)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--policies", nargs="+", default=["sagebwd", "fast", "accurate", "int8"])
    parser.add_argument("--readme", action="store_true", help="put the table into README.md")
    args = parser.parse_args()
    rows = measure(args)
    meta = result_files.meta("bench.accuracy", args.device, args.policies)
    meta |= {"shape": [1, args.heads, args.seqlen, args.head_dim], "seeds": args.seeds}
    result_files.save("accuracy", {"meta": meta, "rows": rows}, args.device)
    text = f"{table(rows)}\n\n{describe(meta)}"
    print(text)
    if args.readme:
        from bench import readme  # which imports this module

        readme.update()


if __name__ == "__main__":
    main()
