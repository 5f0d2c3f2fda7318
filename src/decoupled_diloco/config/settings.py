"""Frozen settings with readable errors: the base of every configuration table.

A table of a TOML file becomes one `Settings` object. Its mistakes become one `ConfigError`, with
one line per mistake: the key, its value, the allowed range and the fix. Pydantic's own messages are
never shown. A setting that would be ignored is a mistake, too: a file describes exactly what the
run does.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import reduce
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NoReturn, get_args, get_origin

from pydantic import (
    BaseModel,
    ConfigDict,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)
from pydantic_core import ErrorDetails

from decoupled_diloco.config.addresses import is_url
from decoupled_diloco.config.renamed import sentence_for
from decoupled_diloco.errors import ConfigError

SHOWN_CHARACTERS = 400
"""A message repeats at most this many characters of a wrong value."""

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
    "string_type": "text in quotes",
    "path_type": "a path in quotes",
    "dict_type": "a table",
    "model_type": "a table",
    "list_type": "a list",
    "tuple_type": "a list",
}
NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
"""Pattern of a name that becomes a part of paths."""

MODULE = r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$"
"""Pattern of the name of a Python module."""

OWN = r"^[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*:[A-Za-z_][A-Za-z0-9_]*$"
"""Pattern of the name of a custom method, ``"module:function"``."""

_PATTERN_WORDS = {
    NAME: "use letters, digits, '.', '_' and '-', and begin with a letter or a digit",
    MODULE: "write the name of a module, such as my_package.codecs",
    OWN: "write it as 'module:function'",
}


def refuse_url(argument: str, path: str | os.PathLike[str]) -> None:
    """Raise `ConfigError` if a path is a URL, which would become a local folder of that name."""
    if is_url(str(path)):
        raise ConfigError(
            f"{argument} is a URL: use a local or mounted folder; [run] store mirrors a run to an "
            "object store"
        )


class Settings(BaseModel):
    """One table of the configuration: frozen and strict. The docstring of a field documents it."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        hide_input_in_errors=True,
    )

    table: ClassVar[str] = ""
    """The table as it is written in the file, for messages."""

    def __init__(self, **data: Any) -> None:
        try:
            super().__init__(**data)
        except ValidationError as error:
            _refuse(type(self), error)

    def inapplicable(self) -> Mapping[str, str]:
        """The fields that have no effect beside the other settings, each with the reason.

        A field of a table inside this one is written with a dot: `"merge.norm_gate"`.
        """
        return {}

    @model_serializer(mode="wrap")
    def _keep_what_has_an_effect(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leaves out what is not set and what has no effect, which a reader would refuse."""
        kept = {name: value for name, value in dump(self).items() if value not in (None, (), [])}
        for name in self.inapplicable():
            inner, *names = kept, *name.split(".")
            for table in names[:-1]:
                inner = inner.get(table, {})
            inner.pop(names[-1], None)
        return kept

    @model_validator(mode="after")
    def _refuse_unusable_texts(self) -> Settings:
        for key in self.model_fields_set:
            value = getattr(self, key)
            texts = [
                str(each)
                for each in (value if isinstance(value, tuple) else (value,))
                if isinstance(each, str | Path)
            ]
            if not texts:
                continue
            place = f" in {self.table}" if self.table else ""
            subject = f"{key}={shown(str(value) if isinstance(value, Path) else value)}{place}"
            if any("\0" in text for text in texts):
                raise ConfigError(f"{subject} has the character NUL: take it out")
            if isinstance(value, Path):
                refuse_url(subject, value)
        return self

    @model_validator(mode="after")
    def _refuse_what_would_be_ignored(self) -> Settings:
        for name, reason in self.inapplicable().items():
            *tables, key = name.split(".")
            settings = reduce(getattr, tables, self)
            value = getattr(settings, key)
            if key in settings.model_fields_set and value not in (None, (), {}):
                raise ConfigError(
                    f"{key}={value!r} in {settings.table} would be ignored {reason}: take {key} out"
                )
        return self


def is_own(name: str) -> bool:
    """Whether a name is of the form ``"module:function"``.

    >>> is_own("my.codecs:sign"), is_own("sign"), is_own("my codecs:sign")
    (True, False, False)
    """
    return re.fullmatch(OWN, name) is not None


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The most similar known word, or None if no known word is similar.

    Case does not count, and "-" is the same as "_".

    >>> nearest("quorom", ["quorum", "period"]), nearest("SYNC-EVERY", ["sync_every"])
    ('quorum', 'sync_every')
    """
    known = list(known)
    matches = difflib.get_close_matches(word, known, n=1)
    if matches:
        return matches[0]
    by_letters = {_letters(each): each for each in known}
    matches = difflib.get_close_matches(_letters(word), by_letters, n=1)
    return by_letters[matches[0]] if matches else None


def _letters(word: str) -> str:
    """A word without what is easily confused: case, and the signs between its parts."""
    return word.lower().replace("-", "_").replace(" ", "_")


def suggestion(word: str, known: Iterable[str]) -> str:
    """The fix for an unknown word: the most similar known word, or all known words.

    >>> suggestion("quorom", ["quorum", "period"]), suggestion("x", ["quorum", "period"])
    ("did you mean 'quorum'?", "choose one of 'quorum', 'period'")
    """
    known = list(known)
    match = nearest(word, known)
    if match is not None:
        return f"did you mean {match!r}?"
    return "choose one of " + ", ".join(repr(name) for name in known)


def own_error(error: ValidationError) -> ConfigError | None:
    """Return the `ConfigError` that a validator has raised, if pydantic has found nothing else.

    Pydantic takes it for a wrong value, because it is a `ValueError`.
    """
    found = error.errors(include_url=False)
    own = [details["ctx"]["error"] for details in found if details["type"] == "value_error"]
    return own[0] if len(found) == 1 and own and isinstance(own[0], ConfigError) else None


def _refuse(model: type[Settings], error: ValidationError) -> NoReturn:
    found = error.errors(include_url=False)
    own = own_error(error)
    if own is not None:
        raise own from None
    lines = [_explain(model, details) for details in found if _is_meant(details, found)]
    raise ConfigError("\n".join(dict.fromkeys(lines))) from None


def _is_meant(details: ErrorDetails, found: list[ErrorDetails]) -> bool:
    """Whether this error is about the form that was written, where a value or a list is allowed."""
    others = [each for each in found if each["loc"][:1] == details["loc"][:1]]
    inside = [each for each in others if any(isinstance(key, int) for key in each["loc"])]
    if not inside and any(each["type"] == "literal_error" for each in others):
        return details["type"] == "literal_error"
    return details in inside if inside else len(others) == 1 or details["type"] != "tuple_type"


def _explain(model: type[Settings], details: ErrorDetails) -> str:
    """One mistake in one sentence."""
    kind, context = details["type"], details.get("ctx", {})
    key = str(details["loc"][0]) if details["loc"] else ""
    value = details.get("input")
    subject = f"{key}={shown(value)}" + (f" in {model.table}" if model.table else "")
    earlier = sentence_for(model.table, key, value)
    if earlier is not None:
        return earlier
    if kind == "value_error" and isinstance(context["error"], ConfigError):
        return str(context["error"])
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
        return f"{subject} is not known: {_fix_of_word(model, key, value)}"
    if kind in ("bool_type", "bool_parsing"):
        return f"{subject} is not true or false: write true or false"
    if kind == "int_parsing_size":
        return f"{subject} is out of range: it has too many digits"
    if kind == "too_short":
        return f"{subject} is too short: it needs {_values(context['min_length'])} or more"
    if kind == "too_long":
        return f"{subject} is too long: it takes {_values(context['max_length'])} at most"
    if kind == "string_too_short":
        return f"{subject} is empty: write a text, or take {key} out"
    if kind in _TYPE_WORDS:
        return f"{subject} is not {_TYPE_WORDS[kind]}: write it as one"
    if kind == "string_pattern_mismatch":
        what = "has a character that does not fit" if value else "is empty"
        return f"{subject} {what}: {_PATTERN_WORDS.get(context['pattern'], 'correct it')}"
    return f"{subject} does not fit: correct it, or take {key} out"


def _fix_of_word(model: type[Settings], key: str, value: object) -> str:
    """The fix of a wrong word, where a number may be allowed, too."""
    words = _choices(model, key)
    if int not in get_args(model.model_fields[key].annotation):
        return suggestion(value if isinstance(value, str) else shown(value), words)
    near = nearest(value, words) if isinstance(value, str) else None
    return (
        suggestion(near, words)
        if near
        else "write a whole number, or " + " or ".join(map(repr, words))
    )


def _values(count: int) -> str:
    return f"{count} value" + ("s" if count != 1 else "")


def shown(value: object) -> str:
    """The beginning of a value. Python refuses to write a number with thousands of digits."""
    try:
        text = repr(value)
    except ValueError:
        return "a number of thousands of digits"
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}…"


