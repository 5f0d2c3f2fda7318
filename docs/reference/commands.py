"""The page of all commands, from the command line itself: run it to see the page.

python docs/reference/commands.py
"""

from __future__ import annotations

from typing import Any

import typer.main

from decoupled_diloco.cli.main import app

HEAD = """\
# Commands

The command is `ddiloco`; `python -m decoupled_diloco` is the same. `ddiloco COMMAND --help` prints
what this page says. `RUN` is a TOML file or the name of a shipped recipe; a file of that name takes
precedence. `ddiloco --install-completion` makes the shell complete commands, options and recipes.

{epilog}
"""


def page() -> str:
    """The page, in Markdown."""
    group: Any = typer.main.get_command(app)
    parts = [HEAD.format(epilog=group.epilog)]
    parts += [_command(name, each) for name, each in group.commands.items() if not each.hidden]
    return "\n".join(parts)


def _command(name: str, command: Any) -> str:
    """One command: how it is written, what it does, its arguments and options."""
    context = command.make_context(name, [], resilient_parsing=True)
    usage = " ".join(["ddiloco", name, *command.collect_usage_pieces(context)])
    rows = [_row(each) for each in command.params if not getattr(each, "hidden", False)]
    table = "\n".join(["| argument or option | meaning |", "|---|---|", *rows])
    text = "\n".join(line.strip() for line in (command.help or "").splitlines())
    return f"## `{name}` {{ #{name} }}\n\n{text}\n\n```text\n{usage}\n```\n\n{table}\n"


def _row(parameter: Any) -> str:
    names = parameter.opts + parameter.secondary_opts
    if parameter.param_type_name == "argument":
        names = [str(parameter.metavar or parameter.name.upper())]
    elif not parameter.is_flag and parameter.metavar:
        names = [f"{each} {parameter.metavar}" for each in names]
    told = ", ".join(f"`{each}`" for each in names).replace("|", "\\|")
    text = (parameter.help or "").replace("|", "\\|")
    default = parameter.default
    if not isinstance(default, str | int | float) or isinstance(default, bool) or default == "":
        return f"| {told} | {text} |"
    return f"| {told} | {text} Default: `{default}`. |"


if __name__ == "__main__":
    print(page())
