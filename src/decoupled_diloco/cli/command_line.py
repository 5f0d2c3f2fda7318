"""Commands from models: a field is an option or argument, and its documentation is the help.

    class MineOptions(CommandOptions):
        period: Annotated[int, typer.Option(metavar="H")] = 24
        '''Steps between two syncs.'''

        port: Annotated[int | None, setting(SyncerSettings, "port")] = None

    @command(MineOptions)
    def mine(options: MineOptions) -> None:
        '''What it does.'''

An option that is a setting of a run has that setting's documentation, and `overrides` turns it into
an argument of ``--set``.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from copy import copy
from typing import Annotated, Any, TypeVar

import typer
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.fields import FieldInfo
from typer.models import ArgumentInfo, ParameterInfo

from decoupled_diloco.config.settings import Settings, own_error


class CommandOptions(BaseModel):
    """The options and arguments of a command."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    def __init__(self, **data: Any) -> None:
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise own_error(error) or error from None

    @property
    def given(self) -> dict[str, Any]:
        """The values that were given on the command line, by the names of the fields."""
        return {name: getattr(self, name) for name in self.model_fields_set}


_Options = TypeVar("_Options", bound=CommandOptions)


def command(model: type[_Options]) -> Callable[[Callable[[_Options], None]], Callable[..., None]]:
    """Decorate a function as the command whose options are the fields of this model."""

    def made_of(function: Callable[[_Options], None]) -> Callable[..., None]:
        def run(context: typer.Context, **values: Any) -> None:
            written = {name: value for name, value in values.items() if _written(context, name)}
            function(model(**written))

        parameters = [_parameter(*field) for field in named(model).items()]
        context = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY)
        parameters.append(context.replace(annotation=typer.Context))
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {each.name: each.annotation for each in parameters}
        run.__name__, run.__doc__ = function.__name__, function.__doc__
        return run

    return made_of


def setting(settings: type[Settings], name: str, *names: str, **more: Any) -> Any:
    """Return an option for a setting of a run; the arguments are those of `typer.Option`."""
    return typer.Option(*names, help=_text_of(settings.model_fields[name]), **more)


def overrides(options: CommandOptions, settings: type[Settings], *names: str) -> list[str]:
    """Return the options that were given, each as ``table.key=value``, like arguments of ``--set``.

    >>> class Where(CommandOptions):
    ...     port: int = 7070
    >>> from decoupled_diloco.config import SyncerSettings
    >>> overrides(Where(port=9), SyncerSettings, "port"), overrides(Where(), SyncerSettings, "port")
    (['syncer.port=9'], [])
    """
    table, given = settings.table.strip("[]"), options.given
    return [f"{table}.{n}={json.dumps(given[n], default=str)}" for n in names if n in given]


def named(model: type[CommandOptions]) -> dict[str, FieldInfo]:
    """Return the fields that are options or arguments; other fields are not on the command line."""
    return {name: field for name, field in model.model_fields.items() if _infos(field)}


def option_of(model: type[CommandOptions], name: str) -> str:
    """Return the name of a field on the command line."""
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


def _text_of(field: FieldInfo) -> str:
    return " ".join((field.description or "").split())


def _parameter(name: str, field: FieldInfo) -> inspect.Parameter:
    info, annotation = copy(_infos(field)[0]), field.annotation
    info.help = _text_of(field) or info.help
    default = field.default
    if info.parser is not None and default is not None:
        annotation = str  # a default is parsed as well
        default = f"{default:g}" if isinstance(default, int | float) else default or None
    if field.is_required():
        default = inspect.Parameter.empty
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[annotation, info],
    )
