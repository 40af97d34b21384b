"""Side-by-side benchmark: ``python -m bench.run`` on a GPU.

For every shape: the correctness gate first (each provider against float64 on the same inputs; one
that fails is shown in red and gets no speed), then forward, backward and both, interleaved, medians
over rounds, over several input sets, quantization, smoothing and copies included. Our attention
kernel on inputs that are already quantized is a row of its own (``quant_included: false``). Writes
``bench/results/<gpu>.json``, a Markdown table and plots beside it.

    python -m bench.run                              everything
    python -m bench.run --preset goals --modes fwd   what CI of a kernel change looks at
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import sage_cute
from bench.providers import Provider, providers
from bench.report import markdown, plot
from bench.shapes import PRESETS, Shape
from bench.timing import captured, interleaved_ms
from sage_cute.numerics import attention_reference, attention_reference_backward, rel_l2
from sage_cute.testing import Inputs, make_inputs

ROOT = Path(__file__).resolve().parents[1]
MODES = ("fwd", "bwd", "fwd_bwd")
# Normal inputs, sigma 1: FlashAttention .002, the paper .02 (O) and .056; twice the paper is wrong.
GATE = {"out": 0.04, "dv": 0.1, "dq": 0.12, "dk": 0.12}
HOST_BOUND_MS = 0.3
INPUT_BYTES = 150e6  # more than the L2 cache: an input is cold again when its turn comes


def inputs_of(shape: Shape, device: str) -> list[Inputs]:
    """Enough input sets to push each other out of the cache."""
    size = (shape.batch, shape.heads, shape.seqlen, shape.head_dim)
    one = make_inputs("g1", size, kv_heads=shape.kv_heads, device="cpu", seed=0)
    sets = max(2, min(8, math.ceil(INPUT_BYTES / sum(t.numel() * 2 for t in one))))
    if device == "cpu":
        return [one, *(make_inputs("g1", size, kv_heads=shape.kv_heads, seed=i) for i in (1,))]
    generator = torch.Generator(device).manual_seed(0)
    draw = lambda t: torch.randn(t.shape, device=device, dtype=t.dtype, generator=generator)
    return [Inputs(*map(draw, one)) for _ in range(sets)]


def first_group(x: Inputs) -> Inputs:
    """The query heads of the first key head: what the gate looks at."""
    group = x.q.shape[1] // x.k.shape[1]
    return Inputs(x.q[:1, :group], x.k[:1, :1], x.v[:1, :1], x.dout[:1, :group])


class Truth:
    """float64 attention of the first group, made once a shape."""

    def __init__(self, x: Inputs, shape: Shape, backward: bool) -> None:
        q, k, v, dout = first_group(x)
        mask: dict[str, Any] = {"causal": shape.causal, "window": (shape.window, None)}
        self.tensors = {"out": attention_reference(q, k, v, **mask).out}
        if backward:
            grads, _ = attention_reference_backward(dout, q, k, v, **mask)
            self.tensors |= {"dq": grads.dq, "dk": grads.dk, "dv": grads.dv}

    def errors(self, result: dict[str, torch.Tensor]) -> dict[str, float]:
        """Relative L2 of each tensor of a result of the whole problem."""
        return {
            name: rel_l2(value[:1, : self.tensors[name].shape[1]], self.tensors[name])
            for name, value in result.items()
            if name in self.tensors
        }


def leaves(x: Inputs) -> Inputs:
    """The same inputs, asking for gradients."""
    q, k, v = (t.detach().requires_grad_() for t in (x.q, x.k, x.v))
    return Inputs(q, k, v, x.dout)


def reason_of(error: Exception) -> str:
    """Why there is no time, in a line."""
    return f"{type(error).__name__}: {error}".split("\n")[0][:160]


def attempt(provider: Provider, x: Inputs, shape: Shape, modes: list[str]) -> tuple[dict, dict]:
    """Results of one run in each kind of mode, and reasons for the modes that cannot run."""
    reasons = {}
    with torch.no_grad():
        result = {"out": provider.attend(x, shape)}
    for mode in modes:
        if mode != "fwd" and not provider.trains:
            reasons[mode] = "inference only"
    if any(mode != "fwd" and mode not in reasons for mode in modes):
        try:
            y = leaves(x)
            grads = torch.autograd.grad(provider.attend(y, shape), y[:3], y.dout)
            result |= dict(zip(("dq", "dk", "dv"), grads, strict=True))
        except (ValueError, TypeError, RuntimeError, NotImplementedError) as error:
            reason = reason_of(error)
            reasons |= {mode: reason for mode in modes if mode != "fwd"}
    return result, reasons


def call_of(
    provider: Provider, sets: list[Inputs], shape: Shape, mode: str
) -> Callable[[], object]:
    """A function that runs the next input set."""
    if provider.prepare is not None:
        prepared = itertools.cycle([provider.prepare(x, shape) for x in sets])
        return lambda: next(prepared)()
    if mode == "fwd":
        turn: Iterator[Any] = itertools.cycle(sets)

        def forward() -> object:
            with torch.no_grad():
                return provider.attend(next(turn), shape)

        return forward
    trainable = [leaves(x) for x in sets]
    if mode == "bwd":
        turn = itertools.cycle([(x, provider.attend(x, shape)) for x in trainable])

        def backward() -> object:
            x, out = next(turn)
            return torch.autograd.grad(out, x[:3], x.dout, retain_graph=True)

        return backward
    turn = itertools.cycle(trainable)

    def both() -> object:
        x = next(turn)
        return torch.autograd.grad(provider.attend(x, shape), x[:3], x.dout)

    return both


def measure(
    shape: Shape, modes: list[str], candidates: list[Provider], args: argparse.Namespace
) -> list[dict[str, Any]]:
    """Rows of one shape: timed ones, and ones with the reason why there is no time."""
    on_gpu = args.device != "cpu"
    sets = inputs_of(shape, args.device)
    truth = Truth(sets[0], shape, any(m != "fwd" for m in modes))
    rows, calls = [], {}
    for index, provider in enumerate(candidates):
        what = {"provider": provider.name, "policy": provider.policy}
        what |= {"quant_included": provider.quant_included, **vars(shape)}
        why_not = provider.why_not
        if shape.window is not None and not provider.windows:
            why_not = why_not or "no window"
        reasons = dict.fromkeys(modes, why_not) if why_not else {}
        errors: dict[str, float] = {}
        if not reasons:
            try:
                result, reasons = attempt(provider, sets[0], shape, modes)
                errors = truth.errors(result)
            except Exception as error:
                reasons = dict.fromkeys(modes, reason_of(error))
        for mode in modes:
            wanted = ["out"] if mode == "fwd" else ["out", "dv", "dq", "dk"]
            red = [n for n in wanted if n in errors and not errors[n] <= GATE[n]]
            if mode not in reasons and red:
                reasons[mode] = "RED: " + ", ".join(f"{n} off by {errors[n]:.3g}" for n in red)
            row = {**what, "mode": mode, "ms": None, "tflops": None, "rel_l2": errors}
            if mode not in reasons:
                call = call_of(provider, sets, shape, mode)
                try:
                    for _ in range(len(sets) + 1):  # who writes into the inputs fails again
                        call()
                    calls[index, mode] = call
                except Exception as error:
                    reasons[mode] = reason_of(error)
            if mode in reasons:
                row["skipped"] = reasons[mode]
            rows.append((index, row))
    timed = interleaved_ms(calls, on_gpu=on_gpu, rounds=args.rounds)
    graphs = {}
    for key, ms in timed.items():
        if on_gpu and key[1] == "fwd" and ms < HOST_BOUND_MS:
            graphs[key] = captured(calls[key], repeats=20)
    replays = {key: replay for key, replay in graphs.items() if callable(replay)}
    replayed = interleaved_ms(replays, on_gpu=on_gpu, rounds=args.rounds) if replays else {}
    for index, row in rows:
        key = (index, row["mode"])
        if key in timed:
            row["ms"] = timed[key]
            if key in graphs:
                row["graph_ms"] = replayed[key] / 20 if key in replayed else None
                if key not in replayed:
                    row["graph_skipped"] = graphs[key]
            row["tflops"] = shape.flops(row["mode"]) / row["ms"] * 1e-9
    return [row for _, row in rows]


def version(package: str) -> str | None:
    """Of an installed distribution, None if it is absent."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def meta_of(args: argparse.Namespace) -> dict[str, Any]:
    """Where, when, with what and from what the figures came."""
    cuda = args.device != "cpu"
    driver = "nvidia-smi --query-gpu=driver_version,clocks.max.sm --format=csv,noheader"
    sha = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=ROOT)
    return {
        "gpu": torch.cuda.get_device_name() if cuda else f"CPU ({platform.machine()})",
        "driver": subprocess.run(driver.split(), capture_output=True, text=True).stdout.strip()
        if cuda
        else None,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cutlass": version("nvidia-cutlass-dsl"),
        "peers": {p: version(p) for p in ("flash-attn-4", "sageattention")},
        "sage_cute": sage_cute.__version__,
        "date": datetime.now(timezone.utc).isoformat(timespec="minutes"),
        "git_sha": args.git_sha or sha.stdout.strip() or None,
        "command": shlex.join(["python", "-m", "bench.run", *sys.argv[1:]]),
    }


