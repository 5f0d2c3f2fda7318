"""The site builds without warnings, has no dead links, and fetches nothing from other sites."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

from decoupled_diloco.config import RunConfig
from docs.snippets import GENERATED, ROOT

FETCHED = {("script", "src"), ("img", "src"), ("iframe", "src"), ("source", "src")}


class Page(HTMLParser):
    """The links and anchors of a built page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.fetched: set[str] = set()
        self.anchors: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.anchors |= {value for key in ("id", "name") if (value := values.get(key))}
        if tag == "a" and (target := values.get("href")):
            self.links.add(target)
        if tag == "link" and values.get("rel") != "canonical" and (target := values.get("href")):
            self.fetched.add(target)
        self.fetched |= {v for (k, v) in attrs if (tag, k) in FETCHED and v is not None}


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {path: Page(path) for path in site.rglob("*.html") if path.name != "404.html"}


def test_every_link_has_a_target(site: Path, pages: dict[Path, Page]) -> None:
    wrong = []
    for path, page in pages.items():
        for link in page.links | page.fetched:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            known = pages.get(target)
            missing = parts.fragment and known and unquote(parts.fragment) not in known.anchors
            if not target.exists() or missing:
                wrong.append(f"{path.relative_to(site)}: {link}")
    assert not wrong


def test_the_pages_fetch_nothing_from_other_sites(site: Path, pages: dict[Path, Page]) -> None:
    outside = {f for page in pages.values() for f in page.fetched if urlsplit(f).netloc}
    for style in site.rglob("*.css"):
        text = style.read_text(encoding="utf-8")
        outside |= set(re.findall(r"url\(\s*['\"]?((?:https?:)?//[^)'\"]+)", text))
    assert not outside


def test_every_page_is_in_the_navigation(site: Path) -> None:
    """Readers cannot find a page that is not in the navigation."""
    navigation = (ROOT / "mkdocs.yml").read_text()
    for path in (ROOT / "docs").rglob("*.md"):
        assert str(path.relative_to(ROOT / "docs")) in navigation
    assert not list(site.rglob("*.py"))


def settings(model: Any = RunConfig, above: str = "") -> Iterator[str]:
    """Yield the dotted names of all tables and their keys."""
    for key, field in model.model_fields.items():
        yield f"{above}{key}"
        kinds = [field.annotation, *getattr(field.annotation, "__args__", ())]
        for inner in (each for each in kinds if hasattr(each, "model_fields")):
            yield from settings(inner, f"{above}{key}.")


def test_every_setting_and_record_is_documented(site: Path) -> None:
    configuration = Page(site / "reference" / "configuration.html")
    assert set(settings()) <= configuration.anchors
    tape = Page(site / "reference" / "tape.html")
    assert {"StepFinished", "RoundFinished", "LossMeasured", "StepReport"} <= tape.anchors


def loaded(script: Path) -> ModuleType:
    """Import a script that is not in a package."""
    spec = importlib.util.spec_from_file_location(script.stem, script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_pictures_match_their_scripts() -> None:
    script = ROOT / "docs" / "pictures" / "draw.py"
    for name, draw in loaded(script).PICTURES.items():
        picture = (script.parent / name).read_text(encoding="utf-8")
        assert picture == draw(), "run: python docs/pictures/draw.py"


def test_the_generated_pages_match_the_code() -> None:
    script = ROOT / "docs" / "reference" / "generate.py"
    pages = loaded(script).PAGES
    assert {script.with_name(name) for name in pages} == GENERATED
    for name, page in pages.items():
        text = script.with_name(name).read_text(encoding="utf-8")
        assert text == page().rstrip() + "\n", "run: python docs/reference/generate.py"
