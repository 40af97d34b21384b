"""The wheel holds every package, once, and the mapped folders import under one name only."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomllib")

ROOT = Path(__file__).resolve().parents[2]
MAPPED = {
    "templates": "sage_cute.templates",
    "compile_integration": "sage_cute.compile_integration",
}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def packages_on_disk() -> dict[str, Path]:
    """Every package of the repository: its dotted name and its folder."""
    found = {}
    for top, name in {"sage_cute": "sage_cute", **MAPPED}.items():
        for init in (ROOT / top).rglob("__init__.py"):
            relative = init.parent.relative_to(ROOT / top)
            found[".".join((name, *relative.parts))] = init.parent
    return found


def test_the_package_list_is_what_is_on_disk() -> None:
    assert sorted(PROJECT["tool"]["setuptools"]["packages"]) == sorted(packages_on_disk())


def test_every_module_is_in_a_package() -> None:
    folders = {path.parent for top in ("sage_cute", *MAPPED) for path in (ROOT / top).rglob("*.py")}
    assert folders == set(packages_on_disk().values())


def test_tests_are_no_package() -> None:
    # tests/.../__init__.py next to a folder called sage_cute would shadow the real package.
    assert not list((ROOT / "tests").rglob("__init__.py"))


@pytest.mark.parametrize("folder", MAPPED)
def test_a_second_copy_under_the_folders_name_refuses_to_import(folder) -> None:
    result = subprocess.run(
        [sys.executable, "-c", f"import {folder}"], cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode and f"import sage_cute.{folder}" in result.stderr


def test_the_wheel_installs_sage_cute_alone(tmp_path) -> None:
    tree = tmp_path / "tree"  # a build leaves its own folder behind, whose stale files it takes up
    for folder in ("sage_cute", *MAPPED):
        shutil.copytree(ROOT / folder, tree / folder)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path]
    subprocess.run([*command, tree], check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = [n for n in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in n]
    assert {n.split("/")[0] for n in names} == {"sage_cute"}
    expected = {"sage_cute/py.typed"}
    for package, folder in packages_on_disk().items():
        base = package.replace(".", "/")
        expected |= {f"{base}/{path.name}" for path in folder.glob("*.py")}
    assert expected <= set(names)
    # And it runs from there: nothing of the repository is needed.
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    code = (
        "import sage_cute, torch; q = torch.ones(1, 1, 4, 8); print(sage_cute.__file__);"
        "print(torch.ops.sage.attn(q, q, q).shape)"
    )
    result = subprocess.run(
        [sys.executable, "-S", "-c", f"import sys; sys.path[:0] = {paths(tmp_path)!r}; {code}"],
        cwd=tmp_path,
        check=True,
        capture_output=True,
        text=True,
    )
    assert str(tmp_path / "site") in result.stdout and "torch.Size([1, 1, 4, 8])" in result.stdout


def paths(tmp_path: Path) -> list[str]:
    """The unpacked wheel, then what is installed here beside this project."""
    site = [p for p in sys.path if p.endswith("site-packages")]
    return [str(tmp_path / "site"), *site]
