"""A bill of materials (CycloneDX) of what an installation brings, and a check of its licences.

    python deploy/sbom.py dist/sbom.json
    python deploy/sbom.py dist/sbom.json --extras tls kubernetes

`cyclonedx-py` describes this whole environment; kept is what the package needs at run time, with
the extras that are named: exactly the versions that the tests have run with.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
NAME = "decoupled-diloco"

COPYLEFT = re.compile(r"\b(A?GPL|SSPL|EUPL|CC-BY-NC|BUSL)", re.IGNORECASE)
"""Licences that a user of an Apache-2.0 package does not expect. LGPL and MPL are let be: they bind
changes of the library alone."""

TOLD_ELSEWHERE = {
    "protobuf": "BSD-3-Clause",
    "pysocks": "BSD-3-Clause",
    "transformers": "Apache-2.0",
}
"""Licences of packages whose metadata names none; their repositories do."""


def runtime(name: str, extras: Iterable[str] = ()) -> set[str]:
    """The distributions that an installation of this one brings, by their canonical names."""
    found: dict[str, set[str]] = {}
    todo = [(canonicalize_name(name), frozenset(extras))]
    while todo:
        each, wanted = todo.pop()
        if each in found and wanted <= found[each]:
            continue
        found.setdefault(each, set()).update(wanted)
        for text in distribution(each).requires or ():
            requirement = Requirement(text)
            marker = requirement.marker
            environments = [{"extra": extra} for extra in (*found[each], "")]
            if marker is None or any(map(marker.evaluate, environments)):
                todo.append((canonicalize_name(requirement.name), frozenset(requirement.extras)))
    return set(found) - {canonicalize_name(name)}


def described() -> dict[str, Any]:
    """What `cyclonedx-py` finds in this environment."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "sbom.json"
        command = [sys.executable, "-m", "cyclonedx_py", "environment", "--output-reproducible"]
        told = ["--short-PURLs", "--pyproject", str(ROOT / "pyproject.toml"), "--of", "JSON"]
        subprocess.run(
            [*command, *told, "-o", str(file), sys.executable], check=True, capture_output=True
        )
        found: dict[str, Any] = json.loads(file.read_text())
    return found


def bill_of(extras: Iterable[str] = ()) -> dict[str, Any]:
    """The bill of an installation with these extras.

    Raises:
        SystemExit: A licence is missing, or is none that is expected.
    """
    bill, wanted = described(), runtime(NAME, extras)
    kept = [c for c in bill["components"] if canonicalize_name(c["name"]) in wanted]
    for component in kept:
        name = canonicalize_name(component["name"])
        if name in TOLD_ELSEWHERE and not component.get("licenses"):
            component["licenses"] = [{"license": {"id": TOLD_ELSEWHERE[name]}}]
    references = {c["bom-ref"] for c in kept} | {bill["metadata"]["component"]["bom-ref"]}
    bill["components"] = kept
    bill["dependencies"] = [
        {**each, "dependsOn": [d for d in each.get("dependsOn", ()) if d in references]}
        for each in bill["dependencies"]
        if each["ref"] in references
    ]
    missing = wanted - {canonicalize_name(c["name"]) for c in kept}
    problems = [f"{name} is not in this environment" for name in sorted(missing)]
    problems += [text for component in kept if (text := problem_of(component))]
    if problems:
        raise SystemExit("\n".join(problems))
    return bill


def licences_of(component: dict[str, Any]) -> list[str]:
    """The licences of a component, as it tells them."""
    told = [each.get("license", each) for each in component.get("licenses", ())]
    return [each.get("expression") or each.get("id") or each.get("name") for each in told]


def problem_of(component: dict[str, Any]) -> str:
    """What is wrong with a component's licence; nothing, if nothing is."""
    told = licences_of(component)
    if not told:
        return f"{component['name']} tells no licence: look it up, and add it to TOLD_ELSEWHERE"
    bad = [each for each in told if COPYLEFT.search(each) and " OR " not in each]
    return f"{component['name']} is under {bad[0]}: replace it, or say why not" if bad else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--extras", nargs="*", default=[])
    arguments = parser.parse_args()
    bill = bill_of(arguments.extras)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(bill, indent=1) + "\n")
    print(f"{arguments.out}: {len(bill['components'])} packages, a licence of each")


if __name__ == "__main__":
    main()
