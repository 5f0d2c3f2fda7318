"""Hooks for MkDocs: generate pages from the code while the site is built.

These pages are never out of date, because the repository has no copies of them.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).parent / "reference"))

import commands_page
import configuration_page
import metrics_page
import scenario_page
import tape_page

GENERATED = {
    "reference/commands.md": commands_page.page,
    "reference/configuration.md": configuration_page.page,
    "reference/metrics.md": metrics_page.page,
    "reference/scenario.md": scenario_page.page,
    "reference/tape.md": tape_page.page,
}


OF_THE_CLONE = {
    "contribute/architecture.md": "ARCHITECTURE.md",
    "contribute/contributing.md": "CONTRIBUTING.md",
    "contribute/tests.md": "tests/README.md",
    "contribute/changes.md": "CHANGELOG.md",
    "contribute/benchmarks.md": "benchmarks/README.md",
}
"""Pages of the site, and the files of the clone outside of ``docs`` that they show."""


def copied(page: str, source: str, repository: str) -> str:
    """Return a file of the clone as a page: its links lead to pages or to the repository."""
    root = Path(__file__).parents[1]
    pages = {path: page for page, path in OF_THE_CLONE.items()}

    def linked(found: re.Match[str]) -> str:
        target, anchor = found[1], found[2] or ""
        if re.match(r"\w+:|#", target) or not target:
            return found[0]
        path = os.path.relpath((root / source).parent / target, root)
        if path.startswith("docs/") and path.endswith(".md"):
            place = path.removeprefix("docs/")
        else:
            place = pages.get(path, "")
        if not place:
            return f"]({repository}/blob/main/{path}{anchor})"
        return f"]({os.path.relpath(place, Path(page).parent)}{anchor})"

    text = (root / source).read_text(encoding="utf-8")
    text = re.sub(r"\]\(([^)#\s]*)(#[^)\s]*)?\)", linked, text)
    # The site loads nothing from other servers, so a picture of the repository becomes a link.
    return re.sub(r"!(\[[^\]]*\]\(https?:)", r"\1", text)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages, and the pages that show other files of the clone."""
    for path, page in GENERATED.items():
        files.append(File.generated(config, path, content=page()))
    repository = str(config.edit_uri_template).partition("/edit/")[0]
    for path, source in OF_THE_CLONE.items():
        files.append(File.generated(config, path, content=copied(path, source, repository)))
    return files
