"""The models and data that learners train: built in, or custom as "module:function".

| name | model and data | options |
|---|---|---|
| `gpt` | byte-level GPT, source of Python's standard library | `workloads.gpt.GptOptions` |
| `paced` | `gpt`, small, with a step of fixed length | `workloads.paced.PacedOptions` |

Other distributions provide workloads with an entry point: a module with the classes that
`load_workload` builds. The extra `lab` has `moe` (`gpt` with a mixture of experts in each block),
`vit` (a vision transformer on handwritten digits), `digits` (a small perceptron on these, for
learners with different data) and `speech` (an encoder that recognizes spoken letters and digits).
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
from decoupled_diloco.errors import ConfigError, a_kind
from decoupled_diloco.workloads.workload import Batch, Workload

__all__ = ["Batch", "Workload", "load_workload", "workload_of"]

BUILT_IN = ("gpt", "paced")
OF_THE_LAB = ("digits", "moe", "speech", "vit")
GROUP = "decoupled_diloco.workloads"
"""The entry-point group for workloads of installed distributions."""


def workload_of(config: RunConfig) -> Workload:
    """Build the workload of a run.

    Raises:
        ConfigError: The run has no workload because its learners run a command, or see
            `load_workload`.
    """
    return load_workload(config.required_workload.name, config.workload_options())


def load_workload(name: str, options: Mapping[str, Any]) -> Workload:
    """Build a workload by name.

    Args:
        name: One of `BUILT_IN`, the name of a distribution's workload, or "module:function". A
            module may also be in the current folder.
        options: The workload's options; a custom function receives them as one dict. The options of
            a run (`RunConfig.workload_options`) have `seed`, and `total_steps` if the budget is in
            steps, in addition to those in the file.

    Raises:
        ConfigError: The name or an option is not valid, or the function's result is not a
            `Workload`.
    """
    if ":" in name:
        return _load_own(name, options)
    module, prefix = workload_module(name), name.title()
    own = getattr(module, f"{prefix}Options")(**options)
    return cast("Workload", getattr(module, f"{prefix}Workload")(own))


def workload_module(name: str) -> ModuleType:
    """Return the module of a built-in workload, or of one that a distribution provides.

    Raises:
        ConfigError: The name is not valid.
    """
    if name in BUILT_IN:
        return importlib.import_module(f"{__name__}.{name}")
    for entry in entry_points(group=GROUP, name=name):
        return cast("ModuleType", entry.load())
    if name in OF_THE_LAB:
        raise ConfigError(
            f"workload {name!r} is not installed: run pip install -e packages/lab in the clone"
        )
    raise ConfigError(
        f"workload {name!r} is not known: {suggestion(name, (*BUILT_IN, *OF_THE_LAB))} "
        "Write a custom workload as 'module:function'"
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
            f"workload {name!r} returned {a_kind(workload)} without "
            f"{', '.join(missing)}: return an object with the methods of "
            "decoupled_diloco.workloads.Workload"
        )
    assert isinstance(workload, Workload)
    return workload


def _import(name: str, module_name: str) -> Any:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)  # last, so that a file here never hides an installed module
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name + ".").startswith(error.name + "."):
            raise ConfigError(
                f"workload {name!r}: module {module_name!r} is neither installed nor in {here}: "
                "start the command in the module's folder, or install the module"
            ) from None
        raise


def _methods() -> list[str]:
    return [key for key in vars(Workload) if not key.startswith("_")]
