"""What a diagnosis leaves: a table, a verdict in words, JSON and a heat map."""

from __future__ import annotations

import dataclasses
import json
import math
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from sage_cute.diagnosis.measure import OTHER_SMOOTHING, QK_NORM, SIXTEEN_BIT, Errors, Measurement
from sage_cute.diagnosis.verdict import NAMES, judge, largest, mean, mixes, short
from sage_cute.testing import TENSORS


@dataclasses.dataclass(frozen=True)
class Layer:
    """One attention call of the model, over all examined sequences.

    ``errors[column][tensor]`` are :class:`Errors` against float64 attention on the same tensors,
    with an entry a query head for out and dq, a key head for dv and dk. Columns are the policies,
    "16-bit", and what else was tried with the first policy: "smooth_k" (K smoothing the other way)
    and "qk_norm" (Q and K normalized).

    ``figures`` has an entry a head: ``p_rms``, ``dp_rms``, ``ds_rms`` (over the pairs that the mask
    shows), ``sink_mass`` (largest mean probability of a key), ``sink_position`` (that key),
    ``sink_value`` (norm of its value over the mean norm), ``q_rms``, ``q_outliers`` (share of
    elements beyond 6 RMS); and an entry a key head: ``k_rms``, ``k_outliers``,
    ``k_outliers_smoothed`` (without K's mean), ``k_offset`` (RMS of that mean over the rest's).
    """

    name: str
    function: str
    policy: str | None
    shape: dict[str, int]
    causal: bool
    scale: float | None
    dtype: str
    sequences: int
    evaluated_on: dict[str, str]
    errors: dict[str, dict[str, Errors]]
    figures: dict[str, list[float]]

    @classmethod
    def of(cls, measurement: Measurement) -> Layer:
        """From the sums of a layer."""
        call = measurement.call
        batch, heads, seqlen_q, head_dim = call.x.q.shape
        return cls(
            name=call.name,
            function=call.function,
            policy=call.policy,
            shape={
                "batch": batch,
                "heads": heads,
                "kv_heads": call.x.k.shape[1],
                "seqlen_q": seqlen_q,
                "seqlen_k": call.x.k.shape[2],
                "head_dim": head_dim,
            },
            causal=call.causal,
            scale=call.scale,
            dtype=str(call.x.q.dtype).removeprefix("torch."),
            sequences=measurement.sequences,
            evaluated_on=dict(measurement.evaluated_on),
            errors={
                column: {name: deviation.errors for name, deviation in of_tensor.items()}
                for column, of_tensor in measurement.errors.items()
            },
            figures=measurement.means(),
        )

    def of_head(self, values: list[float], head: int) -> float:
        """A query head's entry, or that of its key head."""
        return values[head * len(values) // self.shape["heads"]]


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """Every attention call of a model beside float64; ``print`` it, or write it.

    ``seconds`` is the whole diagnosis, of which ``step_seconds`` are the model's own steps.
    """

    model: str
    policies: tuple[str, ...]
    layers: list[Layer]
    skipped: dict[str, str]
    steps: int
    loss: float
    seconds: float
    step_seconds: float
    versions: dict[str, str]

    @property
    def verdict(self) -> list[str]:
        """Sentences: which policies hold, what would help, and what was not seen."""
        return judge(self)

    @property
    def mean(self) -> dict[str, dict[str, float]]:
        """Relative L2 by column and tensor, mean over layers."""
        return self._over_layers(mean)

    @property
    def worst(self) -> dict[str, dict[str, float]]:
        """Relative L2 by column and tensor, of the worst layer."""
        return self._over_layers(largest)

    def _over_layers(
        self, reduce: Callable[[Iterable[float]], float]
    ) -> dict[str, dict[str, float]]:
        return {
            column: {
                name: reduce(layer.errors[column][name].layer_rel_l2 for layer in self.layers)
                for name in TENSORS
            }
            for column in self.layers[0].errors
        }

    def table(self, *, heads: bool = False) -> str:
        """Markdown: a line a layer, or with ``heads`` a line a query head.

        Errors are relative L2 of O, dV, dQ, dK, and behind them the cosine of dQ: the layer's, or
        the head's (for dV and dK: its key head's). The other columns are means over heads.
        """
        columns = [SIXTEEN_BIT, *self.policies]
        lines = [
            "| layer | " + " | ".join(columns) + " | dS RMS | sink | K offset | outliers Q, K |",
            "| --- |" + " --- |" * (len(columns) + 4),
        ]
        for layer in self.layers:
            picks = range(layer.shape["heads"]) if heads else [None]
            lines += [self._line(layer, columns, head) for head in picks]
        return "\n".join(lines)

    def _line(self, layer: Layer, columns: list[str], head: int | None) -> str:
        cells = [layer.name if head is None else f"{layer.name} head {head}"]
        for column in columns:
            of = layer.errors[column]
            if head is None:
                errors = [of[name].layer_rel_l2 for name in TENSORS]
                cosine = of["dq"].layer_cosine
            else:
                errors = [layer.of_head(of[name].rel_l2, head) for name in TENSORS]
                cosine = of["dq"].cosine[head]
            cells.append(f"{' '.join(map(short, errors))} ({cosine:.4f})")
        figures = {
            name: mean(values) if head is None else layer.of_head(values, head)
            for name, values in layer.figures.items()
        }
        cells += [
            f"{figures['ds_rms']:.1e}",
            f"{figures['sink_mass']:.2f} x {figures['sink_value']:.2f}",
            f"{figures['k_offset']:.2f}",
            f"{figures['q_outliers']:.3%} {figures['k_outliers_smoothed']:.3%}",
        ]
        return "| " + " | ".join(cells) + " |"

    def asdict(self) -> dict[str, Any]:
        """Everything, JSON-able: figures that are not finite become None."""
        content = {
            "format": 1,
            **dataclasses.asdict(self),
            "layers": [
                {
                    **dataclasses.asdict(layer),
                    "errors": {
                        column: {name: e._asdict() for name, e in of.items()}
                        for column, of in layer.errors.items()
                    },
                }
                for layer in self.layers
            ],
            "mixes": mixes(self.policies),
            "mean": self.mean,
            "worst": self.worst,
            "verdict": self.verdict,
        }
        finite: dict[str, Any] = _finite(content)
        return finite

    def write_json(self, path: Path | str) -> None:
        """Writes :meth:`asdict`."""
        Path(path).write_text(json.dumps(self.asdict(), indent=1, allow_nan=False) + "\n")

    def write_heatmap(self, path: Path | str) -> None:
        """Draws the relative L2 of every layer and head: a row of panels a tensor, one a policy.

        Raises:
            ImportError: without matplotlib, which comes with the extra ``train``.
        """
        try:
            from matplotlib.colors import LogNorm
            from matplotlib.figure import Figure
            from matplotlib.ticker import MaxNLocator
        except ImportError:
            raise ImportError(
                'a heat map needs matplotlib: pip install "sage-cute[train]"'
            ) from None
        columns = [*self.policies, OTHER_SMOOTHING, QK_NORM]
        titles = [*self.policies, f"{self.policies[0]}, K smoothing flipped"]
        titles.append(f"{self.policies[0]}, QK-norm")
        height = 0.9 + 0.12 * len(self.layers)
        figure = Figure(figsize=(2.2 * len(columns) + 1.5, 4 * height), layout="constrained")
        grid = figure.subplots(len(TENSORS), len(columns), squeeze=False, sharey=True)
        norm = LogNorm(1e-3, 1.0, clip=True)
        for axes_of_row, tensor in zip(grid, TENSORS, strict=True):
            for axes, column, title in zip(axes_of_row, columns, titles, strict=True):
                rows = [layer.errors[column][tensor].rel_l2 for layer in self.layers]
                width = max(map(len, rows))
                cells = [[*row, *[math.nan] * (width - len(row))] for row in rows]
                mesh = axes.imshow(cells, norm=norm, cmap="magma", aspect="auto")
                axes.set_title(textwrap.fill(f"{NAMES[tensor]}, {title}", 26), fontsize=7)
                axes.xaxis.set_major_locator(MaxNLocator(integer=True))
                axes.tick_params(labelsize=6)
            axes_of_row[0].set_ylabel("layer", fontsize=7)
        for axes in grid[-1]:
            axes.set_xlabel("head", fontsize=7)
        figure.colorbar(mesh, ax=grid, label="relative L2 error against float64", shrink=0.5)
        figure.suptitle(f"{self.model}: errors of dV and dK are of key heads", fontsize=8)
        figure.savefig(path, dpi=90)

    def __str__(self) -> str:
        return f"{self.table()}\n\n" + "\n".join(f"- {line}" for line in self.verdict)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
