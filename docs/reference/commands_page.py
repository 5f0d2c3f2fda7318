"""The page of all commands, from the command line itself: run it to see the page.

python docs/reference/commands_page.py
"""

from __future__ import annotations

from typing import Any

import typer.main

from decoupled_diloco.cli.main import GROUPS, app

HEAD = """\
# Commands

The command is `ddiloco`; `python -m decoupled_diloco` is the same. `ddiloco COMMAND --help` prints
this page. CONFIG is a TOML file, or the name of a shipped recipe; a file of that name takes
precedence. RUN is a run folder; some commands also accept an event tape or the URL of a running
syncer. Without RUN, a command takes the newest run in `runs/`. `ddiloco --install-completion` makes
the shell complete commands, options, recipes and runs.

{epilog}
"""


def page() -> str:
    """Return the page, in Markdown: the commands in their groups, as in `ddiloco --help`."""
    group: Any = typer.main.get_command(app)
    parts = [HEAD.format(epilog=group.epilog)]
    for panel in GROUPS:
        parts.append(f"## {panel}\n")
        for name, each in group.commands.items():
            if each.hidden or each.rich_help_panel != panel:
                continue
            parts.append(_command([name], each))
            for own, subcommand in getattr(each, "commands", {}).items():
                parts.append(_command([name, own], subcommand))
    return "\n".join(parts)


def _command(names: list[str], command: Any) -> str:
    """Return the section of one command: its usage, its help, its arguments and options."""
    context = command.make_context(names[-1], [], resilient_parsing=True)
    usage = " ".join(["ddiloco", *names, *command.collect_usage_pieces(context)])
    rows = [_row(each) for each in command.params if not getattr(each, "hidden", False)]
    table = "\n".join(["| argument or option | meaning |", "|---|---|", *rows, ""]) if rows else ""
    text = "\n".join(line.strip() for line in (command.help or "").splitlines())
    title, anchor = " ".join(names), "-".join(names)
    return f"### `{title}` {{ #{anchor} }}\n\n{text}\n\n```text\n{usage}\n```\n\n{table}"


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
