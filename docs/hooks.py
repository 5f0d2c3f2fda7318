"""Hooks of the site's builder: pages that are made from the code while the site is built.

They cannot be out of date, because nobody keeps a copy of them.
"""

from __future__ import annotations

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


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the generated pages."""
    for path, page in GENERATED.items():
        files.append(File.generated(config, path, content=page()))
    return files
