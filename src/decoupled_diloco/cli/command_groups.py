"""The groups of commands in `ddiloco --help`, and how commands and groups print their usage."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

from decoupled_diloco.cli.shared_options import fail

RUN, INSPECT, OPERATE, PLAN, DEBUG = "Run", "Inspect", "Operate", "Plan", "Debug"
"""The groups, in the order in which the help shows them."""

RENAMED_OPTIONS = {
    "--cut": "--checkpoint",
    "--token-file": "--auth-token-file",
    "--authority": "--ca-cert",
    "--certificate": "--cert",
    "--to": "--collector",
    "--standbys": "--standby",
    "--name": "--host",
    "--every": "--interval-seconds",
    "--timeout": "--timeout-seconds",
}
"""Old names of options, and what they are called now, on every command that has the new one."""

SETTINGS_NOW = {"--engine": "launch.backend"}
"""Old options that are settings of a run now."""

_F = TypeVar("_F", bound=Callable[..., Any])


class _PlainFlags:
    """Help without types for flags and arguments; newer versions of typer print ``<bool>``."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return all parameters: flags without a metavar, arguments with their metavar alone."""
        found: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for each in found:
            if getattr(each, "is_flag", False):
                each.metavar = ""
            elif each.param_type_name == "argument":
                each.display_type_rich = lambda ctx: None
        return found


class Group(_PlainFlags, TyperGroup):
    """A command with subcommands, which names the new command when it receives an old name."""

    renamed: Mapping[str, str] = {}
    """Old names of subcommands, and what they are called now."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the subcommand that the first argument names."""
        new = self.renamed.get(args[0])
        if new is not None:
            path = ctx.command_path.replace(ctx.find_root().info_name, "ddiloco", 1)
            fail(f"`{path} {args[0]}` is called `{path} {new}` now.")
        return super().resolve_command(ctx, args)


class Command(_PlainFlags, TyperCommand):
    """A command that names the new option when it receives an old name.

    Its usage shows `CONFIG`, and `[RUN]` for an argument that can be left out: newer versions of
    typer put braces around the first, and double brackets around the second.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Return the words that are left; reject old and empty options with one sentence."""
        try:
            self._reject_empty(ctx, self.make_parser(ctx).parse_args(args=list(args))[0])
            return super().parse_args(ctx, args)
        except Exception as error:  # typer has its own copy of click, or uses the one installed
            old = getattr(error, "option_name", "")
            if sentence := self._renamed(ctx, old):
                fail(sentence)
            raise

    def _reject_empty(self, ctx: Any, given: Mapping[str, Any]) -> None:
        """Reject an option without a value, as a shell writes it for a variable that is not set."""
        for each in self.get_params(ctx) if not ctx.resilient_parsing else []:
            found = given.get(each.name) if each.param_type_name == "option" else None
            for value in found if isinstance(found, list) else [found]:
                if isinstance(value, str) and not value.strip(" ,"):
                    what = each.metavar or "a value"
                    omit = "" if each.required else ", or omit the option"
                    fail(f"{each.opts[0]} is empty: write {what} after it{omit}")

    def _renamed(self, ctx: Any, old: str) -> str:
        """Return what an old option is called now; empty if this command has no such option."""
        known = {name for each in self.get_params(ctx) for name in each.opts}
        if old in RENAMED_OPTIONS and RENAMED_OPTIONS[old] in known - {old}:
            return f"{old} is called {RENAMED_OPTIONS[old]} now"
        if old in SETTINGS_NOW and old not in known and "--set" in known:
            key = SETTINGS_NOW[old]
            return f"{old} is the setting {key} now: set it in the TOML file, or with --set {key}=…"
        return ""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the words that follow the command's name."""
        return [_plain(piece) for piece in super().collect_usage_pieces(ctx)]


def _plain(piece: str) -> str:
    """Return one piece of a usage without braces, and without dots if it names several arguments.

    >>> _plain("{CONFIG}"), _plain("[[RUN] [PROCESS]]..."), _plain("{NAME}...")
    ('CONFIG', '[RUN] [PROCESS]', 'NAME...')
    """
    found = re.fullmatch(r"(?:\{(.*)\}|\[(\[.*\])\])(\.{3})?", piece)
    text = (found[1] or found[2]) + (found[3] or "") if found else piece
    return text.removesuffix("...") if " " in text else text


class Commands(typer.Typer):
    """A `Typer` whose commands have the class `Command`, and `-h` as well as `--help`."""

    def __init__(self, *, renamed: Mapping[str, str] | None = None, **arguments: Any) -> None:
        short = {"help_option_names": ["-h", "--help"]}
        group = type("Group", (Group,), {"renamed": renamed or {}})
        super().__init__(cls=group, context_settings=short, no_args_is_help=True, **arguments)

    def command(self, name: str | None = None, **arguments: Any) -> Callable[[_F], _F]:
        return super().command(name, cls=Command, **arguments)
