"""What a finished (or interrupted) run leaves: a table, a JSON and a PNG."""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
import os
import platform
import statistics
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from rich.table import Table

from sage_cute._version import __version__
from sage_cute.policies import canonical, resolve
from sage_cute.training.loop import RunLog, TrainConfig, pick_device
from sage_cute.training.model import ModelConfig

# Blue and orange that colour-blind readers can tell apart, and neutral grey.
_SAGE_COLOUR, _SDPA_COLOUR, _GREY = "#d55e00", "#56b4e9", "#777777"


@dataclasses.dataclass(frozen=True)
class Report:
    """Everything about one comparison; the logs may end early."""

    command: str
    data: str
    policy: str
    model: ModelConfig
    train: TrainConfig
    parameters: int
    sage: RunLog
    sdpa: RunLog
    started: datetime.datetime
    seconds: float  # of the whole, compilation and validation included

    @property
    def steps(self) -> int:
        """Steps that both runs have done."""
        return min(len(self.sage.losses), len(self.sdpa.losses))

    @property
    def device(self) -> str:
        """The device with its product name."""
        return device_name(self.train.device)

    @property
    def caution(self) -> str | None:
        """What must be known before the times are read."""
        if pick_device(self.train.device).type == "cuda":
            return None
        return (
            "On a CPU sage::attn is the reference arithmetic of the INT8 kernels, in PyTorch: "
            "its times say nothing about a kernel's speed."
        )


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the summary; None: not known."""

    label: str
    sage: float | None
    sdpa: float | None
    format: str = ",.4f"

    @property
    def gap(self) -> float | None:
        """``sage`` minus ``sdpa``."""
        return None if self.sage is None or self.sdpa is None else self.sage - self.sdpa


def device_name(name: str) -> str:
    """A device such as ``cuda:0`` with its product name."""
    device = pick_device(name)
    if device.type == "cuda":
        return f"{device}: {torch.cuda.get_device_name(device)}"
    return f"cpu: {_cpu_name()}, {torch.get_num_threads()} threads"


def summary(report: Report) -> dict[str, Row]:
    """The run in a few figures; losses are in nats a byte, the train loss a mean at the end."""
    sage, sdpa, steps = report.sage, report.sdpa, report.steps
    last = min(20, -(-steps // 10))  # a tenth of the run, at most 20 steps: one batch is noisy
    label = f"train loss, steps {steps - last + 1} to {steps}" if steps else "train loss"

    def mean(log: RunLog) -> float | None:
        return statistics.fmean(log.losses[steps - last : steps]) if steps else None

    return {
        "train_loss": Row(label, mean(sage), mean(sdpa)),
        "validation_loss": Row("validation loss", sage.validation_loss, sdpa.validation_loss),
        "seconds_per_step": Row(
            "seconds a step, median", sage.seconds_per_step, sdpa.seconds_per_step, ",.3f"
        ),
        "tokens_per_second": Row(
            "tokens a second", sage.tokens_per_second, sdpa.tokens_per_second, ",.0f"
        ),
    }


def table(report: Report) -> Table:
    """The summary for a terminal."""
    caption = "\n".join(filter(None, (report.device, report.caution)))
    result = Table(
        title=f"{report.steps} of {report.train.steps} steps in {report.seconds:.0f} s, "
        f"policy {canonical(report.policy)}",
        caption=caption,
        caption_justify="left",
    )
    result.add_column("")
    for heading in ("sage::attn", "SDPA", "gap"):
        result.add_column(heading, justify="right")

    def show(value: float | None, format_: str) -> str:
        return "-" if value is None else format(value, format_)

    for key, row in summary(report).items():
        gap = None if key == "tokens_per_second" else row.gap  # the seconds say it already
        result.add_row(
            row.label,
            show(row.sage, row.format),
            show(row.sdpa, row.format),
            "" if gap is None else format(gap, "+" + row.format),
        )
    return result


def write_json(report: Report, path: Path) -> None:
    """Writes the whole run; figures that are not finite become null, as JSON has none."""
    content = {
        "format": 1,
        "command": report.command,
        "started": report.started.isoformat(timespec="seconds"),
        "seconds": report.seconds,
        "device": report.device,
        "caution": report.caution,
        "versions": {
            "sage_cute": __version__,
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "python": platform.python_version(),
        },
        "data": report.data,
        "policy": {
            "given": report.policy,
            "name": canonical(report.policy),
            "mix": str(resolve(report.policy)),
            "fields": resolve(report.policy).asdict(),
        },
        "model": {**dataclasses.asdict(report.model), "parameters": report.parameters},
        "train": dataclasses.asdict(report.train),
        "summary": {
            key: {"sage": row.sage, "sdpa": row.sdpa, "gap": row.gap}
            for key, row in summary(report).items()
        },
        "runs": {
            "sage": dataclasses.asdict(report.sage),
            "sdpa": dataclasses.asdict(report.sdpa),
        },
    }
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(_finite(content), indent=1, allow_nan=False) + "\n")
    partial.replace(path)


def write_plot(report: Report, path: Path) -> None:
    """Draws both loss curves, and below them their difference."""
    figure = Figure(figsize=(8, 6), dpi=150, layout="constrained")
    loss_axes, gap_axes = figure.subplots(2, sharex=True, height_ratios=(3, 1))
    # The wide light line lies below the narrow dark one, so that both show where they agree.
    for log, label, colour, width in (
        (report.sdpa, "SDPA", _SDPA_COLOUR, 4.0),
        (report.sage, f"sage::attn, policy {canonical(report.policy)}", _SAGE_COLOUR, 1.2),
    ):
        steps = range(1, len(log.losses) + 1)
        loss_axes.plot(steps, log.losses, color=colour, linewidth=width, label=label)
        if log.validation_loss is not None:
            loss_axes.plot(
                len(log.losses),
                log.validation_loss,
                marker="D",
                markersize=2 * width + 3,
                color=colour,
                linestyle="none",
                label=f"validation {log.validation_loss:.4f}",
            )
    loss_axes.set_ylabel("loss (nats a byte)")
    loss_axes.set_title(
        "Training by INT8 attention and by SDPA: "
        f"the same {report.parameters / 1e6:.1f} M weights, the same batches",
        fontsize="medium",
    )
    loss_axes.legend(frameon=False)

    gaps = [a - b for a, b in zip(report.sage.losses, report.sdpa.losses, strict=False)]
    gap_axes.axhline(0, color=_GREY, linewidth=0.8)
    gap_axes.plot(range(1, len(gaps) + 1), gaps, color=_SAGE_COLOUR, linewidth=1)
    gap_axes.set_ylabel("sage - SDPA")
    gap_axes.set_xlabel(f"step ({report.train.tokens_per_step:,} tokens)")
    for axes in (loss_axes, gap_axes):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _cpu_name() -> str:
    if os.path.exists("/proc/cpuinfo"):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
