"""Smoothing of K and of Q, with channel offsets (paper, section 6).

    python -m bench.paper.smoothing

Normal Q and K; then every channel of K, or of Q, is moved by a constant of -c or c, for c up to 20
times the spread (5 for Q). None, K, and Q and K smoothed. The paper: K smoothing is necessary, Q
smoothing brings no consistent benefit. The attention of an offset K is that of K; an offset of Q
changes it, by what it adds to the scores of a key, so that its errors are not those of c = 0.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from bench.paper.common import NAMES, Size, evaluate, figure, main
from sage_cute.testing import (
    TENSORS,
    Inputs,
    make_inputs,
    relative_errors,
    run_reference,
)

K_OFFSETS = (0, 1, 2, 5, 10, 20)
Q_OFFSETS = (1, 2, 5)  # beyond, every query looks at the one key that the offset favours
SMOOTHING = {
    "none": "smooth_k=false",
    "K": "smooth_k=true",
    "Q and K": "smooth_k=true,smooth_q=true",
}


def shifted(x: Inputs, which: str, offset: float, seed: int) -> Inputs:
    """X with a constant of -offset or offset added to every channel of "q" or "k"."""
    generator = torch.Generator().manual_seed(seed)
    of = getattr(x, which)
    signs = torch.randn(1, of.shape[1], 1, of.shape[3], generator=generator).sign()
    return x._replace(**{which: (of.float() + offset * signs.to(of.device)).to(of.dtype)})


def measure(size: Size, args: argparse.Namespace) -> dict[str, Any]:
    """A row for each shifted tensor, offset, policy and smoothing; means over seeds."""
    rows = []
    for which, offset in [("k", c) for c in K_OFFSETS] + [("q", c) for c in Q_OFFSETS]:
        inputs = [
            shifted(make_inputs("g1", size.shape, device=args.device, seed=s), which, offset, s)
            for s in range(size.seeds)
        ]
        truths = [run_reference(x) for x in inputs]
        for policy in args.policies:
            for smoothing, changes in SMOOTHING.items():
                mix = f"{policy}{',' if ':' in policy else ':'}{changes}"
                errors = [
                    relative_errors(evaluate(x, mix), truth)
                    for x, truth in zip(inputs, truths, strict=True)
                ]
                means = {t: fmean(e[t] for e in errors) for t in TENSORS}
                what = {"offset_of": which, "offset": offset, "policy": policy}
                rows.append({**what, "smoothing": smoothing, **means})
    return {"rows": rows}


def table(document: dict[str, Any]) -> str:
    """Markdown: a line a shift and policy; O, dV, dQ, dK by smoothing."""
    lines = [
        "| offset | policy | " + " | ".join(SMOOTHING) + " |",
        "| --- | --- |" + " --- |" * len(SMOOTHING),
    ]
    rows = document["rows"]
    for key in dict.fromkeys((r["offset_of"], r["offset"], r["policy"]) for r in rows):
        of = {r["smoothing"]: r for r in rows if (r["offset_of"], r["offset"], r["policy"]) == key}
        cells = (" ".join(figure(of[s][t]) for t in TENSORS) for s in SMOOTHING)
        lines.append(f"| {key[0].upper()} {key[1]} | {key[2]} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def plot(document: dict[str, Any], path: Path) -> None:
    """A row a shifted tensor, a column an output: the error over the offset."""
    from matplotlib.figure import Figure

    rows = document["rows"]
    canvas = Figure(figsize=(13, 5.5), dpi=90, layout="constrained")
    grid = canvas.subplots(2, len(TENSORS), sharex=True, sharey=True)
    styles = dict(zip(SMOOTHING, (":", "-", "--"), strict=True))
    for line, which in enumerate("kq"):
        for column, tensor in enumerate(TENSORS):
            axes = grid[line, column]
            for index, policy in enumerate(dict.fromkeys(r["policy"] for r in rows)):
                for smoothing, style in styles.items():
                    of = [
                        r
                        for r in rows
                        if (r["policy"], r["smoothing"]) == (policy, smoothing)
                        and (r["offset_of"] == which or r["offset"] == 0)
                    ]
                    label = f"{policy}, {smoothing}"
                    x, y = [r["offset"] for r in of], [r[tensor] for r in of]
                    axes.plot(x, y, style, color=f"C{index}", lw=1.2, label=label)
            axes.set_yscale("log")
            axes.set_title(f"{NAMES[tensor]}, channels of {which.upper()} offset", fontsize=9)
    for axes in grid[-1]:
        axes.set_xlabel("offset / spread")
    for axes in grid[:, 0]:
        axes.set_ylabel("relative L2")
    canvas.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside right", fontsize=7)
    canvas.savefig(path)


if __name__ == "__main__":
    main("smoothing", __doc__, measure, table, plot)
