"""Programs that run beside the tests of attention kernels."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

SCRIPT = pathlib.Path(__file__).with_name("compile_report.py")


@pytest.fixture
def reports(tmp_path):
    """Compiles cases (see compile_report.py) with no GPU and says what became of each."""

    def compile_cases(cases: list[dict]) -> list[dict]:
        done = subprocess.run(
            [sys.executable, str(SCRIPT), str(tmp_path), *map(json.dumps, cases)],
            capture_output=True,
            text=True,
            timeout=900,
            cwd=tmp_path,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        lines = [line for line in done.stdout.splitlines() if line.startswith("REPORT ")]
        assert len(lines) == len(cases)
        return [json.loads(line.removeprefix("REPORT ")) for line in lines]

    return compile_cases


@pytest.fixture(params=["memcheck", "racecheck"])
def sanitize(request):
    """Runs a program under each tool of compute-sanitizer, which must find nothing."""
    if shutil.which("compute-sanitizer") is None:
        pytest.skip("needs compute-sanitizer")

    def run(program: pathlib.Path) -> None:
        tool = ["compute-sanitizer", "--tool", request.param, "--error-exitcode", "9"]
        # Those of racecheck are others than the cache has: fwd_case.main, bwd_case.main. memcheck
        # takes the cache's: what compiling asks of the driver is none of its business.
        kernels = {"SAGE_CUTE_CACHE_MB": "0"} if request.param == "racecheck" else {}
        if request.param == "memcheck":
            subprocess.run([sys.executable, str(program)], check=True, timeout=500)
        done = subprocess.run(
            [*tool, sys.executable, str(program), request.param],
            env=os.environ | kernels,
            capture_output=True,
            text=True,
            timeout=500,
        )
        assert done.returncode == 0, done.stdout[:3000] + done.stdout[-3000:]

    return run