def main() -> None:
    """Measures, prints, writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", choices=PRESETS, default="main")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--policies", nargs="+", default=["fast", "accurate", "sagebwd"])
    parser.add_argument(
        "--providers", nargs="+", help="only those whose name contains one of these"
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--git-sha", help="of the tree that runs, where .git did not travel")
    parser.add_argument("--out", type=Path, help="folder; default: bench/results")
    args = parser.parse_args()
    candidates = providers(args.policies, args.device)
    if args.providers:
        wanted = [w.lower() for w in args.providers]
        candidates = [p for p in candidates if any(w in p.name.lower() for w in wanted)]
    document: dict[str, Any] = {"meta": meta_of(args), "rows": []}
    folder = args.out or ROOT / "bench" / "results"
    folder.mkdir(parents=True, exist_ok=True)
    name = re.sub(r"\W+", "_", document["meta"]["gpu"]).strip("_").lower()
    for shape in PRESETS[args.preset]:
        print(f"# {shape.name}", file=sys.stderr, flush=True)
        document["rows"] += measure(shape, args.modes, candidates, args)
        # After every shape: what is measured stays, whatever happens to the rest.
        (folder / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n")
    text = markdown(document)
    (folder / f"{name}.md").write_text(text + "\n")
    plot(document, folder / f"{name}.png")
    print(text)


if __name__ == "__main__":
    main()
