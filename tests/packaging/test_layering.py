"""Imports go one way: numerics below everything, kernels behind compile, integration on top."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Of sage_cute, what each layer may import beside itself; and whether torch or cutlass.
LAYERS: dict[str, tuple[set[str], set[str]]] = {
    "errors": (set(), set()),
    "_version": (set(), set()),
    "policies": ({"errors"}, set()),
    "numerics": ({"policies"}, {"torch"}),
    "limits": ({"policies"}, set()),
    "config": ({"policies", "limits"}, set()),
    "env": ({"errors"}, set()),
    "templates": ({"config", "errors", "limits"}, {"cutlass"}),
    "compile": (
        {"config", "templates", "policies", "limits", "errors", "env", "_version"},
        {"cutlass", "torch"},
    ),
    "tune": ({"compile", "config", "numerics", "policies", "errors", "env"}, {"torch"}),
    "support": ({"limits", "errors", "policies"}, {"torch"}),
    "merge": ({"errors"}, {"torch"}),
    "compile_integration": (
        {"compile", "tune", "numerics", "policies", "support", "limits", "errors", "_version", ""},
        {"torch"},
    ),
    "api": ({"compile_integration", "errors", "limits", "support"}, {"torch"}),
    "nn": ({"api", "errors", "policies", "support"}, {"torch"}),
    "testing": ({"api", "numerics", "policies", ""}, {"torch"}),
    "training": ({"nn", "policies", "support", "errors", "_version"}, {"torch"}),
    "diagnosis": (
        {"testing", "numerics", "policies", "support", "errors", "_version"},
        {"torch"},
    ),
    "verify": ({"numerics", "testing"}, {"torch"}),
    "cli": (
        {"training", "tune", "compile", "config", "policies", "numerics", "testing", "verify"}
        | {"api", "diagnosis", "env", "errors", "limits", "_version"},
        {"torch"},
    ),
}
WATCHED = {"torch", "cutlass", "cuda", "tvm_ffi"}


def modules() -> list[tuple[str, Path]]:
    """(layer, file) of every module but the front door."""
    found = []
    for top in ("sage_cute", "templates", "compile_integration"):
        for path in sorted((ROOT / top).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            layer = parts[1] if top == "sage_cute" else top
            if top != "sage_cute" or layer not in ("__init__", "__main__"):
                found.append((layer, path))
    return found


def imports(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: relative import"
            names |= {
                f"{node.module}.{a.name}" if node.module == "sage_cute" else str(node.module)
                for a in node.names
            }
    return names


@pytest.mark.parametrize(("layer", "path"), modules(), ids=lambda x: getattr(x, "name", x))
def test_imports_point_down(layer, path) -> None:
    assert layer in LAYERS, f"{path}: give the new layer a place in LAYERS"
    allowed, libraries = LAYERS[layer]
    for name in imports(path):
        if name.split(".")[0] == "sage_cute":
            target = (*name.split("."), "")[1]
            assert target in allowed | {layer}, f"{path} imports {name}"
        elif name.split(".")[0] in WATCHED:
            library = "cutlass" if name.split(".")[0] in ("cuda", "tvm_ffi") else name.split(".")[0]
            assert library in libraries, f"{path} imports {name}"
