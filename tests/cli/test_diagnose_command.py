"""The command line of a diagnosis."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from sage_cute import cli

SOURCE = """
import torch
from beside import Model

def make():
    return Model(), torch.randn(1, 24, 32)

def with_loss():
    return Model(), torch.randn(1, 24, 32), lambda loss: 2 * loss

def wrong():
    return Model()
"""
BESIDE = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(32, 96)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 16)).transpose(1, 3).unbind(2)
        return nn.functional.scaled_dot_product_attention(q, k, v).square().mean()
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "beside.py").write_text(BESIDE)
    path = tmp_path / "script.py"
    path.write_text(SOURCE)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    monkeypatch.delitem(sys.modules, "beside", raising=False)
    return path


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli.build_app(), ["diagnose", *map(str, arguments)])


def test_table_verdict_and_files(script: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "folder"
    result = run(f"{script}:make", "--policies", "fast,sagebwd", "--out", out)
    assert result.exit_code == 0, result.output
    for part in ("| layer | 16-bit | fast | sagebwd |", "- fast: holds.", "Wrote diagnosis.json"):
        assert part in result.output
    assert json.loads((out / "diagnosis.json").read_text())["policies"] == ["fast", "sagebwd"]
    assert (out / "diagnosis.png").read_bytes().startswith(b"\x89PNG")


def test_loss_and_heads(script: Path) -> None:
    result = run(f"{script}:with_loss", "--policies", "fast", "--heads")
    assert result.exit_code == 0, result.output
    assert "| model head 1 |" in result.output


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("{}", "write MODULE:FUNCTION"),
        ("{}:absent", "has no function absent"),
        ("{}:wrong", "must return (model, batch)"),
        ("no_such_file.py:make", "there is no such file"),
        ("no_such_module:make", "No module named 'no_such_module'"),
    ],
)
def test_errors_are_one_line(script: Path, target: str, message: str) -> None:
    result = run(target.format(script))
    assert result.exit_code == 2 and message in result.output
    assert len(result.output.strip().splitlines()) == 1


def test_json_is_the_whole_of_it(script: Path) -> None:
    result = run(f"{script}:make", "--policies", "fast:smooth_k=false", "--json")
    document = json.loads(result.stdout)
    assert document["policies"] == ["fast:smooth_k=false"] and len(document["layers"]) == 1


def test_a_module_by_name_and_an_unknown_policy(script: Path, monkeypatch) -> None:
    monkeypatch.chdir(script.parent)
    monkeypatch.delitem(sys.modules, "script", raising=False)
    result = run("script:make", "--policies", "fastest")
    assert result.exit_code == 2 and "unknown policy 'fastest'" in result.output
    assert len(result.output.strip().splitlines()) == 1
