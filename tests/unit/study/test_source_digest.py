"""The digest of a function changes with all of the user's code that it uses, and with no other."""

from __future__ import annotations

from pathlib import Path

import pytest

from decoupled_diloco_lab.study.functions import source_digest

MODULE = """
from functools import partial
import torch

LIMIT = 2.0
UNUSED = 1

def helper(values):
    return values.clamp(max=LIMIT)

class Base:
    def factor(self):
        return 2

class Method(Base):
    def use(self, values):
        return helper(values) * self.factor()

def rule(contributions, weights, scale=1.0):
    inner = lambda values: helper(values)
    return scale * weights @ inner(contributions)

def made(scale):
    def closure(contributions, weights):
        return scale * weights @ contributions
    return closure

method, closure, bound = Method, made(2.0), partial(rule, scale=3.0)
"""


def digests(folder: Path, text: str) -> dict[str, str]:
    path = folder / "own.py"
    path.write_text(text)
    names: dict[str, object] = {"__name__": "__main__", "__file__": str(path)}
    import linecache

    linecache.checkcache(str(path))
    exec(compile(text, str(path), "exec"), names)
    return {n: source_digest(names[n]) for n in ("rule", "method", "closure", "bound")}


@pytest.mark.parametrize(
    ("before", "after", "changed"),
    [
        ("LIMIT = 2.0", "LIMIT = 3.0", {"rule", "bound", "method"}),
        ("clamp(max=LIMIT)", "clamp(min=LIMIT)", {"rule", "bound", "method"}),
        ("return 2\n", "return 3\n", {"method"}),
        ("scale=1.0", "scale=1.5", {"rule", "bound"}),
        ("made(2.0)", "made(2.5)", {"closure"}),
        ("partial(rule, scale=3.0)", "partial(rule, scale=3.5)", {"bound"}),
        ("UNUSED = 1", "UNUSED = 2", set()),
        ("import torch", "import torch, math", set()),
    ],
)
def test_a_digest_changes_with_what_the_function_uses(
    before: str, after: str, changed: set[str], tmp_path: Path
) -> None:
    first = digests(tmp_path, MODULE)
    assert digests(tmp_path, MODULE) == first
    second = digests(tmp_path, MODULE.replace(before, after))
    assert {name for name in first if first[name] != second[name]} == changed
