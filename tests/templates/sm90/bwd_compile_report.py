"""Compiles backward kernels with no GPU and prints, as JSON, what ptxas makes of each.

A script of its own process: the DSL reads where to dump PTX when it is imported.
usage: bwd_compile_report.py DUMP_DIR CASE...   with CASE a dict in JSON: head_dim, dtype, causal,
policy, kernel (keys, queries or preprocess), assemble
"""

import json
import os
import pathlib
import re
import subprocess
import sys

dump = pathlib.Path(sys.argv[1])
os.environ.update(CUTE_DSL_ARCH="sm_90a", CUTE_DSL_KEEP="ptx", CUTE_DSL_DUMP_DIR=str(dump))

from sage_cute.compile import bwd_launch  # noqa: E402
from sage_cute.config.bwd import BwdProblem  # noqa: E402
from sage_cute.policies import resolve  # noqa: E402


def assemble(ptx: str) -> dict:
    """Spills and warnings; the version is what the installed ptxas can read."""
    source, cubin = dump / "case.ptx_", dump / "case.cubin_"
    source.write_text(re.sub(r"^\.version .*", ".version 9.0", ptx, flags=re.M))
    done = subprocess.run(
        ["ptxas", "-arch=sm_90a", "-v", str(source), "-o", str(cubin)],
        capture_output=True,
        text=True,
        check=True,
    )
    log = done.stdout + done.stderr
    return {
        "spill_stores": sum(map(int, re.findall(r"(\d+) bytes spill stores", log))),
        "warnings": re.findall(r"Potential Performance Loss.{0,100}", log),
    }


for text in sys.argv[2:]:
    case = json.loads(text)
    problem = BwdProblem.of(
        resolve(case["policy"]),
        head_dim=case["head_dim"],
        dtype=case["dtype"],
        is_causal=case["causal"],
    )
    for old in dump.glob("*.ptx"):
        old.unlink()
    getattr(bwd_launch, "_compile_" + case["kernel"])(bwd_launch.bwd_plan(problem))
    (ptx,) = [path.read_text() for path in dump.glob("*.ptx")]
    report = {
        "case": case,
        "int8_products": len(re.findall(r"wgmma\.mma_async[^;]*\.s32\.s8\.s8", ptx)),
        "other_products": len(re.findall(r"wgmma\.mma_async(?![^;]*\.s32\.s8\.s8)", ptx)),
    }
    if case.get("assemble"):
        report |= assemble(ptx)
    print("REPORT " + json.dumps(report), flush=True)
