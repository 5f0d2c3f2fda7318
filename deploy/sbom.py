"""Software bill of materials (CycloneDX) of an installation, with a check of its licenses.

    python deploy/sbom.py dist/sbom.json
    python deploy/sbom.py dist/sbom.json --extras tls kubernetes

`cyclonedx-py` describes this whole environment. The bill keeps only what the package needs at run
time, with the named extras, in exactly the versions that the tests ran with.
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
"""Licenses that a user of an Apache-2.0 package does not expect. LGPL and MPL are accepted, because
they apply only to changes of the library itself."""

LICENSES = {
    "protobuf": "BSD-3-Clause",
    "pysocks": "BSD-3-Clause",
    "transformers": "Apache-2.0",
}
"""Licenses of packages without license metadata, from their repositories."""


def runtime(name: str, extras: Iterable[str] = ()) -> set[str]:
    """Return the canonical names of the distributions that an installation of `name` brings."""
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
    """Return the bill of this environment from `cyclonedx-py`."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "sbom.json"
        command = [sys.executable, "-m", "cyclonedx_py", "environment", "--output-reproducible"]
        options = ["--short-PURLs", "--pyproject", str(ROOT / "pyproject.toml"), "--of", "JSON"]
        subprocess.run(
            [*command, *options, "-o", str(file), sys.executable], check=True, capture_output=True
        )
        found: dict[str, Any] = json.loads(file.read_text())
    return found


def bill_of(extras: Iterable[str] = ()) -> dict[str, Any]:
    """Return the bill of an installation with these extras.

    Raises:
        SystemExit: A license is missing or unexpected, or a package is not installed.
    """
    bill, wanted = described(), runtime(NAME, extras)
    kept = [c for c in bill["components"] if canonicalize_name(c["name"]) in wanted]
    for component in kept:
        name = canonicalize_name(component["name"])
        if name in LICENSES and not component.get("licenses"):
            component["licenses"] = [{"license": {"id": LICENSES[name]}}]
    references = {c["bom-ref"] for c in kept} | {bill["metadata"]["component"]["bom-ref"]}
    bill["components"] = kept
    bill["dependencies"] = [
        {**each, "dependsOn": [d for d in each.get("dependsOn", ()) if d in references]}
        for each in bill["dependencies"]
        if each["ref"] in references
    ]
    missing = wanted - {canonicalize_name(c["name"]) for c in kept}
    problems = [f"{name} is not installed in this environment" for name in sorted(missing)]
    problems += [text for component in kept if (text := problem_of(component))]
    if problems:
        raise SystemExit("\n".join(problems))
    return bill


def licenses_of(component: dict[str, Any]) -> list[str]:
    """Return the licenses in a component's metadata."""
    found = [each.get("license", each) for each in component.get("licenses", ())]
    return [each.get("expression") or each.get("id") or each.get("name") for each in found]


def problem_of(component: dict[str, Any]) -> str:
    """Return the problem with a component's license, or an empty string."""
    licenses = licenses_of(component)
    if not licenses:
        return f"{component['name']} has no license metadata: look it up, and add it to LICENSES"
    bad = [each for each in licenses if COPYLEFT.search(each) and " OR " not in each]
    return f"{component['name']} is under {bad[0]}: replace it, or accept it here" if bad else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--extras", nargs="*", default=[])
    arguments = parser.parse_args()
    bill = bill_of(arguments.extras)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(bill, indent=1) + "\n")
    print(f"{arguments.out}: {len(bill['components'])} packages, all with licenses")


if __name__ == "__main__":
    main()
