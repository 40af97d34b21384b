"""P, dP, dS and delta against float64, and which quantization dominates (paper, section 5).

    python -m bench.paper.intermediates

First, the errors of P, dP, dS and delta as the backward makes them, before it quantizes them again,
of every policy. Then each policy with one quantization at a time, the other products in 16 bits
("only"), and with everything but that one ("without"): the first says what a quantization costs by
itself, the second what removing it would gain.

The paper finds the largest deviation in dS, and passes it on to dQ and dK.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from bench.paper.common import NAMES, SIXTEEN_BIT, Size, figure, main, spec_of
from sage_cute.numerics import (
    attention_reference_backward,
    cosine,
    rel_l2,
    sage_backward,
    sage_forward,
)
from sage_cute.policies import PRODUCTS, canonical, resolve
from sage_cute.testing import (
    TENSORS,
    Inputs,
    make_inputs,
    relative_errors,
    run_attention,
    run_reference,
)

CLASSES = {"g1": False, "g3": False, "qkn": True, "sink": True, "llm": True}  # kind: causal
INTERMEDIATES = {"p": "P", "dp": "dP", "ds": "dS", "delta": "delta"}

QUANTIZATIONS = {
    "Q, K in S": ("qk", "s"),
    "P, V in O": ("pv",),
    "P, dO in dV": ("dv",),
    "dO, V in dP": ("dp",),
    "dS, K in dQ": ("dq",),
    "dS, Q in dK": ("dk",),
}
"""The quantizations of a policy by the products that they serve; S of the backward is the forward's
again, so that both take the same codes."""


class Observed:
    """P, dP, dS and delta of one backward, whole, on pairs that the mask shows."""

    def __init__(self, x: Inputs, causal: bool, policy: str) -> None:
        mix, scale = resolve(policy), x.q.shape[-1] ** -0.5
        group = x.q.shape[1] // x.k.shape[1]
        shape = (x.q.shape[0], x.k.shape[1], group, x.q.shape[2], x.k.shape[2])
        self.values = {name: torch.zeros(shape) for name in ("p", "dp", "ds")}
        out, lse, saved = sage_forward(*x[:3], scale=scale, causal=causal, policy=mix)
        sage_backward(
            x.dout,
            None,
            *x[:3],
            out,
            lse,
            saved,
            scale=scale,
            causal=causal,
            policy=mix,
            observe=self._see,
        )
        p, dp, ds = self.values.values()
        # dS = P (dP - delta): where P is largest, the delta that the backward used follows best.
        best = p.argmax(-1, keepdim=True)
        largest, of_dp, of_ds = (t.double().gather(-1, best).squeeze(-1) for t in (p, dp, ds))
        self.values["delta"] = of_dp - of_ds / largest

    def _see(self, name: str, first: int, keys: slice, block: Tensor) -> None:
        self.values[name][..., first:, keys] = block


def of_intermediates(x: Inputs, causal: bool, policy: str) -> dict[str, dict[str, float]]:
    """Relative L2 and cosine of P, dP, dS and delta; x on the CPU, where the reference runs."""
    truth = attention_reference_backward(x.dout, *x[:3], causal=causal)[1]
    seen = truth.p > 0
    found = {}
    for name, value in Observed(x, causal, policy).values.items():
        exact, value = getattr(truth, name), value.flatten(1, 2)
        if name == "dp":  # of hidden pairs too, which nothing reads
            exact, value = exact * seen, value * seen
        found[name] = {"rel_l2": rel_l2(value, exact), "cosine": cosine(value, exact)}
    return found


def only(policy: str, products: tuple[str, ...]) -> str:
    """The policy with nothing in INT8 but some products, as far as they were."""
    others = [p for p in PRODUCTS if p not in products]
    return _in_16_bits(policy, others)


def without(policy: str, products: tuple[str, ...]) -> str:
    """The policy with some products in 16 bits."""
    return _in_16_bits(policy, products)


def _in_16_bits(policy: str, products: tuple[str, ...] | list[str]) -> str:
    changes = ",".join(f"{product}=16bit" for product in products)
    return canonical(f"{policy}{',' if ':' in policy else ':'}{changes}")


def measure(size: Size, args: argparse.Namespace) -> dict[str, Any]:
    """Rows of intermediates and rows of quantizations, means over seeds."""
    intermediates, quantizations = [], []
    for kind, causal in CLASSES.items():
        inputs = [make_inputs(kind, size.shape, seed=seed) for seed in range(size.seeds)]
        for policy in (SIXTEEN_BIT, *args.policies):
            found = [of_intermediates(x, causal, spec_of(policy)) for x in inputs]
            intermediates.append(
                {
                    "input": kind,
                    "policy": policy,
                    **{
                        name: {m: fmean(f[name][m] for f in found) for m in ("rel_l2", "cosine")}
                        for name in INTERMEDIATES
                    },
                }
            )
        truths = [run_reference(x, causal=causal) for x in inputs]
        for policy in args.policies:
            used = {n: p for n, p in QUANTIZATIONS.items() if _quantizes(policy, p)}
            mixes = {("all", "everything"): policy}
            for name, products in used.items():
                mixes["only", name] = only(policy, products)
                mixes["without", name] = without(policy, products)
            for (what, name), mix in mixes.items():
                errors = [
                    relative_errors(run_attention(x, policy=mix, causal=causal), truth)
                    for x, truth in zip(inputs, truths, strict=True)
                ]
                quantizations.append(
                    {
                        "input": kind,
                        "policy": policy,
                        "what": what,
                        "quantization": name,
                        **{t: fmean(e[t] for e in errors) for t in TENSORS},
                    }
                )
    return {
        "intermediates": intermediates,
        "quantizations": quantizations,
        "dominant": dominant(quantizations),
    }


def _quantizes(policy: str, products: tuple[str, ...]) -> bool:
    return any(getattr(resolve(policy), product) == "int8" for product in products)


def dominant(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each input, policy and tensor: the quantization that alone brings the largest error."""
    found = []
    for row in rows:
        if row["what"] != "all":
            continue
        same = [
            r
            for r in rows
            if r["what"] == "only" and (r["input"], r["policy"]) == (row["input"], row["policy"])
        ]
        for tensor in TENSORS:
            if not same:
                continue
            worst = max(same, key=lambda r: r[tensor])
            found.append(
                {
                    "input": row["input"],
                    "policy": row["policy"],
                    "tensor": tensor,
                    "quantization": worst["quantization"],
                    "error": worst[tensor],
                    "of": row[tensor],
                }
            )
    return found