def _explain_unknown(model: type[Settings], key: str, is_table: bool) -> str:
    known, others = list(model.model_fields), _keys_of_related_tables(model)
    if not model.table:
        if key in others and not is_table:
            return f"{key!r} at the top of the file belongs to {others[key]}: move it there"
        what = "table" if is_table else "key"
        return f"unknown {what} {key!r}: {suggestion(key, known)}"
    if key in others:
        return f"{key!r} in {model.table} belongs to {others[key]}: move it there"
    match = nearest(key, [*known, *others])
    place = f" in {others[match]}" if match in others else ""
    meant = suggestion(key, known) if not place else f"did you mean {match!r}{place}?"
    return f"unknown key {key!r} in {model.table}: {meant}"


def _keys_of_related_tables(model: type[Settings]) -> dict[str, str]:
    """The keys of the other tables with the same first name, each with its tables."""
    found: dict[str, list[str]] = {}
    for other in sorted(_all_settings(Settings), key=lambda each: len(each.table)):
        at_the_top = not model.table and _first_name(other) in model.model_fields
        related = at_the_top or _first_name(other) == _first_name(model)
        if other.table != model.table and related:
            for key in other.model_fields.keys() - model.model_fields.keys():
                found.setdefault(key, []).append(other.table)
    return {key: " or ".join(dict.fromkeys(tables)) for key, tables in found.items()}


def _all_settings(base: type[Settings]) -> Iterator[type[Settings]]:
    for model in base.__subclasses__():
        yield model
        yield from _all_settings(model)


def _first_name(model: type[Settings]) -> str:
    return model.table.strip("[]").partition(".")[0]


def _choices(model: type[Settings], key: str) -> list[str]:
    return _words_of(model.model_fields[key].annotation)


def _words_of(annotation: Any) -> list[str]:
    """The words of a `Literal`, including one in a union or a list."""
    if get_origin(annotation) is Literal:
        return [str(choice) for choice in get_args(annotation)]
    if get_origin(annotation) is Annotated and OWN in str(annotation):
        return ["module:function"]
    return list(dict.fromkeys(word for each in get_args(annotation) for word in _words_of(each)))
