"""The commands about kernels and tuning, on a machine without a GPU."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from sage_cute import cli, env, limits, verify
from sage_cute.cli import bench as bench_command
from sage_cute.cli import tune as tune_command
from sage_cute.compile import cache
from sage_cute.compile.build import Built
from sage_cute.compile.catalog import Call, problem_of
from sage_cute.compile.kernel import Kernel
from sage_cute.config.space import FORWARD
from sage_cute.tune import select, table
from sage_cute.tune.key import Gpu, Shape, TuneKey
from sage_cute.tune.table import Entry

COMMANDS = ("info", "verify", "tune", "compile", "cache", "bench", "diagnose", "train")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing of the user's; one thread, which is faster at these sizes on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setenv("SAGE_CUTE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")
    cache._opened.cache_clear()
    cache._say_once.cache_clear()
    yield
    torch.set_num_threads(threads)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli.build_app(), [str(a) for a in arguments])


def run_json(*arguments: object, code: int = 0) -> Any:
    result = run(*arguments, "--json")
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


# Help and mistakes


@pytest.mark.parametrize("command", COMMANDS)
def test_help_says_what_a_command_is_for(command) -> None:
    assert command in run("--help").output
    text = run(command, "--help").output
    assert len(text.split()) > 40
    if command not in ("cache", "train"):
        assert "--json" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["info", "--shape", "1,2"], "six numbers"),
        (["info", "--policy", "int7"], "unknown policy 'int7'"),
        (["info", "--dtype", "float64"], "bfloat16 or float16"),
        (["verify", "--policies", "fast:dp=16bit"], "bounds exist for"),
        (["verify", "--inputs", "nonsense"], "choose g1"),
        (["verify", "--device", "tpu"], "cpu, cuda or cuda:N"),
        (["verify", "--device", "cuda:99"], "CUDA devices"),
        (["compile", "--out", "x", "--head-dims", "84"], "head_dim 84"),
        (["compile", "--out", "x", "--head-dims", "large"], "whole numbers"),
        (["compile", "--out", "x", "--arch", "sm_10"], "sm_90a"),
        (["compile", "--out", "x", "--dtypes", "int4"], "bfloat16, float16"),
        (["compile", "--out", "x", "--masks", "causal,alibi"], "--masks alibi"),
        (["compile", "--out", os.devnull, "--directions", "fwd"], "--out"),
        (["bench", "--shape", "1,1,1"], "five numbers"),
        (["tune", "--shapes", "no/such/file"], "No such file"),
    ],
)
def test_a_mistake_is_one_line(arguments, message) -> None:
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith(f"sage-cute {arguments[0]}: ") and message in result.stderr
    assert result.stderr.count("\n") == 1 and not result.stdout


# info


def test_info_for_people_and_for_scripts(tmp_path) -> None:
    shown = run("info").output
    document = run_json("info", "--shape", "1,8,2,100,200,64", "--policy", "sagebwd:s=16bit")
    assert {"gpus", "versions", "kernels", "tables", "environment", "call"} <= set(document)
    for name in env.VARIABLES:
        assert name in shown and name in document["environment"]
    forward = document["configurations"]["fwd"]
    assert forward["config"]["tile_n"] == 64 and forward["reason"]
    assert "no kernel: " in document["configurations"]["bwd"]["reason"]
    assert document["supported"]["table"][1]["CPU"] == "float16, bfloat16 and float32"
    assert "head_dim of q, k and v" in shown and limits.REFUSED["dropout"][:20] in shown
    assert not (tmp_path / "cache").exists()  # it changes nothing


def test_info_says_which_table_a_configuration_is_from(monkeypatch) -> None:
    gpu, call = Gpu("NVIDIA H200", 132, "sm90"), Call("fast", 128, "bfloat16", True)
    key = TuneKey.of("fwd", call, Shape(1, 16, 16, 4096, 4096))
    config = FORWARD.configs(problem_of("fwd", call))[1]
    table.record(gpu, Entry(key, config, 1.0, 1.1, 3, table.sources_hash(), {}))
    info = importlib.import_module("sage_cute.cli.info")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(info, "gpu_of", lambda i: gpu)
    found = run_json("info", "--shape", "1,16,16,4000,4000,128")
    assert found["configurations"]["fwd"]["config"] == config.asdict()
    assert "nvidia_h200_132sm.json" in found["configurations"]["fwd"]["reason"]
    assert "default" in found["configurations"]["bwd"]["reason"]
    assert found["tables"][0]["entries"] == 1


# verify and bench


def test_verify_passes_here_with_figures() -> None:
    arguments = ("verify", "--policies", "fast", "--inputs", "qkn", "--device", "cpu")
    document = run_json(*arguments)
    assert document["passed"] and all(check["ok"] for check in document["checks"])
    names = {check["name"] for check in document["checks"]}
    assert "error of dq, qkn causal" in names and "<dQ, Q> against <dK, K>" in names
    assert all(check["value"] <= check["limit"] for check in document["checks"])


@pytest.mark.parametrize("value", [1.0, float("nan")])
def test_verify_fails_where_a_figure_does(monkeypatch, value) -> None:
    checks = [verify.Check("good", "fast", 0.1, 0.2), verify.Check("bad", "fast", value, 0.2)]
    monkeypatch.setattr(verify, "invariants", lambda *a, **k: iter(checks))
    monkeypatch.setattr(verify, "accuracy", lambda *a, **k: iter(()))
    result = run("verify", "--device", "cpu")
    assert result.exit_code == 1
    assert "FAIL" in result.output and "1 of 2 checks pass" in result.output
    assert run_json("verify", "--device", "cpu", code=1)["passed"] is False


def test_verify_notices_wrong_gradients(monkeypatch) -> None:
    original = verify.run_attention

    def wrong(*arguments, **options):
        result = original(*arguments, **options)
        return result._replace(dk=-result.dk)

    monkeypatch.setattr(verify, "run_attention", wrong)
    failed = {c.name for c in verify.invariants(["fast"], device="cpu") if not c.ok}
    assert failed == {"<dQ, Q> against <dK, K>"}
    checks = verify.accuracy(["fast"], device="cpu", kinds=["qkn"])
    assert {c.name.split(",")[0] for c in checks if not c.ok} == {"error of dk"}


def test_bench_times_what_is_right() -> None:
    arguments = ("bench", "--shape", "1,2,1,64,32", "--rounds", 1, "--device", "cpu")
    document = run_json(*arguments, "--policies", "fast,sagebwd")
    assert [row["what"] for row in document["rows"]] == ["SDPA", "fast", "sagebwd"]
    assert all(row["fwd_ms"] > 0 and row["bwd_ms"] > 0 for row in document["rows"])
    assert 0 < document["rows"][1]["difference"] < 0.1
    assert "SDPA" in run(*arguments).output


def test_bench_gives_no_time_to_what_is_wrong(monkeypatch) -> None:
    monkeypatch.setattr(
        bench_command, "attention", lambda q, k, v, **options: q * torch.nan + k[:, :1] + v[:, :1]
    )
    arguments = ("bench", "--shape", "1,2,1,64,32", "--rounds", 1, "--device", "cpu")
    row = run_json(*arguments, code=1)["rows"][1]
    assert row["red"].startswith("RED") and row["fwd_ms"] is None and row["fwd_tflops"] is None


# compile and cache


@pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="needs the CuTe DSL")
def test_compile_without_a_gpu_then_list_and_clear(tmp_path) -> None:
    out = tmp_path / "kernels"
    arguments = ["compile", "--head-dims", 32, "--masks", "full", "--directions", "fwd"]
    document = run_json(*arguments, "--out", out, "--policies", "sagebwd", "--workers", 2)
    names = {row["kernel"] for row in document["kernels"]}
    assert {path.stem for path in out.iterdir()} == names and len(names) == 2
    assert all(row["error"] == "" and row["bytes"] > 10_000 for row in document["kernels"])

    folder = env.cache_dir() / "kernels"
    assert Path(run("cache", "path").stdout.strip()) == folder
    assert run_json("cache", "list")["kernels"] == []
    (folder / "toolchain").mkdir(parents=True)
    for path in out.iterdir():
        (folder / "toolchain" / path.name).write_bytes(path.read_bytes())
    assert {row["kernel"] for row in run_json("cache", "list")["kernels"]} == names
    assert "2 kernels" in run("cache", "list").output
    assert "Removed 2 kernels" in run("cache", "clear").output
    assert run_json("cache", "clear")["removed"] == 0


def test_compile_builds_what_was_tuned_too(tmp_path, monkeypatch) -> None:
    asked: list[Kernel] = []

    def build_all(kernels, folder, **options):
        asked.extend(kernels)
        return (Built(kernel, 1.0, 1, "") for kernel in kernels)

    commands = importlib.import_module("sage_cute.cli.kernels")
    monkeypatch.setattr(commands, "build_all", build_all)
    call, shape = Call("fast", 64, "bfloat16", True), Shape(1, 16, 16, 4096, 4096)
    configs = FORWARD.configs(problem_of("fwd", call))
    for gpu, config in (("sm90", configs[3]), ("sm100", configs[4])):
        key = TuneKey.of("fwd", call, shape)
        entry = Entry(key, config, 1.0, 1.1, 3, table.sources_hash(), {})
        table.record(Gpu(gpu, 132, gpu), entry)
    arguments = ("compile", "--out", tmp_path / "out", "--head-dims", "64", "--directions", "fwd")
    run_json(*arguments, "--masks", "causal")
    built = {kernel.plan.config for kernel in asked if kernel.kind == "fwd"}
    assert built == {configs[0], configs[3]} and len(asked) == 3
    asked.clear()
    run_json(*arguments, "--masks", "full")  # of which nothing was tuned
    assert len(asked) == 2


# tune


class Steps:
    """A simulated GPU: more stages are slower."""

    def prepare(self, configs):
        return {}

    def outputs(self, config):
        return {"out": torch.ones(1)}

    def why_wrong(self, outputs):
        return ""

    def times(self, configs, rounds):
        return {c: [1.0 + 0.1 * c.num_stages] * rounds for c in configs}


@pytest.fixture
def simulated(monkeypatch, tmp_path) -> list[TuneKey]:
    """Calls that were measured, in order, where no table is shipped."""
    monkeypatch.setattr(table, "SHIPPED", tmp_path / "shipped")
    measured: list[TuneKey] = []

    def make(direction, call, shape, device):
        measured.append(TuneKey.of(direction, call, shape))
        return Steps()

    gpu = Gpu("NVIDIA H200", 132, "sm90")
    monkeypatch.setattr(select, "make_bench", make)
    monkeypatch.setattr(tune_command, "gpu_of", lambda device: gpu)
    monkeypatch.setattr(tune_command, "_gpu_index", lambda name: 0)
    return measured


@pytest.fixture
def trace(tmp_path, monkeypatch) -> Path:
    """Three calls of two buckets, as a model's run records them."""
    path = tmp_path / "trace.jsonl"
    monkeypatch.setenv("SAGE_CUTE_TRACE", str(path))
    monkeypatch.setattr(select, "_chosen", {})
    monkeypatch.setattr(select, "gpu_of", lambda device: Gpu("NVIDIA H200", 132, "sm90"))
    for length in (1000, 1024, 2000):
        call = Call("fast", 64, "bfloat16", True)
        select.tile_config("fwd", call, Shape(1, 8, 8, length, length), 0)
    monkeypatch.delenv("SAGE_CUTE_TRACE")
    return path


