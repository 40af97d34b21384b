"""Result files: where they lie, and what each says about where its figures come from."""

from __future__ import annotations

import json
import math
import platform
import re
import shlex
import sys
from collections.abc import Iterable
from datetime import date
from pathlib import Path
from typing import Any

import torch

import sage_cute
from sage_cute.policies import canonical, resolve

RESULTS = Path(__file__).resolve().parent / "results"


def meta(module: str, device: str, policies: Iterable[str]) -> dict[str, Any]:
    """Device, versions, date, the command that ran, and the mix of every policy."""
    return {
        "device": device_name(device),
        "torch": torch.__version__,
        "sage_cute": sage_cute.__version__,
        "python": platform.python_version(),
        "date": date.today().isoformat(),
        "command": shlex.join(["python", "-m", module, *sys.argv[1:]]),
        "policies": {p: f"{canonical(p)}: {resolve(p)}" for p in policies},
    }


def source(meta: dict[str, Any]) -> str:
    """Where figures come from, for the line under a table."""
    return (
        f"`{meta['command']}` on {meta['device']}, torch {meta['torch']}, "
        f"sage-cute {meta['sage_cute']}, {meta['date']}."
    )


def device_name(device: str) -> str:
    """The GPU's product name, or that it is a CPU."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU ({platform.machine()})"


def device_slug(device: str) -> str:
    """The device in a file's name."""
    if torch.device(device).type == "cpu":
        return "cpu"
    return re.sub(r"\W+", "_", device_name(device)).strip("_").lower()


def save(name: str, document: dict[str, Any], device: str, folder: Path | None = None) -> Path:
    """Writes NAME-DEVICE.json into the folder (default: bench/results); returns its path."""
    path = (folder or RESULTS) / f"{name}-{device_slug(device)}.json"
    write_json(document, path)
    return path


def write_json(document: dict[str, Any], path: Path) -> None:
    """Writes a document whole or not at all, its floats to seven digits."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(rounded(document), indent=1, allow_nan=False) + "\n")
    partial.replace(path)


def rounded(value: Any) -> Any:
    """The same document with seven significant digits; figures that are not finite become None."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.7g}") if math.isfinite(value) else None
    return value
