"""What the packages import is what they declare; what users are told to install exists."""

from __future__ import annotations

import ast
import re
import runpy
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import decoupled_diloco
from decoupled_diloco.__main__ import NEEDED

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
EXTRAS = PROJECT["optional-dependencies"]
FURTHER = sorted(path.parent for path in ROOT.glob("packages/*/pyproject.toml"))


def names(requirements: list[str]) -> set[str]:
    return {canonicalize_name(Requirement(text).name) for text in requirements}


def project(folder: Path) -> dict[str, Any]:
    """What a distribution says of itself."""
    described = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    assert isinstance(described, dict)
    return described


def imported(folder: Path) -> set[str]:
    """The first names of all modules that a distribution imports, its own and others."""
    found = set()
    for path in (folder / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found.add(node.module.partition(".")[0])
    return found


@pytest.mark.parametrize("folder", [ROOT, *FURTHER], ids=lambda folder: folder.name)
def test_what_is_imported_is_declared(folder: Path) -> None:
    """Else it goes when another library no longer needs it."""
    described, own = project(folder), {each.name for each in (folder / "src").iterdir()}
    extras = described.get("optional-dependencies", {}).values()
    declared = names([*described["dependencies"], *(r for each in extras for r in each)])
    distributions = packages_distributions()
    others = imported(folder) - set(sys.stdlib_module_names) - own
    of = {
        module: {canonicalize_name(d) for d in distributions.get(module, [module])}
        for module in others
    }
    assert not {module for module, owners in of.items() if not owners & declared}


PACKAGES_MAX = 27
OF_A_GPU = ("nvidia-", "cuda-", "triton")
"""What PyTorch brings beside it where it is not the one for CPUs."""


def test_a_learner_alone_needs_few_packages() -> None:
    brought_by = runpy.run_path(str(ROOT / "deploy" / "sbom.py"))["runtime"]
    found = {PROJECT["name"]}
    for each in map(Requirement, PROJECT["dependencies"]):
        if each.marker is None or each.marker.evaluate():
            found |= {canonicalize_name(each.name), *brought_by(each.name, each.extras)}
    found = {name for name in found if not name.startswith(OF_A_GPU)}
    assert len(found) <= PACKAGES_MAX, sorted(found)
    told = " ".join((ROOT / "README.md").read_text().split())
    assert f"`pip install -e .` is enough. It installs {PACKAGES_MAX} packages" in told


def test_the_command_line_looks_for_all_that_its_extra_brings() -> None:
    owners = packages_distributions()
    looked_for = {canonicalize_name(each) for name in NEEDED for each in owners[name]}
    assert looked_for == names([*EXTRAS["cli"], *EXTRAS["metrics"]]) - {PROJECT["name"]}


@pytest.mark.parametrize("folder", FURTHER, ids=lambda folder: folder.name)
def test_all_distributions_have_the_same_version(folder: Path) -> None:
    version = decoupled_diloco.__version__
    assert project(folder)["version"] == version
    assert EXTRAS[folder.name] == [f"decoupled-diloco-{folder.name}=={version}"]
    assert f"decoupled-diloco[cli]=={version}" in project(folder)["dependencies"]


def test_transformers_is_new_enough_for_the_layouts_of_an_export() -> None:
    """Arcee, which an exported GPT is written as, came with 4.53."""
    dev = [text for text in PYPROJECT["dependency-groups"]["dev"] if isinstance(text, str)]
    for requirements in (EXTRAS["transformers"], dev):
        (wanted,) = [r for r in map(Requirement, requirements) if r.name == "transformers"]
        assert "4.53" in wanted.specifier
        assert "4.52.4" not in wanted.specifier


def named(pattern: str, text: str) -> Iterator[str]:
    """The extras in what is to be installed: one, or several with commas between them."""
    for found in re.findall(pattern, text):
        yield from found.split(",")


def test_a_command_that_installs_an_extra_works_in_a_clone() -> None:
    """The package is not published, so no text may name an installation from an index."""
    for folder in ("src", "packages", "recipes", "docs", "examples"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix not in (".py", ".toml", ".md") or path.name == "pyproject.toml":
                continue
            text = path.read_text()
            assert "'decoupled-diloco[" not in text, path
            cloned = set(named(r"-e '\.\[([a-z,]+)\]'", text))
            cloned |= set(re.findall(r"-e packages/([a-z]+)", text))
            cloned |= set(named(r"-e 'packages/[a-z]+\[([a-z,]+)\]'", text))
            assert cloned <= EXTRAS.keys(), path


def test_the_command_line_answers_before_torch_is_imported() -> None:
    code = "import sys, decoupled_diloco.cli.main; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
