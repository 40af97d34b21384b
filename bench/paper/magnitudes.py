"""RMS of P, dP and dS against sequence length, and the bound of the paper's appendix B.

    python -m bench.paper.magnitudes

For a row i of N keys, dS_i = P_i * (dP_i - delta_i) with P_i a distribution, so that

    RMS(dS_i) <= |P_i|_2 |dP_i - delta_i|_inf / sqrt(N) <= |dP_i - delta_i|_inf / sqrt(N)

and over all rows RMS(dS) <= max_i |dP_i - delta_i|_inf / sqrt(N): dS shrinks as sequences grow,
while dP does not. Both inequalities are checked on every row, in float64. The last column is what
that does to ``sagebwd`` and the other policies, whose scales follow dS: the error of dQ.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from statistics import fmean
from typing import Any

from bench.paper.common import Size, evaluate, figure, main
from sage_cute.numerics import attention_reference_backward, rel_l2
from sage_cute.numerics.reference import visible
from sage_cute.testing import Inputs, make_inputs

CLASSES = {"g1": False, "qkn": True, "llm": True}  # kind: causal
LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192)
SLACK = 1 + 1e-9  # float64 rounding of the two sides


def magnitudes(x: Inputs, causal: bool) -> dict[str, float]:
    """RMS of P, dP, dS over all pairs (hidden ones are 0), the bound, and how many rows break it.

    Heads are rows of the same matrix here: the bound holds for each and for all.
    """
    _, between = attention_reference_backward(x.dout, *x[:3], causal=causal)
    seqlen = x.k.shape[2]
    seen = visible(x.q.shape[2], seqlen, causal, x.q.device)
    centred = (between.dp - between.delta.unsqueeze(-1)).masked_fill(~seen, 0.0)
    largest = centred.abs().amax(-1)
    row_rms = between.ds.square().mean(-1).sqrt()
    tight = between.p.norm(dim=-1) * largest / math.sqrt(seqlen)
    loose = largest / math.sqrt(seqlen)
    rms = lambda t: t.square().mean().sqrt().item()
    return {
        "p_rms": rms(between.p),
        "dp_rms": rms(between.dp.masked_fill(~seen, 0.0)),
        "ds_rms": rms(between.ds),
        "bound": loose.max().item(),
        "row_bound_rms": rms(tight),
        "rows_above_the_bound": int(
            ((row_rms > tight * SLACK) | (tight > loose * SLACK)).sum().item()
        ),
    }


def measure(size: Size, args: argparse.Namespace) -> dict[str, Any]:
    """A row for each input and length up to twice the size's."""
    rows = []
    for kind, causal in CLASSES.items():
        for seqlen in (n for n in LENGTHS if n <= 2 * size.seqlen):
            found: list[dict[str, float]] = []
            errors: dict[str, list[float]] = {policy: [] for policy in args.policies}
            for seed in range(size.seeds):
                shape = (1, size.heads, seqlen, size.head_dim)
                x = make_inputs(kind, shape, device=args.device, seed=seed)
                found.append(magnitudes(x, causal))
                grads, _ = attention_reference_backward(x.dout, *x[:3], causal=causal)
                for policy in args.policies:
                    result = evaluate(x, policy, causal=causal)
                    errors[policy].append(rel_l2(result.dq, grads.dq))
            means = {name: fmean(f[name] for f in found) for name in found[0]}
            means["rows_above_the_bound"] = sum(f["rows_above_the_bound"] for f in found)
            means["dq_error"] = {policy: fmean(e) for policy, e in errors.items()}
            rows.append({"input": kind, "causal": causal, "seqlen": seqlen, **means})
    return {
        "rows": rows,
        "exponents": {
            kind: {name: exponent(rows, kind, name) for name in ("p_rms", "dp_rms", "ds_rms")}
            for kind in CLASSES
        },
        "bound_holds": all(
            row["rows_above_the_bound"] == 0 and row["ds_rms"] <= row["bound"] for row in rows
        ),
    }


def exponent(rows: list[dict[str, Any]], kind: str, name: str) -> float:
    """The slope of log(name) over log(seqlen), least squares; -1: it halves where N doubles."""
    points = [(math.log(r["seqlen"]), math.log(r[name])) for r in rows if r["input"] == kind]
    x, y = (fmean(values) for values in zip(*points, strict=True))
    spread = sum((a - x) ** 2 for a, _ in points)
    return sum((a - x) * (b - y) for a, b in points) / spread if spread else 0.0


def table(document: dict[str, Any]) -> str:
    """Markdown: a line an input and length."""
    policies = list(document["rows"][0]["dq_error"])
    lines = [
        "| input | N | RMS P | RMS dP | RMS dS | bound | dS / bound | error of dQ: "
        + ", ".join(policies)
        + " |",
        "| --- |" + " --- |" * 7,
    ]
    for row in document["rows"]:
        errors = " ".join(figure(row["dq_error"][policy]) for policy in policies)
        cells = [row["input"], str(row["seqlen"])]
        cells += [f"{row[name]:.2e}" for name in ("p_rms", "dp_rms", "ds_rms", "bound")]
        cells += [f"{row['ds_rms'] / row['bound']:.3f}", errors]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def plot(document: dict[str, Any], path: Path) -> None:
    """A panel an input: the three RMS and the bound over N."""
    from matplotlib.figure import Figure

    canvas = Figure(figsize=(12, 3.8), dpi=90, layout="constrained")
    lines = {"p_rms": "RMS(P)", "dp_rms": "RMS(dP)", "ds_rms": "RMS(dS)", "bound": "bound on dS"}
    for axes, kind in zip(canvas.subplots(1, len(CLASSES), sharey=True), CLASSES, strict=True):
        rows = [row for row in document["rows"] if row["input"] == kind]
        for name, label in lines.items():
            style = "--" if name == "bound" else "-"
            values = [row[name] for row in rows]
            axes.plot([row["seqlen"] for row in rows], values, style, marker="o", ms=3, label=label)
        axes.set(xscale="log", yscale="log", title=kind, xlabel="sequence length")
        axes.set_xscale("log", base=2)
    canvas.axes[0].legend(fontsize=8)
    canvas.savefig(path)


if __name__ == "__main__":
    main("magnitudes", __doc__, measure, table, plot)
