"""Throughput over sequence length, as the paper plots it, from the benchmark's own runs.

    python -m bench.run                  on a GPU: measures
    python -m bench.paper.throughput     anywhere: draws

Reads the result files of ``bench.run`` in bench/results; measures nothing itself.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.report import MODE_NAMES, label
from bench.result_files import RESULTS, write_json

MODES = ("fwd", "fwd_bwd")
HEAD_DIMS = (64, 128)


class NoResults(SystemExit):
    """There is nothing to draw; the message says what to run."""


def find(folder: Path) -> list[Path]:
    """Result files of bench.run on a GPU in a folder.

    Raises:
        NoResults: none.
    """
    found = [path for path in sorted(folder.glob("*.json")) if _is_benchmark(path)]
    if not found:
        raise NoResults(
            f"no result of the benchmark in {folder}: run `python -m bench.run` on a GPU first, or "
            "name a file with --results"
        )
    return found


def _is_benchmark(path: Path) -> bool:
    document = json.loads(path.read_text())
    gpu = document.get("meta", {}).get("gpu")
    return bool(gpu) and not gpu.startswith("CPU")


def series(document: dict[str, Any]) -> list[dict[str, Any]]:
    """TFLOPS over length, a line for each provider, mode, head_dim and mask; no GQA, no windows.

    Where a call is bound by the host, its time is that of a CUDA graph, if there is one.

    Raises:
        NoResults: the file has no timed row.
    """
    lines: dict[tuple[str, str, int, bool], dict[int, float]] = {}
    for row in document["rows"]:
        if row["tflops"] is None or row["heads"] != row["kv_heads"]:
            continue
        if row["window"] is not None:
            continue
        if row["mode"] not in MODES or row["head_dim"] not in HEAD_DIMS:
            continue
        key = (label(row), row["mode"], row["head_dim"], row["causal"])
        ms = row.get("graph_ms") or row["ms"]
        lines.setdefault(key, {})[row["seqlen"]] = row["tflops"] * row["ms"] / ms
    if not lines:
        raise NoResults(
            "the benchmark's result has no timed row with head_dim 64 or 128: each says in "
            "`skipped` why; run `python -m bench.run` again"
        )
    names = ("provider", "mode", "head_dim", "causal")
    return [
        {**dict(zip(names, key, strict=True)), "tflops": dict(sorted(points.items()))}
        for key, points in lines.items()
    ]


def table(document: dict[str, Any]) -> str:
    """Markdown: a line a provider and problem, a column a length."""
    lengths = sorted({n for line in document["series"] for n in line["tflops"]}, key=int)
    lines = [
        "| provider | mode | head_dim | mask | " + " | ".join(map(str, lengths)) + " |",
        "| --- |" + " --- |" * (3 + len(lengths)),
    ]
    for line in document["series"]:
        what = [line["provider"], MODE_NAMES[line["mode"]], str(line["head_dim"])]
        what.append("causal" if line["causal"] else "full")
        cells = [f"{line['tflops'][n]:.0f}" if n in line["tflops"] else "" for n in lengths]
        lines.append("| " + " | ".join([*what, *cells]) + " |")
    return "\n".join(lines)


def plot(document: dict[str, Any], path: Path) -> None:
    """A row a mode, a column a head_dim and mask."""
    from matplotlib.figure import Figure

    canvas = Figure(figsize=(15, 6.5), dpi=90, layout="constrained")
    grid = canvas.subplots(len(MODES), 2 * len(HEAD_DIMS), sharex=True)
    providers = list(dict.fromkeys(line["provider"] for line in document["series"]))
    for row, mode in zip(grid, MODES, strict=True):
        columns = [(d, c) for d in HEAD_DIMS for c in (False, True)]
        for axes, (head_dim, causal) in zip(row, columns, strict=True):
            for line in document["series"]:
                if (line["mode"], line["head_dim"], line["causal"]) != (mode, head_dim, causal):
                    continue
                color = f"C{providers.index(line['provider']) % 10}"
                points = [(int(n), v) for n, v in line["tflops"].items()]
                axes.plot(
                    *zip(*points, strict=True), marker="o", label=line["provider"], color=color
                )
            mask = "causal" if causal else "full"
            axes.set_title(f"{MODE_NAMES[mode]}, head_dim {head_dim}, {mask}", fontsize=9)
            axes.set_xscale("log", base=2)
            axes.set_ylim(bottom=0)
    for axes in grid[:, 0]:
        axes.set_ylabel("TFLOPS")
    for axes in grid[-1]:
        axes.set_xlabel("sequence length")
    handles: dict[str, Any] = {}
    for axes in grid.flat:
        for handle, name in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(name, handle)
    canvas.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4, fontsize=8)
    canvas.suptitle(document["meta"]["gpu"])
    canvas.savefig(path)


def main(argv: Sequence[str] | None = None) -> None:
    """Draws every result file, or the one that is named."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.paper.throughput", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--results", type=Path, help="one file of bench.run")
    parser.add_argument("--out", type=Path, default=RESULTS / "paper", help="folder")
    args = parser.parse_args(argv)
    for path in [args.results] if args.results else find(RESULTS):
        if not path.is_file():
            raise NoResults(f"{path}: there is no such file; `python -m bench.run` writes one")
        source = json.loads(path.read_text())
        document = {"meta": {**source["meta"], "from": path.name}, "series": series(source)}
        target = args.out / f"throughput-{path.stem}.json"
        write_json(document, target)
        plot(document, target.with_suffix(".png"))
        print(table(document))


if __name__ == "__main__":
    main()
