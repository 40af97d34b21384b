"""Compiles attention kernels with no GPU and prints, as JSON, what ptxas makes of each.

A script of its own process: the DSL reads where to dump PTX when it is imported.
usage: compile_report.py DUMP_DIR CASE...   with CASE a dict in JSON: head_dim, dtype, causal,
policy, kernel (forward; or of the backward: keys, queries, preprocess), assemble
"""

import json
import os
import pathlib
import re
import subprocess
import sys

dump = pathlib.Path(sys.argv[1])
os.environ.update(CUTE_DSL_ARCH="sm_90a", CUTE_DSL_KEEP="ptx", CUTE_DSL_DUMP_DIR=str(dump))

import torch  # noqa: E402

from sage_cute.compile import bwd_launch, launch  # noqa: E402
from sage_cute.compile.compiler import compile_plan  # noqa: E402
from sage_cute.compile.visibility import Static  # noqa: E402
from sage_cute.policies import resolve  # noqa: E402

INT8 = r"[^;]*\.s32\.[su]8\.[su]8"


def compile_case(
    head_dim, dtype, causal, policy, kernel="forward", window=False, lengths="dense", **_
):
    """Leaves PTX in the folder."""
    make = launch if kernel == "forward" else bwd_launch
    static = Static(causal and not window, window, lengths)
    plan = make._plan(resolve(policy), head_dim, getattr(torch, dtype), static, None)
    if kernel == "forward":
        compile_plan(plan)
    else:
        getattr(bwd_launch, f"_compile_{kernel}")(plan)


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
        # C7519, a warpgroup.arrive that ptxas adds, serializes nothing
        "warnings": re.findall(r".*(?:\(C751[0-8]\)|Potential Performance Loss).*", log),
    }


for case in map(json.loads, sys.argv[2:]):
    for old in dump.glob("*.ptx"):
        old.unlink()
    compile_case(**case)
    (ptx,) = [path.read_text() for path in dump.glob("*.ptx")]
    report = {
        "case": case,
        "int8_products": len(re.findall(rf"wgmma\.mma_async{INT8}", ptx)),
        "other_products": len(re.findall(rf"wgmma\.mma_async(?!{INT8})", ptx)),
    }
    if case.get("assemble"):
        report |= assemble(ptx)
    print("REPORT " + json.dumps(report), flush=True)
