"""Hooks of the site's builder: files of the clone outside of `docs` become pages."""

from __future__ import annotations

import os
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

OF_THE_CLONE = {
    "contribute/architecture.md": "ARCHITECTURE.md",
    "contribute/contributing.md": "CONTRIBUTING.md",
    "contribute/tests.md": "tests/README.md",
    "contribute/changes.md": "CHANGELOG.md",
    "contribute/benchmarks.md": "benchmarks/README.md",
}
"""Pages of the site that are files of the clone outside of ``docs``."""


def copied(page: str, source: str, repository: str) -> tuple[str, dict[str, Path]]:
    """Return a file of the clone as a page, and the pictures that it shows.

    Its links lead to pages or to the repository.
    """
    root = Path(__file__).parents[1]
    pages = {path: page for page, path in OF_THE_CLONE.items()}
    pictures: dict[str, Path] = {}

    def linked(found: re.Match[str]) -> str:
        target, anchor = found[1], found[2] or ""
        if re.match(r"\w+:|#", target) or not target:
            return found[0]
        path = os.path.relpath((root / source).parent / target, root)
        if path.startswith("docs/"):
            place = path.removeprefix("docs/")
        elif path.endswith((".png", ".svg")):
            place = f"contribute/{path}"
            pictures[place] = root / path
        else:
            place = pages.get(path, "")
        if not place:
            return f"]({repository}/blob/main/{path}{anchor})"
        return f"]({os.path.relpath(place, Path(page).parent)}{anchor})"

    text = (root / source).read_text(encoding="utf-8")
    return re.sub(r"\]\(([^)#\s]*)(#[^)\s]*)?\)", linked, text), pictures


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add these pages."""
    repository = str(config.edit_uri_template).partition("/edit/")[0]
    for page, source in OF_THE_CLONE.items():
        text, pictures = copied(page, source, repository)
        files.append(File.generated(config, page, content=text))
        for place, picture in pictures.items():
            files.append(File.generated(config, place, abs_src_path=str(picture)))
    return files
