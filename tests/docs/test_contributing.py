"""The files, folders, make targets and names in CONTRIBUTING.md exist."""

from __future__ import annotations

import re

import pytest

from docs.snippets import ROOT

TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
PATHS = sorted(
    set(re.findall(r"`((?:src|packages|tests|docs|recipes|benchmarks)(?:/[\w.-]+)*)`", TEXT))
    | set(re.findall(r"\]\(([^)#:]+)\)", TEXT))
)
NAMES = {
    "src/decoupled_diloco/merge/codec.py": ("class Codec", "def register_codec", "def group"),
    "src/decoupled_diloco/workloads/workload.py": ("class Workload",),
    "src/decoupled_diloco/workloads/__init__.py": ("OF_THE_LAB", "decoupled_diloco.workloads"),
    "packages/lab/src/decoupled_diloco_lab/workloads/vit.py": ("class VitOptions",),
    "src/decoupled_diloco/config/sync.py": ("uplink", "downlink"),
    "src/decoupled_diloco/protocol/syncer_machine.py": ("def handle", "def check", "def snapshot"),
    "src/decoupled_diloco/protocol/learner_machine.py": ("def handle", "def check", "def snapshot"),
    "src/decoupled_diloco/protocol/coordinator_machine.py": (
        "def handle",
        "def check",
        "def snapshot",
    ),
}
"""Texts that a step names, with their files."""


def test_the_page_names_many_files() -> None:
    assert len(PATHS) > 30


@pytest.mark.parametrize("path", PATHS)
def test_named_files_exist(path: str) -> None:
    assert (ROOT / path).exists()


@pytest.mark.parametrize("path", NAMES)
def test_searched_texts_exist_in_their_files(path: str) -> None:
    assert f"`{path}`" in TEXT
    text = (ROOT / path).read_text(encoding="utf-8")
    assert [name for name in NAMES[path] if name not in text] == []


def test_every_folder_of_tests_is_described() -> None:
    folders = {f"tests/{p.name}" for p in (ROOT / "tests").iterdir() if any(p.glob("**/test_*.py"))}
    assert {f for f in folders if f"`{f}`" not in TEXT} == set()


def test_named_make_targets_exist() -> None:
    targets = set(re.findall(r"\bmake ([a-z-]+)", TEXT))
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert {t for t in targets if not re.search(rf"^{t}:", makefile, re.MULTILINE)} == set()


def test_no_test_imports_another_test() -> None:
    imported = re.compile(r"^ *(?:from|import) [\w.]*\btest_\w+|^ *from \S+ import test_", re.M)
    files = sorted((ROOT / "tests").rglob("*.py"))
    found = [(path, each) for path in files for each in imported.findall(path.read_text())]
    assert not found
