"""Tables and plots of a result file of bench.run; never a figure that no run produced."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from bench.shapes import Shape

MODE_NAMES = {"fwd": "forward", "bwd": "backward", "fwd_bwd": "forward + backward"}


def label(row: dict[str, Any]) -> str:
    """A provider, with its policy and what is timed."""
    policy = f" {row['policy']}" if row["policy"] else ""
    return row["provider"] + policy + ("" if row["quant_included"] else ", kernel alone")


def shape_of(row: dict[str, Any]) -> Shape:
    """The problem of a row."""
    return Shape(**{field.name: row[field.name] for field in dataclasses.fields(Shape)})


def cell(row: dict[str, Any] | None) -> str:
    """TFLOPS; in parentheses from a CUDA graph, where calls are host-bound."""
    if row is None or row["tflops"] is None:
        skipped = "" if row is None else row["skipped"]
        return "**red**" if skipped.startswith("RED") else "-"
    text = f"{row['tflops']:.0f}"
    if row.get("graph_ms"):
        text += f" ({row['tflops'] * row['ms'] / row['graph_ms']:.0f})"
    return text


def markdown(document: dict[str, Any]) -> str:
    """One table a mode, the reasons for what is missing, and where it all comes from."""
    rows = document["rows"]
    labels = list(dict.fromkeys(map(label, rows)))
    lines = []
    for mode, mode_name in MODE_NAMES.items():
        of_mode = [row for row in rows if row["mode"] == mode]
        shown = [n for n in labels if any(label(r) == n and r["tflops"] for r in of_mode)]
        if not shown:
            continue
        lines += [
            f"TFLOPS, {mode_name}",
            "",
            "| (batch, heads, seqlen, head_dim) | " + " | ".join(shown) + " |",
            "| --- |" + " --- |" * len(shown),
        ]
        for shape in dict.fromkeys(map(shape_of, of_mode)):
            here = {label(row): row for row in of_mode if shape_of(row) == shape}
            lines.append(f"| {shape.name} | " + " | ".join(cell(here.get(n)) for n in shown) + " |")
        lines.append("")
    reasons = dict.fromkeys(
        f"{label(row)}, {MODE_NAMES[row['mode']]}: {row['skipped']}"
        for row in rows
        if "skipped" in row
    )
    if reasons:
        lines += ["Not measured:", "", *(f"- {reason}" for reason in reasons), ""]
    meta = document["meta"]
    lines.append(
        f"`{meta['command']}` on {meta['gpu']}, driver {meta['driver']}, torch {meta['torch']}, "
        f"CuTe DSL {meta['cutlass']}, {meta['date']}, commit {str(meta['git_sha'])[:10]}. "
        "Operations: 4 b h n n d forward, 10 backward, half for causal, those that a window "
        "leaves. In parentheses: timed by "
        "CUDA graphs." + (f" ({meta['note']}.)" if "note" in meta else "")
    )
    return "\n".join(lines)


def plot(document: dict[str, Any], path: Path) -> None:
    """TFLOPS over sequence length, a panel for each mode, head_dim and mask."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in document["rows"] if row["tflops"] and row["heads"] == row["kv_heads"]]
    panels = sorted({(row["mode"], row["head_dim"], shape_of(row).mask) for row in rows})
    if not panels:
        return
    columns = min(4, len(panels))
    lines = -(-len(panels) // columns)
    figure, axes = pyplot.subplots(
        lines, columns, figsize=(4.2 * columns, 3.4 * lines), squeeze=False, layout="constrained"
    )
    labels = list(dict.fromkeys(map(label, rows)))
    for axis in axes.flat[len(panels) :]:
        axis.set_axis_off()
    for axis, (mode, head_dim, mask) in zip(axes.flat, panels, strict=False):
        for index, name in enumerate(labels):
            points = sorted(
                (row["seqlen"], row["tflops"])
                for row in rows
                if label(row) == name
                and (row["mode"], row["head_dim"], shape_of(row).mask) == (mode, head_dim, mask)
            )
            if points:
                ours = name.startswith("sage-cute")
                style = {"marker": "o", "lw": 2 if ours else 1, "ls": "-" if ours else "--"}
                axis.plot(*zip(*points, strict=True), label=name, color=f"C{index}", **style)
        axis.set_xscale("log", base=2)
        axis.set_ylim(bottom=0)
        axis.set_title(f"{MODE_NAMES[mode]}, head_dim {head_dim}, {mask}", fontsize=9)
        axis.set_xlabel("seqlen")
        axis.set_ylabel("TFLOPS")
    handles = {}
    for axis in axes.flat:
        handles.update(dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True)))
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4, fontsize=8)
    figure.suptitle(document["meta"]["gpu"])
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