def test_tune_writes_a_table_and_goes_on_where_it_stopped(simulated, trace) -> None:
    document = run_json("tune", "--from-model-trace", trace)
    assert len(simulated) == len(document["calls"]) == 2
    assert all(row["gain"] == pytest.approx(1.4 / 1.2) for row in document["calls"])
    (found,) = table.tables(users=True)
    assert str(found.path) == document["table"]
    assert {e.config.num_stages for e in found.entries} == {2}
    assert "Gain" not in run("tune", "--shapes", trace).output and len(simulated) == 2
    assert "1.167 x" in run("tune", "--shapes", trace, "--again").output and len(simulated) == 4


def test_tune_stopped_in_the_middle_keeps_what_is_done(simulated, trace, monkeypatch) -> None:
    original = select.tune

    def interrupted(key, *arguments, **options):
        if simulated:
            raise KeyboardInterrupt
        return original(key, *arguments, **options)

    monkeypatch.setattr(select, "tune", interrupted)
    assert run("tune", "--shapes", trace).exit_code == 130
    monkeypatch.setattr(select, "tune", original)
    document = run_json("tune", "--shapes", trace)
    assert [row["note"] for row in document["calls"]][0] == "in the table already"
    assert len(simulated) == 2


def test_tune_has_common_sizes_of_its_own(simulated, tmp_path) -> None:
    out = tmp_path / "nvidia_h200.json"
    document = run_json("tune", "--out", out)
    assert len(document["calls"]) == 2 * 2 * 2 * 4 and out.exists()
    written = json.loads(out.read_text())
    assert written["gpu"]["name"] == "NVIDIA H200" and len(written["entries"]) == 32
    assert written["entries"][0]["made"]["command"].startswith("sage-cute")


def test_tune_needs_a_gpu(trace) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    result = run("tune", "--shapes", trace)
    assert result.exit_code == 2 and "no GPU: tune on the machine" in result.stderr


@pytest.mark.parametrize(
    "line", ["{", "[]", '{"direction": "fwd"}', '{"direction": "up", "policy": "fast"}']
)
def test_a_bad_line_is_named(simulated, tmp_path, line) -> None:
    path = tmp_path / "shapes"
    path.write_text("\n" + line)
    result = run("tune", "--shapes", path)
    assert result.exit_code == 2 and "line 2" in result.stderr and not simulated
