"""Deliberate breaks: each changes one marked line of the source, and a test must notice it.

A comment in the source names the breaks of its line. It is at the end of the line, or on the line
above it::

    if member.lease_until < now:  # break: lease-not-renewed

A `Break` contains the lines that replace the marked one. `Break.broken` compiles the module's file
with the changed line and sets the new code on the function around it. A mark moves with its line,
so functions can be renamed and moved to other classes and modules. If the line itself changes, its
break must be adapted. `tests/unit/test_deliberate_breaks.py` checks marks, breaks and names.
"""

from __future__ import annotations

import builtins
import dis
import functools
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

from worlds.shrink import Changes

ROOT = Path(__file__).parents[1]
SOURCES = (ROOT / "src", *sorted((ROOT / "packages").glob("*/src")))
MARK = re.compile(r"# break: ([a-z0-9-]+(?:, [a-z0-9-]+)*)$")


@dataclass(frozen=True)
class Mark:
    """A line that a break changes.

    Attributes:
        source: The folder that contains the file's package.
        path: The file.
        line: The number of the line, from 1.
    """

    source: Path
    path: Path
    line: int

    @property
    def module(self) -> str:
        parts = self.path.relative_to(self.source).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    def function(self) -> FunctionType:
        """Return the function that contains the line, without its decorators."""
        module = importlib.import_module(self.module)
        code = function_code(self.path.read_text(), str(self.path), self.line)
        thing: Any = module
        for name in code.co_qualname.split("."):
            thing = vars(thing)[name]
        if isinstance(thing, property):
            thing = thing.fget
        elif isinstance(thing, functools.cached_property):
            thing = thing.func
        function = inspect.unwrap(getattr(thing, "__func__", thing))
        assert isinstance(function, FunctionType)
        assert function.__code__ == code, f"{self.path} has changed since it was imported"
        return function


@functools.cache
def marks() -> dict[str, list[Mark]]:
    """Return all marks of the source by name. Each name must have exactly one."""
    found: dict[str, list[Mark]] = {}
    for source in SOURCES:
        for path in sorted(source.rglob("*.py")):
            for number, line in enumerate(path.read_text().splitlines(), 1):
                if match := MARK.search(line):
                    alone = line.lstrip().startswith("#")
                    for name in match[1].split(", "):
                        found.setdefault(name, []).append(Mark(source, path, number + alone))
    return found


@dataclass(frozen=True)
class Break:
    """A marked line and the lines that replace it.

    Attributes:
        mark: Its name in the source.
        becomes: Lines that replace the marked one, at its indentation; empty: it is removed. They
            end with ``if False:`` if the block below the line must be skipped.
        what: The resulting fault, in one sentence.
        changes: Makes worlds in which the fault matters more likely.
        noticed_by: The seed of a world that notices the fault.
        test: The pytest node id (in `tests`) of the fastest test that notices it, if worlds do not.
    """

    mark: str
    becomes: str
    what: str
    changes: Changes = field(default_factory=Changes)
    noticed_by: int = 0
    test: str = ""

    def compiled(self) -> tuple[FunctionType, CodeType]:
        """Return the function with the marked line, and its code with the changed line."""
        places = marks().get(self.mark, [])
        assert len(places) == 1, f"{len(places)} lines of the source have the mark {self.mark!r}"
        place = places[0]
        function = place.function()
        lines = place.path.read_text().splitlines()
        line = lines[place.line - 1]
        indent = line[: len(line) - len(line.lstrip())]
        lines[place.line - 1] = textwrap.indent(self.becomes, indent)
        code = function_code("\n".join(lines), function.__code__.co_filename, place.line)
        assert code != function.__code__, f"{self.mark!r} changes nothing"
        return function, code

    @contextmanager
    def broken(self) -> Iterator[None]:
        """Break the code for the duration of the context."""
        function, code = self.compiled()
        before, function.__code__ = function.__code__, code
        try:
            yield
        finally:
            function.__code__ = before

    def unknown_names(self) -> set[str]:
        """Return global names in the broken function that its module does not have.

        Such a break would be noticed because of its `NameError`, not because of its fault.
        """
        function, code = self.compiled()
        known = function.__globals__.keys() | vars(builtins).keys()
        return {
            str(instruction.argval)
            for each in (code, *within(code))
            for instruction in dis.get_instructions(each)
            if instruction.opname == "LOAD_GLOBAL" and instruction.argval not in known
        }


def function_code(text: str, filename: str, line: int) -> CodeType:
    """Return the code of the outermost function that contains a line."""

    def functions(code: CodeType) -> Iterator[CodeType]:
        for each in code.co_consts:
            if isinstance(each, CodeType):
                is_function = each.co_flags & inspect.CO_OPTIMIZED
                yield from (each,) if is_function else functions(each)

    module = compile(text, filename, "exec")
    begun = [each for each in functions(module) if each.co_firstlineno <= line]
    assert begun, f"{filename}:{line} is in no function"
    return max(begun, key=lambda each: each.co_firstlineno)


def within(code: CodeType) -> Iterator[CodeType]:
    """Yield the code of all functions nested in a function."""
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield each
            yield from within(each)
