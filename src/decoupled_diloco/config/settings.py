"""Frozen settings with errors for people: the base of every configuration table.

A table of a TOML file becomes one `Settings` object. Whatever is wrong with it is told as one
`ConfigError`, a line per mistake: the key, its value, the limit and the way out; never a pydantic
traceback. A setting that would be ignored is a mistake too, so that a file never claims something
that the run does not do.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Literal, NoReturn, get_args, get_origin

from pydantic import (
    BaseModel,
    ConfigDict,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)
from pydantic_core import ErrorDetails

from decoupled_diloco.errors import ConfigError

SHOWN_CHARACTERS = 400
"""So much of a value that is wrong is repeated."""

_RANGE_WORDS = {
    "greater_than_equal": ("ge", "at least"),
    "greater_than": ("gt", "greater than"),
    "less_than_equal": ("le", "at most"),
    "less_than": ("lt", "less than"),
}
_TYPE_WORDS = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "text in quotes",
    "path_type": "a path in quotes",
    "dict_type": "a table",
    "model_type": "a table",
    "list_type": "a list",
    "tuple_type": "a list",
}


class Settings(BaseModel):
    """One table of the configuration: frozen, strict, every field documented by its docstring."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        hide_input_in_errors=True,
    )

    table: ClassVar[str] = ""
    """How messages name this table, as it is written in the file."""

    renamed: ClassVar[Mapping[str, str]] = {}
    """Keys of earlier versions, and what they are called now."""

    def __init__(self, **data: Any) -> None:
        try:
            super().__init__(**data)
        except ValidationError as error:
            _refuse(type(self), error)

    def inapplicable(self) -> Mapping[str, str]:
        """The fields that the other settings of this table make pointless, each with the reason."""
        return {}

    @model_serializer(mode="wrap")
    def _tell_what_has_an_effect(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Without what is pointless, which would be refused where it is read back, or not set."""
        pointless = self.inapplicable()
        told = dump(self).items()
        return {name: v for name, v in told if v not in (None, (), []) and name not in pointless}

    @model_validator(mode="after")
    def _refuse_what_would_be_ignored(self) -> Settings:
        for name, reason in self.inapplicable().items():
            value = getattr(self, name)
            if name in self.model_fields_set and value not in (None, (), {}):
                raise ConfigError(
                    f"{name}={value!r} in {self.table} would be ignored {reason}: take {name} out"
                )
        return self


_OWN = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*", re.ASCII)


def is_own(name: str) -> bool:
    """Whether a name is of the form ``"module:function"``.

    >>> is_own("my.codecs:sign"), is_own("sign"), is_own("my codecs:sign")
    (True, False, False)
    """
    return _OWN.fullmatch(name) is not None


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that was probably meant, or None when none is near.

    >>> nearest("quorom", ["quorum", "period"])
    'quorum'
    """
    matches = difflib.get_close_matches(word, list(known), n=1)
    return matches[0] if matches else None


def suggestion(word: str, known: Iterable[str]) -> str:
    """The way out of an unknown word: the nearest known one, or all of them.

    >>> suggestion("quorom", ["quorum", "period"]), suggestion("x", ["quorum", "period"])
    ("did you mean 'quorum'?", "choose one of 'quorum', 'period'")
    """
    known = list(known)
    match = nearest(word, known)
    if match is not None:
        return f"did you mean {match!r}?"
    return "choose one of " + ", ".join(repr(name) for name in known)


def _refuse(model: type[Settings], error: ValidationError) -> NoReturn:
    found = error.errors(include_url=False)
    lines = [_explain(model, details) for details in found if _is_meant(details, found)]
    raise ConfigError("\n".join(dict.fromkeys(lines))) from None


def _is_meant(details: ErrorDetails, found: list[ErrorDetails]) -> bool:
    """Where one value or a list may be written: whether this is about what was written."""
    others = [each for each in found if each["loc"][:1] == details["loc"][:1]]
    inside = [each for each in others if any(isinstance(key, int) for key in each["loc"])]
    return details in inside if inside else len(others) == 1 or details["type"] != "tuple_type"


def _explain(model: type[Settings], details: ErrorDetails) -> str:
    """One mistake in one sentence."""
    kind, context = details["type"], details.get("ctx", {})
    key = str(details["loc"][0]) if details["loc"] else ""
    value = details.get("input")
    subject = f"{key}={shown(value)}" + (f" in {model.table}" if model.table else "")
    if kind == "extra_forbidden":
        return _explain_unknown(model, key, isinstance(value, dict | list))
    if kind == "missing" and isinstance(details["loc"][-1], int):
        return f"{subject} is too short: it needs {details['loc'][-1] + 1} values or more"
    if kind == "missing":
        return f"{model.table or 'the file'} lacks {key!r}: add it"
    if kind in _RANGE_WORDS:
        limit, words = _RANGE_WORDS[kind]
        return f"{subject} is out of range: it must be {words} {context[limit]}"
    if kind == "literal_error":
        word = value if isinstance(value, str) else shown(value)
        return f"{subject} is not known: {suggestion(word, _choices(model, key))}"
    if kind in _TYPE_WORDS:
        return f"{subject} is not {_TYPE_WORDS[kind]}: write it as one"
    if kind == "string_pattern_mismatch":
        return f"{subject} has a character that does not fit: it must match {context['pattern']}"
    return f"{subject} does not fit: {details['msg']}"


def shown(value: object) -> str:
    """The beginning of a value; Python refuses to write out a number of thousands of digits."""
    try:
        text = repr(value)
    except ValueError:
        return "a number of thousands of digits"
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}…"


def _explain_unknown(model: type[Settings], key: str, is_table: bool) -> str:
    known = list(model.model_fields)
    if key in model.renamed:
        return f"{key!r} in {model.table} is called {model.renamed[key]!r} now: rename it"
    if model.table:
        return f"unknown key {key!r} in {model.table}: {suggestion(key, known)}"
    what = "table" if is_table else "key"
    return f"unknown {what} {key!r}: {suggestion(key, known)}"


def _choices(model: type[Settings], key: str) -> list[str]:
    return _words_of(model.model_fields[key].annotation)


def _words_of(annotation: Any) -> list[str]:
    """The words of a `Literal`, also of one in a union or a list."""
    if get_origin(annotation) is Literal:
        return [str(choice) for choice in get_args(annotation)]
    return list(dict.fromkeys(word for each in get_args(annotation) for word in _words_of(each)))
