"""The benchmark's own machinery, on the CPU: gate, rows, tables."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from bench.providers import Provider, providers
from bench.report import markdown
from bench.run import measure
from bench.shapes import PRESETS, Shape
from sage_cute import attention

ROOT = Path(__file__).resolve().parents[2]
SHAPE = Shape(1, 4, 2, 65, 32, True)
ARGS = argparse.Namespace(device="cpu", rounds=1)


def right(x, shape):
    return attention(x.q, x.k, x.v, causal=shape.causal)


def wrong(x, shape):
    return attention(x.q, x.k.roll(1, -2), x.v, causal=shape.causal)


def test_a_wrong_provider_is_red_and_gets_no_speed() -> None:
    rows = measure(
        SHAPE, ["fwd", "bwd"], [Provider("right", right), Provider("wrong", wrong)], ARGS
    )
    by_name = {(row["provider"], row["mode"]): row for row in rows}
    for mode in ("fwd", "bwd"):
        assert by_name["right", mode]["tflops"] > 0 and "skipped" not in by_name["right", mode]
        red = by_name["wrong", mode]
        assert red["ms"] is None and red["tflops"] is None and red["skipped"].startswith("RED: out")
    assert set(by_name["right", "bwd"]["rel_l2"]) == {"out", "dq", "dk", "dv"}
    document = {
        "meta": dict.fromkeys(("command", "gpu", "driver", "torch", "cutlass", "date", "git_sha")),
        "rows": rows,
    }
    assert "| wrong" not in markdown(document) and "wrong, forward: RED" in markdown(document)


def test_nan_never_passes_the_gate() -> None:
    rows = measure(SHAPE, ["fwd"], [Provider("nan", lambda x, s: right(x, s) * torch.nan)], ARGS)
    assert rows[0]["ms"] is None and rows[0]["skipped"].startswith("RED")


def test_absent_and_failing_providers_say_why() -> None:
    def fails(x, shape):
        raise ValueError("head_dim 32 is not for me")

    inference = Provider("inference", right, trains=False)
    absent = Provider("absent", fails, why_not="not importable")
    rows = measure(SHAPE, ["fwd", "bwd"], [Provider("fails", fails), inference, absent], ARGS)
    skipped = {(row["provider"], row["mode"]): row.get("skipped") for row in rows}
    assert skipped["fails", "fwd"] == "ValueError: head_dim 32 is not for me"
    assert skipped["inference", "fwd"] is None
    assert skipped["inference", "bwd"] == "inference only"
    assert skipped["absent", "bwd"] == "not importable"
    assert all(p.why_not for p in providers([], "cpu") if p.name != "SDPA math")


def test_one_that_fails_when_called_again_loses_its_row_only() -> None:
    calls = iter(range(100))

    def once(x, shape):
        if next(calls):
            raise RuntimeError("modified in place")
        return right(x, shape)

    rows = measure(SHAPE, ["fwd"], [Provider("once", once), Provider("right", right)], ARGS)
    assert "modified in place" in rows[0]["skipped"] and rows[0]["ms"] is None
    assert rows[1]["ms"] > 0


@pytest.mark.parametrize("mode", ["fwd", "bwd", "fwd_bwd"])
def test_operations_are_the_usual_count(mode) -> None:
    full = Shape(2, 3, 3, 64, 32, False)
    assert full.flops(mode) == {"fwd": 4, "bwd": 10, "fwd_bwd": 14}[mode] * 2 * 3 * 64 * 64 * 32
    assert Shape(2, 3, 1, 64, 32, True).flops(mode) == full.flops(mode) // 2
    # A window: the pairs that it leaves, and all of the triangle if it is as long as the sequence.
    pairs = sum(min(i, 9) + 1 for i in range(64))
    assert Shape(2, 3, 1, 64, 32, True, window=9).flops(mode) == full.flops(mode) * pairs // 64**2
    whole = Shape(2, 3, 1, 64, 32, True, window=500).flops(mode)
    assert whole == full.flops(mode) * (65 * 32) // 64**2


def test_the_issues_shapes_are_there() -> None:
    seen = {(s.batch * s.heads, s.seqlen, s.head_dim, s.causal) for s in PRESETS["main"]}
    for batch_heads, seqlen in ((32, 1024), (32, 4096), (16, 16384), (8, 32768)):
        for head_dim in (64, 128):
            assert {(batch_heads, seqlen, head_dim, c) for c in (True, False)} <= seen


def test_command_line_writes_json_table_and_plot(tmp_path) -> None:
    command = [sys.executable, "-m", "bench.run", "--preset", "smoke", "--device", "cpu"]
    command += ["--rounds", "1", "--policies", "fast", "--out", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (path,) = tmp_path.glob("*.json")
    document = json.loads(path.read_text())
    assert {"gpu", "driver", "torch", "cutlass", "date", "git_sha", "command"} <= set(
        document["meta"]
    )
    assert {row["window"] for row in document["rows"]} == {None, 40}
    row = document["rows"][0]
    assert {
        "provider",
        "policy",
        "mode",
        "batch",
        "heads",
        "kv_heads",
        "seqlen",
        "head_dim",
        "causal",
        "ms",
        "tflops",
        "quant_included",
        "rel_l2",
    } <= set(row)
    assert path.with_suffix(".md").exists() and path.with_suffix(".png").exists()
