"""The tables of README.md and docs/evidence.md are those of the result files."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench import readme

MARKED = "before\n<!-- real-model: bench.real_model -->\nold\n<!-- end -->\nbetween\n<!-- end -->\n"


def document() -> dict:
    errors = {"out": 0.01, "dv": 0.02, "dq": 0.03, "dk": 0.04}
    meta = dict.fromkeys(("command", "device", "torch", "sage_cute", "date"), "x")
    return {
        "meta": {**meta, "model": "A model", "layers": 2, "seqlen": 64, "tune_seqlen": 32},
        "losses": {"fast": 2.5},
        "rows": {"fast": {"mean": errors, "worst": errors, "cosine_dq": 0.999}},
    }


def test_files_hold_what_the_result_files_say() -> None:
    # After a new measurement: make report.
    for path in readme.FILES:
        assert readme.filled(path.read_text()) == path.read_text(), f"{path.name}: make report"


def test_every_marker_has_a_section_and_a_module() -> None:
    seen = set()
    for path in readme.FILES:
        content = path.read_text()
        markers = re.findall(r"<!-- ([\w-]+): (\S+) -->", content)
        assert len(markers) == content.count("<!-- end -->") == content.count("<!--") // 2
        seen |= {name for name, _ in markers}
        for _, module in markers:
            assert importlib.util.find_spec(module), module
    assert seen == set(readme.SECTIONS)


def test_figures_that_the_documents_name_are_there() -> None:
    for path in readme.FILES:
        for link in re.findall(r"\]\((?!http)([^)#]+)", path.read_text()):
            assert (path.parent / link).exists(), f"{path.name}: {link}"


def test_text_between_markers_is_replaced_and_nothing_else(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(readme, "RESULTS", tmp_path)
    text = readme.filled(MARKED)
    assert "Not measured yet: `python -m bench.real_model`" in text and "old" not in text
    (tmp_path / "real-model-cpu.json").write_text(json.dumps(document()))
    (tmp_path / "real-model-run-fast.json").write_text('{"settings": {}}')  # no result of its own
    gpu = document()
    gpu["meta"]["device"] = "A GPU"
    (tmp_path / "real-model-nvidia.json").write_text(json.dumps(gpu))
    text = readme.filled(MARKED)
    assert "| fast | 2.5000 | .0100 | .0200 | .0300 | .0400 | .0100 .0200 .0300 .0400 |" in text
    assert text.startswith("before\n<!-- real-model") and text.endswith(
        "<!-- end -->\nbetween\n<!-- end -->\n"
    )
    assert 0 < text.index("on A GPU") < text.index("on x")  # GPUs first
    assert readme.filled(text) == text


def test_tuning_is_left_out_where_there_is_none(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(readme, "RESULTS", tmp_path)
    (tmp_path / "real-model-cpu.json").write_text(json.dumps(document()))
    assert readme.section("tuning", "bench.real_model").startswith("Not measured yet")
    run = {"held_out_before": 2.0, "held_out_after": 1.5, "losses": [2.0]}
    tuned = {**document(), "tuning": {"SDPA": run, "fast": {**run, "held_out_after": 1.625}}}
    (tmp_path / "real-model-cpu.json").write_text(json.dumps(tuned))
    assert "| fast | 2.0000 | 1.6250 | +0.1250 |" in readme.section("tuning", "bench.real_model")


def test_check_fails_on_a_stale_file(tmp_path, monkeypatch, capsys) -> None:
    path = tmp_path / "README.md"
    path.write_text(MARKED)
    monkeypatch.setattr(readme, "FILES", (path,))
    monkeypatch.setattr(readme, "ROOT", tmp_path)
    monkeypatch.setattr(readme, "RESULTS", tmp_path)
    monkeypatch.setattr(sys, "argv", ["bench.readme", "--check"])
    with pytest.raises(SystemExit, match="make report"):
        readme.main()
    assert path.read_text() == MARKED
    monkeypatch.setattr(sys, "argv", ["bench.readme"])
    readme.main()
    assert "wrote README.md" in capsys.readouterr().out and "old" not in path.read_text()
    monkeypatch.setattr(sys, "argv", ["bench.readme", "--check"])
    readme.main()