def table(document: dict[str, Any]) -> str:
    """Markdown: intermediates, then the quantizations that dominate dQ and dK."""
    lines = [
        "| input | policy | " + " | ".join(INTERMEDIATES.values()) + " | cosine of dS |",
        "| --- | --- |" + " --- |" * (len(INTERMEDIATES) + 1),
    ]
    for row in document["intermediates"]:
        cells = [figure(row[name]["rel_l2"]) for name in INTERMEDIATES]
        cells.append(f"{row['ds']['cosine']:.4f}")
        lines.append(f"| {row['input']} | {row['policy']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def dominant_table(document: dict[str, Any]) -> str:
    """Markdown: a line an input and policy, for every tensor the quantization that dominates."""
    lines = [
        "| input | policy | " + " | ".join(NAMES[t] for t in TENSORS) + " |",
        "| --- | --- |" + " --- |" * len(TENSORS),
    ]
    rows = document["dominant"]
    for kind, policy in dict.fromkeys((r["input"], r["policy"]) for r in rows):
        of = {r["tensor"]: r for r in rows if (r["input"], r["policy"]) == (kind, policy)}
        cells = (
            f"{of[t]['quantization']}: {figure(of[t]['error'])} of {figure(of[t]['of'])}"
            for t in TENSORS
        )
        lines.append(f"| {kind} | {policy} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def plot(document: dict[str, Any], path: Path) -> None:
    """A panel an input: bars of P, dP, dS and delta; below, dQ's error by quantization."""
    from matplotlib.figure import Figure

    policies = list(dict.fromkeys(row["policy"] for row in document["intermediates"]))
    canvas = Figure(figsize=(15, 6.5), dpi=90, layout="constrained")
    grid = canvas.subplots(2, len(CLASSES), sharey="row")
    for column, kind in enumerate(CLASSES):
        axes, width = grid[0, column], 0.8 / len(policies)
        for index, policy in enumerate(policies):
            (row,) = (
                r for r in document["intermediates"] if (r["input"], r["policy"]) == (kind, policy)
            )
            places = [i + index * width for i in range(len(INTERMEDIATES))]
            heights = [row[name]["rel_l2"] for name in INTERMEDIATES]
            axes.bar(places, heights, width, label=policy, color=f"C{index}")
        axes.set_xticks([i + 0.4 for i in range(len(INTERMEDIATES))], INTERMEDIATES.values())
        axes.set_yscale("log")
        axes.set_title(kind)
        axes, names = grid[1, column], ["everything", *QUANTIZATIONS]
        for index, policy in enumerate(policies):
            of = {
                r["quantization"]: r["dq"]
                for r in document["quantizations"]
                if (r["input"], r["policy"]) == (kind, policy) and r["what"] != "without"
            }
            places = [i + index * width for i, name in enumerate(names) if name in of]
            axes.bar(places, [of[n] for n in names if n in of], width, color=f"C{index}")
        axes.set_xticks(
            [i + 0.4 for i in range(len(names))], names, rotation=60, ha="right", fontsize=7
        )
        axes.set_yscale("log")
    grid[0, 0].set_ylabel("relative L2, before quantization")
    grid[1, 0].set_ylabel("relative L2 of dQ, only this in INT8")
    grid[0, 0].legend(fontsize=7)
    canvas.savefig(path)


if __name__ == "__main__":
    main(
        "intermediates",
        __doc__,
        measure,
        lambda document: f"{table(document)}\n\n{dominant_table(document)}",
        plot,
        cpu_only=True,
    )
