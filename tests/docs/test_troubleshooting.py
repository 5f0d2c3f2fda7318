"""The messages on the troubleshooting page exist in the source."""

from __future__ import annotations

import ast
import re

import pytest

from docs.snippets import ROOT

PAGE = ROOT / "docs" / "troubleshooting.md"
MESSAGES = re.findall(r"^\| `([^`]+)` \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)


@pytest.fixture(scope="module")
def texts() -> str:
    """Return every text in the source; values in f-strings and log messages are ``…``."""
    found = []
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = (v.value if isinstance(v, ast.Constant) else "…" for v in node.values)
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(re.sub(r"%[sdrg]|%\.\df", "…", node.value))
    return "\n".join(found)


def test_the_page_lists_messages() -> None:
    assert len(MESSAGES) >= 22
    assert len(set(MESSAGES)) == len(MESSAGES)


@pytest.mark.parametrize("message", MESSAGES)
def test_each_message_exists(message: str, texts: str) -> None:
    assert message in texts
