"""Write the pages of the reference that are made from the code; a test compares them.

python docs/reference/generate.py
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import commands_page
import configuration_page
import metrics_page
import scenario_page
import tape_page

PAGES: dict[str, Callable[[], str]] = {
    "commands.md": commands_page.page,
    "configuration.md": configuration_page.page,
    "metrics.md": metrics_page.page,
    "scenario.md": scenario_page.page,
    "tape.md": tape_page.page,
}

if __name__ == "__main__":
    for name, page in PAGES.items():
        Path(__file__).with_name(name).write_text(page().rstrip() + "\n", encoding="utf-8")
