"""Commands from models: a field that names an option is one, and its documentation is its help."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from copy import copy
from typing import Annotated, Any, TypeVar

import typer
from pydantic import BaseModel, ConfigDict
from pydantic.fields import FieldInfo
from typer.models import ArgumentInfo, ParameterInfo


class Options(BaseModel):
    """What a command is told; those that were written on the command line are `given`."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    @property
    def given(self) -> dict[str, Any]:
        """Only what was written, by the names of the fields."""
        return {name: getattr(self, name) for name in self.model_fields_set}


_Options = TypeVar("_Options", bound=Options)


def command(
    model: type[_Options],
) -> Callable[[Callable[[_Options], None]], Callable[..., None]]:
    """A decorator: the command whose options are the fields of this model."""

    def made_of(function: Callable[[_Options], None]) -> Callable[..., None]:
        def run(context: typer.Context, **values: Any) -> None:
            function(model(**{name: values[name] for name in values if _written(context, name)}))

        parameters = [_parameter(*field) for field in named(model).items()]
        context = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY)
        parameters.append(context.replace(annotation=typer.Context))
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {each.name: each.annotation for each in parameters}
        run.__name__, run.__doc__ = function.__name__, function.__doc__
        return run

    return made_of


def named(model: type[Options]) -> dict[str, FieldInfo]:
    """The fields that are options or arguments; others are not for the command line."""
    return {name: f for name, f in model.model_fields.items() if _infos(f)}


def option_of(model: type[Options], name: str) -> str:
    """How a field is written on the command line."""
    (info,) = _infos(model.model_fields[name])
    if isinstance(info, ArgumentInfo):
        return name.upper()
    names = [each for each in (info.default, *(info.param_decls or ())) if isinstance(each, str)]
    return names[0].partition("/")[0] if names else "--" + name.replace("_", "-")


def _infos(field: FieldInfo) -> list[ParameterInfo]:
    return [each for each in field.metadata if isinstance(each, ParameterInfo)]


def _written(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _parameter(name: str, field: FieldInfo) -> inspect.Parameter:
    info, default = copy(_infos(field)[0]), field.default
    info.help = " ".join((field.description or "").split())
    annotation = field.annotation
    if info.parser is not None:
        annotation = str
        default = default if default is None else f"{default:g}"  # it is parsed as well
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[annotation, info],
    )
