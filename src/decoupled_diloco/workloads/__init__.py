"""What learners train: built-in models and data, or one's own as "module:function".

| name | model and data | options |
|---|---|---|
| `gpt` | byte-level GPT, source of Python's standard library | `workloads.gpt.GptOptions` |
| `paced` | `gpt`, small, with a step of fixed length | `workloads.paced.PacedOptions` |

Another distribution provides a workload by an entry point: its module, with the classes that
`load_workload` builds. The extra `lab` has `moe` (a mixture of experts in each block of `gpt`) and
`vit` (a vision transformer on handwritten digits).
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from decoupled_diloco.config.run import RunConfig
from decoupled_diloco.config.settings import suggestion
from decoupled_diloco.errors import ConfigError
from decoupled_diloco.workloads.workload import Batch, Workload

__all__ = ["Batch", "Workload", "load_workload", "workload_of"]

BUILT_IN = ("gpt", "paced")
OF_THE_LAB = ("moe", "vit")
GROUP = "decoupled_diloco.workloads"
"""The entry-point group by which an installed distribution provides workloads."""


def workload_of(config: RunConfig) -> Workload:
    """Build the workload of a run.

    Raises:
        ConfigError: Its learners run a command, or see `load_workload`.
    """
    return load_workload(config.required_workload.name, config.workload_options())


def load_workload(name: str, options: Mapping[str, Any]) -> Workload:
    """Build a workload by name.

    Args:
        name: One of `BUILT_IN`, one that a distribution provides, or "module:function". A module is
            looked for in the folder where the command was started, too.
        options: What the workload is built with; a function of one's own gets it as one dict.
            The options of a run (`RunConfig.workload_options`) hold `seed`, and `total_steps` if
            the budget is in steps, besides what the file says.

    Raises:
        ConfigError: There is no such workload, an option does not fit, or what the function
            returned is no workload.
    """
    if ":" in name:
        return _load_own(name, options)
    module, prefix = workload_module(name), name.title()
    own = getattr(module, f"{prefix}Options")(**options)
    return cast("Workload", getattr(module, f"{prefix}Workload")(own))


def workload_module(name: str) -> ModuleType:
    """The module of a workload that has a name: built in, or of another distribution.

    Raises:
        ConfigError: There is no such workload.
    """
    if name in BUILT_IN:
        return importlib.import_module(f"{__name__}.{name}")
    for entry in entry_points(group=GROUP, name=name):
        return cast("ModuleType", entry.load())
    if name in OF_THE_LAB:
        raise ConfigError(
            f"workload {name!r} is not installed: pip install 'decoupled-diloco[lab]' (in a clone: "
            "pip install -e packages/lab)"
        )
    raise ConfigError(
        f"workload {name!r} is not known: {suggestion(name, (*BUILT_IN, *OF_THE_LAB))} "
        "One's own is written as 'module:function'"
    )


def _load_own(name: str, options: Mapping[str, Any]) -> Workload:
    module_name, _, function_name = name.partition(":")
    if not module_name or not function_name:
        raise ConfigError(f"workload {name!r} is not of the form 'module:function'")
    module = _import(name, module_name)
    function = getattr(module, function_name, None)
    if not callable(function):
        found = [key for key, value in vars(module).items() if callable(value)]
        raise ConfigError(
            f"workload {name!r}: {module_name} has no function {function_name!r}: "
            f"{suggestion(function_name, found)}"
        )
    workload = function(dict(options))
    missing = [method for method in _methods() if not callable(getattr(workload, method, None))]
    if missing:
        raise ConfigError(
            f"workload {name!r} returned a {type(workload).__name__} without "
            f"{', '.join(missing)}: return an object with the methods of "
            "decoupled_diloco.workloads.Workload"
        )
    assert isinstance(workload, Workload)
    return workload


def _import(name: str, module_name: str) -> Any:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)  # last, so that a file of one's own never hides an installed module
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name + ".").startswith(error.name + "."):
            raise ConfigError(
                f"workload {name!r}: there is no module {module_name!r}, neither installed nor in "
                f"{here}: start the command where the module lies, or install it"
            ) from None
        raise


def _methods() -> list[str]:
    return [key for key in vars(Workload) if not key.startswith("_")]
