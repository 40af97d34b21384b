"""Pre-training study: does INT8 attention train as full precision does, and what does it need?

    python -m bench.pretrain --device cuda                  everything that is not done yet
    python -m bench.pretrain --device cuda --minutes 9      stops after 9 minutes; run it again
    python -m bench.pretrain --report                       table and plots of what is there

A Llama-style decoder (RMSNorm, RoPE, grouped-query attention, SwiGLU; 85 M parameters) on text,
byte by byte: the standard library's sources, or ``--data``. Every run of the study has the same
number of tokens. Compared with SDPA from the same weights and batches:

- ``sagebwd``, ``fast`` and ``accurate`` with QK-norm, at few and at many tokens a step, two seeds;
- the same without QK-norm, one seed;
- the policies without K smoothing, one seed.

A run writes its losses, and every ``--checkpoint`` steps its whole state, to runs/pretrain: an
interrupted study goes on where it was. Policies without kernels for their gradients on the device
are left out, with the reason. The gap of a run is its validation loss less that of SDPA
in the same setting; the noise to read it by is the difference that another seed makes to SDPA.

What this cannot show: the paper trains 325 M parameters on 78 B tokens with up to 2.1 M tokens a
step. Here it is 131 M bytes of a corpus that is read more than once, with a fraction of the tokens
a step. An instability that takes long, or very large steps, to appear does not.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from bench.result_files import meta, save, source, write_json
from sage_cute.support import is_supported
from sage_cute.training import data
from sage_cute.training.loop import TrainConfig, Trainer
from sage_cute.training.model import Decoder, ModelConfig, sage, sdpa

ROOT = Path(__file__).resolve().parents[1]
SDPA = "sdpa"
POLICIES = ("sagebwd", "fast", "accurate")
VALIDATION_SEQUENCES = 64
LAST = 20  # steps whose mean is a run's training loss


@dataclasses.dataclass(frozen=True)
class Scale:
    """Sizes of the study."""

    model: ModelConfig
    seqlen: int
    tokens: int  # of every run
    tokens_per_step: tuple[int, int]  # few and many
    micro_tokens: int  # of a forward and backward
    lr: float
    compile: bool


SCALES = {
    "full": Scale(
        ModelConfig(dim=768, layers=12, heads=12, kv_heads=12, head_dim=64),
        seqlen=2048,
        tokens=131_072_000,
        tokens_per_step=(32_768, 262_144),
        micro_tokens=32_768,
        lr=6e-4,
        compile=True,
    ),
    "tiny": Scale(
        ModelConfig(dim=32, layers=2, heads=2, kv_heads=1, head_dim=16),
        seqlen=64,
        tokens=4_096,
        tokens_per_step=(256, 1_024),
        micro_tokens=256,
        lr=1e-3,
        compile=False,
    ),
}


@dataclasses.dataclass(frozen=True)
class Run:
    """One training of the study."""

    attention: str  # SDPA, or a policy without its smoothing
    qk_norm: bool
    smooth_k: bool
    tokens_per_step: int
    seed: int

    @property
    def name(self) -> str:
        """Of its files."""
        parts = [self.attention, f"{self.tokens_per_step}tps", f"seed{self.seed}"]
        parts += [] if self.qk_norm else ["no-qk-norm"]
        parts += [] if self.smooth_k else ["no-smooth-k"]
        return "-".join(parts).replace(":", "-").replace(",", "-")

    @property
    def baseline(self) -> Run:
        """SDPA in the same setting."""
        return dataclasses.replace(self, attention=SDPA, smooth_k=True)

    @property
    def policy(self) -> str:
        """The policy string of ``sage::attn``."""
        if self.smooth_k:
            return self.attention
        return f"{self.attention}{',' if ':' in self.attention else ':'}smooth_k=false"


def study(scale: Scale, policies: tuple[str, ...] = POLICIES) -> list[Run]:
    """Every run, the main comparison first; SDPA before what is compared with it."""
    few, many = scale.tokens_per_step
    runs = [
        Run(attention, True, True, tokens, seed)
        for seed, tokens in itertools.product((0, 1), (many, few))
        for attention in (SDPA, *policies)
    ]
    for tokens in (many, few):
        runs += [Run(attention, False, True, tokens, 0) for attention in (SDPA, *policies)]
        runs += [Run(attention, True, False, tokens, 0) for attention in policies]
    return runs


class Resumable(Trainer):
    """A trainer whose state can be written and read again."""

    def write(self, path: Path) -> None:
        """Writes weights, optimizer and log, whole or not at all."""
        state = {
            "model": self.model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "log": dataclasses.asdict(self.log),
        }
        partial = path.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(path)

    def read(self, path: Path) -> None:
        """Goes on from what was written."""
        state = torch.load(path, map_location=self.device, weights_only=True)
        self.model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        for name, value in state["log"].items():
            setattr(self.log, name, value)


def trainer_of(run: Run, scale: Scale, device: str) -> Resumable:
    """The run's model, with the weights of its seed, and how to train it."""
    config = TrainConfig(
        steps=scale.tokens // run.tokens_per_step,
        tokens_per_step=run.tokens_per_step,
        seqlen=scale.seqlen,
        accumulate=max(1, run.tokens_per_step // scale.micro_tokens),
        lr=scale.lr,
        seed=run.seed,
        device=device,
        compile=scale.compile,
    )
    model_config = dataclasses.replace(scale.model, qk_norm=run.qk_norm)
    attention = sdpa if run.attention == SDPA else sage(run.policy)
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(run.seed)
        model = Decoder(model_config, seqlen=scale.seqlen, attention=attention)
    return Resumable(run.name, model, config)


def why_not(run: Run, scale: Scale, device: str) -> str:
    """Why a run's attention cannot train here; "" if it can."""
    if run.attention == SDPA:
        return ""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    q, k, v = (
        torch.empty(1, 1, 1, scale.model.head_dim, device=device, dtype=dtype, requires_grad=True)
        for _ in range(3)
    )
    return is_supported(q, k, v, causal=True, policy=run.policy).reason


def train(
    run: Run, scale: Scale, corpus: data.Corpus, args: argparse.Namespace, deadline: float
) -> bool:
    """Trains until it is done or time is up; whether it is done."""
    torch._dynamo.reset()
    trainer = trainer_of(run, scale, args.device)
    state, result = args.out / f"{run.name}.pt", args.out / f"{run.name}.json"
    if state.exists():
        trainer.read(state)
    config, log = trainer.config, trainer.log
    batches: Iterator[torch.Tensor] = data.batches(
        corpus.train, sequences=config.sequences, seqlen=config.seqlen, seed=run.seed
    )
    for batch in itertools.islice(batches, len(log.losses), config.steps):
        if time.monotonic() > deadline:
            trainer.write(state)
            return False
        trainer.step(batch)
        if log.stopped is not None:
            break
        done = len(log.losses)
        if done % args.checkpoint == 0:
            trainer.write(state)
        if done % 20 == 0 or done == config.steps:
            print(f"{run.name} step {done}/{config.steps} loss {log.losses[-1]:.4f}", flush=True)
    if log.stopped is None:
        size = config.sequences // config.accumulate
        count = max(1, VALIDATION_SEQUENCES // size) * size
        trainer.validate(data.windows(corpus.held_out, sequences=count, seqlen=config.seqlen))
    document = {
        "meta": meta("bench.pretrain", args.device, [] if run.attention == SDPA else [run.policy]),
        "run": dataclasses.asdict(run),
        "scale": dataclasses.asdict(scale),
        "parameters": sum(p.numel() for p in trainer.model.parameters()),
        "data": str(corpus),
        "steps": config.steps,
        "losses": log.losses,
        "grad_norms": log.grad_norms,
        "validation_loss": log.validation_loss,
        "stopped": log.stopped,
        "seconds_per_step": log.seconds_per_step,
    }
    write_json(document, result)
    state.unlink(missing_ok=True)
    return True


def finished(folder: Path, runs: list[Run]) -> dict[Run, dict[str, Any]]:
    """The results that are there."""
    found = {}
    for run in runs:
        path = folder / f"{run.name}.json"
        if path.exists():
            result = json.loads(path.read_text())
            for name in ("losses", "grad_norms"):  # JSON has no NaN
                result[name] = [math.nan if x is None else x for x in result[name]]
            found[run] = result
    return found


def summarize(results: dict[Run, dict[str, Any]]) -> dict[str, Any]:
    """Losses, gaps to SDPA in the same setting, and the noise of a seed."""
    rows = []
    for run, result in results.items():
        baseline = results.get(run.baseline)
        last = result["losses"][-LAST:]
        gap = None
        if run.attention != SDPA and baseline is not None:
            ours, theirs = result["validation_loss"], baseline["validation_loss"]
            gap = None if ours is None or theirs is None else ours - theirs
        rows.append(
            {
                **dataclasses.asdict(run),
                "train_loss": fmean(last) if last else None,
                "validation_loss": result["validation_loss"],
                "gap": gap,
                "max_grad_norm": max(result["grad_norms"], default=None),
                "stopped": result["stopped"],
            }
        )
    return {"rows": rows, "seed_noise": seed_noise(results)}


def seed_noise(results: dict[Run, dict[str, Any]]) -> dict[str, float]:
    """By tokens a step: the largest difference between SDPA's validation losses of two seeds."""
    losses: dict[int, list[float]] = {}
    for run, result in results.items():
        if run.attention == SDPA and run.qk_norm and result["validation_loss"] is not None:
            losses.setdefault(run.tokens_per_step, []).append(result["validation_loss"])
    return {str(n): max(v) - min(v) for n, v in losses.items() if len(v) > 1}


def table(document: dict[str, Any]) -> str:
    """Markdown: a line a run."""
    lines = [
        "| attention | QK-norm | K smoothing | tokens a step | seed | train | validation | gap |",
        "| --- |" + " --- |" * 7,
    ]
    for row in document["rows"]:
        cells = [row["attention"], "yes" if row["qk_norm"] else "no"]
        cells.append("-" if row["attention"] == SDPA else "yes" if row["smooth_k"] else "no")
        cells += [f"{row['tokens_per_step']:,}", str(row["seed"])]
        cells += [_loss(row["train_loss"]), row["stopped"] or _loss(row["validation_loss"])]
        cells.append("" if row["gap"] is None else f"{row['gap']:+.4f}")
        lines.append("| " + " | ".join(cells) + " |")
    noise = (f"{v:.4f} at {int(n):,} tokens a step" for n, v in document["seed_noise"].items())
    lines += [
        "",
        f"Another seed changes SDPA's validation loss by {', '.join(noise) or '(unknown)'}.",
    ]
    return "\n".join(lines)


def _loss(value: float | None) -> str:
    return "-" if value is None or math.isnan(value) else f"{value:.4f}"


def plot(results: dict[Run, dict[str, Any]], path: Path) -> None:
    """A column for each setting: losses, and below the gap to SDPA (mean over 20 steps)."""
    from matplotlib.figure import Figure

    settings = sorted({(r.tokens_per_step, r.qk_norm) for r in results})
    canvas = Figure(figsize=(4.5 * len(settings), 6), dpi=90, layout="constrained")
    grid = canvas.subplots(2, len(settings), squeeze=False, sharex="col")
    names = sorted({(r.attention, r.smooth_k) for r in results})
    for column, setting in enumerate(settings):
        top, bottom = grid[:, column]
        for run, result in results.items():
            if (run.tokens_per_step, run.qk_norm) != setting:
                continue
            color = f"C{names.index((run.attention, run.smooth_k))}"
            label = run.attention + ("" if run.smooth_k else ", no K smoothing")
            top.plot(smooth(result["losses"]), color=color, lw=1, label=None if run.seed else label)
            baseline = results.get(run.baseline)
            if run.attention != SDPA and baseline is not None:
                pairs = zip(result["losses"], baseline["losses"], strict=False)
                bottom.plot(smooth([a - b for a, b in pairs]), color=color, lw=1)
        bottom.axhline(0, color="0.5", lw=0.8)
        norm = "QK-norm" if setting[1] else "no QK-norm"
        top.set_title(f"{setting[0]:,} tokens a step, {norm}", fontsize=9)
        bottom.set_xlabel("step")
    grid[0, 0].set_ylabel("loss (nats a byte)")
    grid[1, 0].set_ylabel("minus SDPA's")
    for axes in grid[0]:
        axes.legend(fontsize=7)
    canvas.savefig(path)


def smooth(values: list[float]) -> list[float]:
    """Means of the last 20 values."""
    return [fmean(values[max(0, i - LAST + 1) : i + 1]) for i in range(len(values))]


def report(args: argparse.Namespace, runs: list[Run]) -> None:
    """Writes and prints the summary of what is finished."""
    results = finished(args.out, runs)
    if not results:
        raise SystemExit(f"no finished run in {args.out}: run without --report first")
    one = next(iter(results.values()))
    document = {
        "meta": {
            **one["meta"],
            "parameters": one["parameters"],
            "data": one["data"],
            "scale": one["scale"],
            "finished": f"{len(results)} of {len(runs)} runs",
        },
        **summarize(results),
    }
    path = save("pretrain", document, args.device, args.results)
    plot(results, path.with_suffix(".png"))
    print(table(document))
    print(f"\n{document['meta']['finished']}. {source(document['meta'])}")


def main() -> None:
    """Trains what is missing, then reports."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--scale", choices=SCALES, default="full")
    parser.add_argument("--tokens", type=int, help="of every run, instead of the scale's")
    parser.add_argument("--policies", nargs="+", default=list(POLICIES))
    parser.add_argument("--only", default="", help="runs whose name contains this")
    parser.add_argument("--data", type=Path, help="a file or folder of text")
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop after these")
    parser.add_argument("--checkpoint", type=int, default=100, help="steps between two")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "pretrain", help="of runs")
    parser.add_argument("--results", type=Path, help="of the summary; default: bench/results")
    parser.add_argument("--report", action="store_true", help="only report what is there")
    args = parser.parse_args()
    deadline = time.monotonic() + 60 * args.minutes
    scale = SCALES[args.scale]
    if args.tokens:
        scale = dataclasses.replace(scale, tokens=args.tokens)
    runs = [r for r in study(scale, tuple(args.policies)) if args.only in r.name]
    if not args.report:
        args.out.mkdir(parents=True, exist_ok=True)
        corpus = data.load(args.data, seqlen=scale.seqlen)
        done = finished(args.out, runs)
        for run in (r for r in runs if r not in done):
            if reason := why_not(run, scale, args.device):
                print(f"{run.name} cannot run here: {reason}", flush=True)
                continue
            if not train(run, scale, corpus, args, deadline):
                print(f"time is up in {run.name}: the same command goes on", flush=True)
                break
    report(args, runs)


if __name__ == "__main__":
    main()
