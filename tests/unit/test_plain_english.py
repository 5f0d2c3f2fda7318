"""Text that people read uses plain words: pages, messages, help and docstrings.

`CONTRIBUTING.md` has the style guide. This test finds the words that the guide forbids, and long
sentences in pages. `REMAINING` lists the files that still have such words; add none to it.
"""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

FORBIDDEN = re.compile(
    r"\b(who|whom|whoever|nobody|everybody|is told|are told|tells of|is no (?!longer\b)\w+"
    r"|hand(?:s|ed)? in"
    r"|so many|goes on with|for ever|by and by|else's|how-manieth|one's own|anew)\b(?!')",
    re.IGNORECASE,
)
"""Words for persons used for processes, and turns of phrase that a reader has to translate.
"""

ALLOWED: dict[str, str] = {}
"""Files that may use these words, each with the reason."""

SENTENCE_WORDS_MAX = 30

REMAINING: dict[str, int] = {}
"""Forbidden words that are left in a file."""

LONG_SENTENCES: dict[str, int] = {}
"""Long sentences that are left in a page."""


def listed(*patterns: str) -> list[Path]:
    """The files of the repository that match, without those that are ignored."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *patterns]
    found = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    return [ROOT / name for name in found if (ROOT / name).is_file()]


PAGES = listed(
    "README.md",
    "CONTRIBUTING.md",
    "ARCHITECTURE.md",
    "SECURITY.md",
    "docs/*.md",
    "tests/README.md",
    "benchmarks/README.md",
    "packages/*/README.md",
)
SOURCES = listed("src/*.py", "packages/*.py", "examples/*.py")


def prose_of(page: Path) -> str:
    """A page without code, comments, tables and link targets."""
    text = re.sub(r"<!--.*?-->|^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    return re.sub(r"`[^`]*`", "`x`", text)


def strings_of(source: Path) -> list[tuple[int, str]]:
    """The texts of a module with spaces in them, without code, and its comments; with lines."""
    text = re.sub(r"``[^`\n]+``", "`x`", source.read_text())
    found = [
        (node.lineno, node.value)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value
    ]
    comments = re.finditer(r"(?m)(?:^|\s)# (.*)$", text)
    return found + [(text.count("\n", 0, each.start()) + 1, each[1]) for each in comments]


def sentences_of(text: str) -> list[str]:
    """The sentences of paragraphs and list items; no tables, headings, quotes and types."""
    lines = [
        "" if re.match(r"\s*(\||#|!!!|\?\?\?|:::|\*`)", line) else line
        for line in text.splitlines()
    ]
    blocks = re.split(r"\n\s*\n|\n\s*(?:[-*]|\d+\.) ", "\n".join(lines))
    return [
        each for block in blocks for each in re.split(r"(?<=[.!?:])\s+", " ".join(block.split()))
    ]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", [*PAGES, *SOURCES], ids=name_of)
def test_text_has_no_forbidden_words(path: Path) -> None:
    if path.suffix == ".md":
        lines = enumerate(prose_of(path).splitlines(), start=1)
        found = [
            f"{word}: {line.strip()[:90]}" for _, line in lines for word in FORBIDDEN.findall(line)
        ]
    else:
        found = [
            f"line {line}: {word}"
            for line, text in strings_of(path)
            for word in FORBIDDEN.findall(text)
        ]
    name = name_of(path)
    if name not in ALLOWED:
        assert len(found) <= REMAINING.get(name, 0), "\n".join(found)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_sentences_of_a_page_are_short(page: Path) -> None:
    long = [
        each
        for each in sentences_of(prose_of(page))
        if len(re.findall(r"\w\S*", each)) > SENTENCE_WORDS_MAX
    ]
    assert len(long) <= LONG_SENTENCES.get(name_of(page), 0), "\n".join(long)


def test_the_check_finds_what_it_is_for(tmp_path: Path) -> None:
    page, source = tmp_path / "page.md", tmp_path / "source.py"
    page.write_text("Who begins is told.\n\n```sh\nwho\n```\n\n" + "word " * 31 + ".\n")
    source.write_text('"""Nobody waits."""\nx = 1  # goes on for ever\ny = "who"\n')
    assert FORBIDDEN.findall(prose_of(page)) == ["Who", "is told"]
    assert [len(each.split()) > SENTENCE_WORDS_MAX for each in sentences_of(prose_of(page))][-1]
    assert [word for _, text in strings_of(source) for word in FORBIDDEN.findall(text)] == [
        "Nobody",
        "for ever",
    ]
