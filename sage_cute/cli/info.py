"""``sage-cute info``: what this machine has, and what a call would use."""

from __future__ import annotations

import os
import subprocess
from typing import Annotated, Any

import torch
import typer

from sage_cute import env, limits
from sage_cute._version import __version__
from sage_cute.cli.common import Json, fail, numbers, one_line_errors, show_json, show_table
from sage_cute.compile import aot
from sage_cute.compile.binary import linker, runtime_libraries
from sage_cute.compile.cache import kernel_cache
from sage_cute.compile.catalog import Call, problem_of
from sage_cute.compile.kernel import target_arch, version
from sage_cute.config.space import SPACES
from sage_cute.errors import KernelError, UnsupportedError
from sage_cute.policies import canonical
from sage_cute.tune import select, table
from sage_cute.tune.key import Shape, TuneKey, gpu_of


def info(
    json_: Json = False,
    shape: Annotated[
        str,
        typer.Option(
            metavar="B,H,HKV,SQ,SK,D",
            help="Batch, query heads, key heads, query and key length, head_dim of a call whose "
            "configuration to show.",
        ),
    ] = "1,16,16,4096,4096,128",
    policy: Annotated[str, typer.Option(help="Policy of that call.")] = "default",
    dtype: Annotated[str, typer.Option(help="bfloat16 or float16.")] = "bfloat16",
    causal: Annotated[bool, typer.Option(help="Causal mask.")] = True,
) -> None:
    """Shows GPU, versions, caches, tables, what is supported, and which configuration a call uses.

    Send the output along with a bug report. It changes nothing and compiles nothing.

    [dim]sage-cute info --shape 2,32,8,8192,8192,128 --policy accurate[/]
    """
    with one_line_errors("info"):
        sizes = numbers(shape, "info", "--shape")
        if len(sizes) != 6:
            fail("info", f"--shape {shape}: six numbers B,H,HKV,SQ,SK,D")
        if dtype not in ("bfloat16", "float16"):
            fail("info", f"--dtype {dtype}: bfloat16 or float16")
        call = Call(canonical(policy), sizes[5], dtype, causal)
        document = {
            "sage_cute": __version__,
            "gpus": _gpus(),
            "versions": _versions(),
            "kernels": _kernels(),
            "tables": _tables(),
            "supported": {
                "table": [dict(zip(limits.columns(), row, strict=True)) for row in limits.table()],
                "refused": list(limits.REFUSED.values()),
            },
            "environment": {name: os.environ.get(name) for name in env.VARIABLES},
            "call": {**call._asdict(), "shape": sizes[:5]},
            "configurations": {d: _configuration(d, call, Shape(*sizes[:5])) for d in SPACES},
        }
    if json_:
        show_json(document)
    else:
        _show(document)


def _gpus() -> list[dict[str, Any]]:
    return [
        {
            **gpu_of(i)._asdict(),
            "capability": ".".join(map(str, torch.cuda.get_device_capability(i))),
            "memory_gb": round(torch.cuda.get_device_properties(i).total_memory / 1e9, 1),
        }
        for i in range(torch.cuda.device_count())
    ]


def _driver() -> str | None:
    try:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        done = subprocess.run(query, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.split("\n")[0].strip() or None if done.returncode == 0 else None


def _versions() -> dict[str, Any]:
    return {
        "driver": _driver(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nvidia-cutlass-dsl": version("nvidia-cutlass-dsl"),
        "apache-tvm-ffi": version("apache-tvm-ffi"),
    }


def _kernels() -> dict[str, Any]:
    try:
        runtime = str(runtime_libraries()[0])
    except KernelError as error:
        runtime = str(error)
    cache = kernel_cache()
    entries = cache.entries() if cache else []
    return {
        "target": target_arch(),
        "runtime library": runtime,
        "linker": " ".join(linker() or ["none"]),
        "cache": str(env.cache_dir() / "kernels") if cache else "not used",
        "cached": len(entries),
        "cached_bytes": sum(entry.size for entry in entries),
        "bound_bytes": env.cache_bytes(),
        "built ahead": {str(f): len(list(aot.describe(f))) for f in aot.folders()},
    }


def _tables() -> list[dict[str, Any]]:
    return [
        {
            "path": str(one.path),
            "gpu": one.gpu.name,
            "entries": len(one.entries),
            "shipped": one.shipped,
        }
        for one in table.tables(users=True)
    ]


def _configuration(direction: str, call: Call, shape: Shape) -> dict[str, Any]:
    try:
        problem = problem_of(direction, call)
    except UnsupportedError as error:
        return {"config": None, "reason": f"no kernel: {error}"}
    config, why = None, "no GPU here: the default configuration"
    if torch.cuda.is_available():
        key = TuneKey.of(direction, call, shape)
        config, _, why = select.choose(key, gpu_of(torch.cuda.current_device()), env.tune_mode())
    return {"config": (config or SPACES[direction].default(problem)).asdict(), "reason": why}


def _show(document: dict[str, Any]) -> None:
    gpus = [tuple(gpu.values()) for gpu in document["gpus"]]
    if gpus:
        show_table("GPUs", list(document["gpus"][0]), gpus)
    else:
        typer.echo("No GPU: sage.attn runs its reference implementation on CPU tensors.")
    versions = {"sage_cute": document["sage_cute"], **document["versions"]}
    show_table("Versions", ("what", "version"), [(k, v or "absent") for k, v in versions.items()])
    show_table("Kernels", ("what", "is"), list(document["kernels"].items()))
    rows = [tuple(one.values()) for one in document["tables"]]
    if rows:
        show_table("Tuning tables", list(document["tables"][0]), rows)
    else:
        typer.echo("No tuning tables: sage-cute tune makes one.")
    show_table("Supported", limits.columns(), limits.table())
    show_table("Refused", ("what, and the remedy",), [(x,) for x in limits.REFUSED.values()])
    variables = [(n, v or "", env.VARIABLES[n]) for n, v in document["environment"].items()]
    show_table("Environment", ("variable", "value", "what it is"), variables)
    call = document["call"]
    title = f"A call with {call['policy']}, shape {call['shape']}, head_dim {call['head_dim']}"
    rows = [
        (d, ", ".join(f"{k}={v}" for k, v in (one["config"] or {}).items()), one["reason"])
        for d, one in document["configurations"].items()
    ]
    show_table(title, ("direction", "configuration", "why"), rows)
