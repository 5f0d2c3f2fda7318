"""The bill of materials lists what an installation contains, with versions and licenses."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("sbom", ROOT / "deploy" / "sbom.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def bill(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("sbom") / "dist" / "sbom.json"
    command = [sys.executable, str(ROOT / "deploy" / "sbom.py"), str(out), "--extras", "tls"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def test_each_runtime_dependency_has_its_version_and_a_license(
    tool: ModuleType, bill: dict[str, Any]
) -> None:
    listed = {canonicalize_name(each["name"]): each for each in bill["components"]}
    direct = {"torch", "numpy", "aiohttp", "pydantic", "safetensors", "cryptography"}
    assert direct <= listed.keys()
    assert {"frozenlist", "cffi", "sympy"} <= listed.keys(), "their dependencies are listed too"
    assert listed.keys() == tool.runtime("decoupled-diloco", ["tls"])
    for name, component in listed.items():
        assert component["version"] == version(name)
        assert tool.licenses_of(component), name


def test_development_dependencies_are_not_listed(bill: dict[str, Any]) -> None:
    names = {canonicalize_name(each["name"]) for each in bill["components"]}
    assert not names & {"pytest", "mypy", "ruff", "hypothesis", "transformers", "cyclonedx-bom"}
    assert bill["bomFormat"] == "CycloneDX"


@pytest.mark.smoke
def test_unexpected_licenses_are_rejected(tool: ModuleType) -> None:
    def of(*told: str) -> str:
        problem: str = tool.problem_of(
            {"name": "a", "licenses": [{"license": {"id": each}} for each in told]}
        )
        return problem

    assert of("MIT") == of("Apache-2.0 OR GPL-2.0-only") == of("LGPL-3.0-only") == ""
    assert "under GPL-3.0-only" in of("MIT", "GPL-3.0-only")
    assert "under AGPL-3.0" in of("AGPL-3.0")
    assert "has no license metadata" in of()
