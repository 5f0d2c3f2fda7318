"""The user's own methods: modules to import, and functions of each kind by name.

Only a run's own file, which the user gives to a command, causes an import: `load_config` calls
`load_plugins`. Settings that another process sent never do. They can only select a codec that this
program has registered or allowed, or that an installed package provides by an entry point.
"""

from __future__ import annotations

import hashlib
import importlib
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import metadata
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from decoupled_diloco.config.settings import is_own, suggestion
from decoupled_diloco.config.sync import BITS, MOMENTUM_DEFAULTS, ROBUST_RULES, SUMMED_RULES
from decoupled_diloco.errors import ConfigError, MethodError
from decoupled_diloco.protocol.machine_options import Candidate
from decoupled_diloco.protocol.participation import RULES, TriedRound, why_included

GROUP = "decoupled_diloco"
"""The entry-point group by which an installed package provides methods."""

_imported: set[str] = set()

_functions: dict[str, Callable[..., Any]] = {"active": RULES["reported"], "all": RULES["all"]}
"""Schedules and participation rules, by name: those of this package, and registered ones."""

SHIPPED = {
    "codec": tuple(BITS),
    "merge rule": SUMMED_RULES + ROBUST_RULES,
    "outer optimizer": tuple(MOMENTUM_DEFAULTS),
    "participation rule": (*_functions, "async"),
    "schedule": (),
}
"""The names of this package's methods, by kind."""


class MissingCodecError(ConfigError):
    """Raised if a run uses a codec that this program does not have."""


def load_plugins(tables: dict[str, Any], folder: Path) -> None:
    """Import and register everything that a run's file names, and note the folder of modules in it.

    Installed modules come first, then the folder where the command starts, then ``folder``. A
    method that an installed package provides by an entry point is replaced by its module and
    function. Codecs keep their names, by which learners find their own entry points.

    Args:
        tables: The tables of the file, unchecked: later the settings reject values that do not fit.
        folder: The folder of the file, unless ``run.imports_from`` names another one.

    Raises:
        ConfigError: A module or a function is missing, raises, or does not do what it should.
    """
    run = tables.get("run")
    _resolve(tables)
    modules = _texts(run.get("imports")) if isinstance(run, dict) else []
    own = {kind: [n for n in names if is_own(n)] for kind, names in _methods_in(tables).items()}
    if not isinstance(run, dict) or not (modules or any(own.values())):
        _load_provided(_methods_in(tables)["codec"])
        return
    run.setdefault("imports_from", str(folder.absolute()))
    _extend_path(Path.cwd(), Path(str(run["imports_from"])))
    for name in modules:
        _import(f"imports={name!r} in [run]", name)
    _load_provided(_methods_in(tables)["codec"])
    for kind, names in own.items():
        for name in names:
            _REGISTER[kind](name, _function(f"{kind} {name!r}", name))


def provide_codecs(settings: Mapping[str, Any]) -> None:
    """Register the codecs of settings that installed packages provide by entry points.

    Raises:
        ConfigError: An entry point cannot be loaded, or does not return a codec.
    """
    _load_provided(_methods_in(settings)["codec"])


def require_codecs(settings: Mapping[str, Any]) -> None:
    """Check that this program has the codecs of settings that another process sent.

    Raises:
        MissingCodecError: One is neither registered here nor provided by an installed package.
    """
    provide_codecs(settings)
    for name in (name for name in _methods_in(settings)["codec"] if not _has_codec(name)):
        way = "import the module that registers it, or install the syncer's version of this package"
        if is_own(name):
            way = f"call decoupled_diloco.allow_codec({name!r}) if you trust that module"
        raise MissingCodecError(
            f"codec {name!r}, which the run uses, is not registered in this program: {way}, before "
            "you create the Learner or Observer"
        )


def allow_codec(name: str) -> None:
    """Let this program's learners and observers use a codec that the run's file names.

    A learner never imports code because a syncer names it. This call imports the module at once,
    and registers the codec under the name that the syncer sends.

    Args:
        name: As in the run's file, ``"module:function"``. Installed modules come first, then the
            current folder.

    Raises:
        ConfigError: The module or the function is missing or raises, or what it returns is not a
            codec.
    """
    if not is_own(name):
        raise ConfigError(f"codec {name!r} is not of the form 'module:function'")
    _extend_path(Path.cwd())
    _register_codec(name, _function(f"codec {name!r}", name))


def register_method(kind: str, name: str, function: Callable[..., Any]) -> None:
    """Register a function of this program, after a trial, for runs in this process.

    Args:
        kind: "codec", "outer optimizer", "merge rule", "schedule" or "participation rule".
        name: Its name in configurations and on the tape, of the form ``"module:function"``.
        function: See `merge.register_own_codec`, `merge.register_own_outer`,
            `merge.rules.register_rule`, `protocol.adapt.Schedule` and
            `protocol.machine_options.Rule`.

    Raises:
        ConfigError: The function fails its trial.
    """
    _REGISTER[kind](name, function)
    _imported.add(name.partition(":")[0])


def method_named(name: str) -> Callable[..., Any]:
    """Return the function of a name ``"module:function"``, whose module is imported.

    Raises:
        ConfigError: The module or the function is missing.
    """
    return _function(f"method {name!r}", name)


def registered(kind: str, name: str) -> Callable[..., Any]:
    """Return a registered schedule or participation rule.

    Learners never call these functions, so they need not have them.

    Returns:
        The function. If this process has not loaded it, one that raises `ConfigError`.
    """
    return _functions.get(name, NotLoaded(kind, name))


@dataclass(frozen=True)
class NotLoaded:
    """Stands for a method that this process has not loaded."""

    kind: str
    name: str

    def __call__(self, *_: object) -> Any:
        raise ConfigError(
            f"{self.kind} {self.name!r} is not loaded in this process: load the run's file with "
            "decoupled_diloco.config.load_config"
        )


def plugin_versions() -> dict[str, str]:
    """The version and the source's digest of each module from which this process took a method."""
    from decoupled_diloco.merge.codec import own_codecs

    modules = _imported | {type(each).__module__ for each in own_codecs()}
    package = __name__.partition(".")[0]
    return {
        name: _version_of(name)
        for name in sorted(modules)
        if name in sys.modules and name.partition(".")[0] != package
    }


def _methods_in(tables: Mapping[str, Any]) -> dict[str, list[str]]:
    """The names of methods in tables that may be anything: by kind, each once, in order."""
    sync, outer = (_table(tables, name) for name in ("sync", "outer"))
    entries = outer.get("by_fragment")
    entries = entries if isinstance(entries, list | tuple) else []
    codec, merge = (_table(sync, name) for name in ("codec", "merge"))
    codecs = [*_texts(codec.get("uplink")), codec.get("uplink"), codec.get("downlink")]
    outers = [outer.get("optimizer")]
    outers += [each.get("optimizer") for each in entries if isinstance(each, Mapping)]
    found = {
        "codec": codecs,
        "outer optimizer": outers,
        "merge rule": [merge.get("rule")],
        "schedule": [sync.get("schedule")],
        "participation rule": [sync.get("participation")],
    }
    return {kind: list(dict.fromkeys(_texts(names))) for kind, names in found.items()}


def _resolve(tables: Mapping[str, Any]) -> None:
    """Replace the names of entry points, except of codecs, by their values."""
    sync, outer = (_table(tables, name) for name in ("sync", "outer"))
    entries = outer.get("by_fragment")
    entries = entries if isinstance(entries, list | tuple) else []
    outers = (outer, *(each for each in entries if isinstance(each, dict)))
    places = [
        (_table(sync, "merge"), "rule", "merge rule"),
        *((each, "optimizer", "outer optimizer") for each in outers),
        (sync, "schedule", "schedule"),
        (sync, "participation", "participation rule"),
    ]
    for table, key, kind in places:
        name = table.get(key)
        if isinstance(name, str) and name not in SHIPPED[kind] and not is_own(name):
            for entry in entry_points(group=GROUP, name=name):
                table[key] = entry.value  # type: ignore[index]


def _table(tables: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = tables.get(name)
    return found if isinstance(found, Mapping) else {}


def _texts(values: object) -> list[str]:
    return [v for v in values if isinstance(v, str)] if isinstance(values, list | tuple) else []


def _extend_path(*folders: Path) -> None:
    for folder in map(str, folders):
        if folder not in sys.path:
            sys.path.append(folder)  # last, so that a user's file never hides an installed module


def _import(subject: str, name: str) -> ModuleType:
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name + ".").startswith(error.name + "."):
            raise ConfigError(
                f"{subject}: module {name!r} is neither installed nor in "
                f"{', '.join(sys.path[-2:])}: correct the name, start the command in the folder of "
                "the module, or install it"
            ) from None
        raise ConfigError(_cannot_import(subject, name, error)) from error
    except (Exception, SystemExit) as error:
        raise ConfigError(_cannot_import(subject, name, error)) from error
    _imported.add(name)
    return module


def _cannot_import(subject: str, name: str, error: BaseException) -> str:
    line = ""
    trace = error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if not file.startswith("<") and "importlib" not in file and file != __file__:
            line = f" ({file}, line {trace.tb_lineno})"
        trace = trace.tb_next
    return (
        f"{subject}: module {name!r} cannot be imported, it raises {type(error).__name__}: "
        f"{error}{line}: correct the module"
    )


def _function(subject: str, name: str) -> Callable[..., Any]:
    module_name, _, function_name = name.partition(":")
    module = _import(subject, module_name)
    function = getattr(module, function_name, None)
    if not callable(function):
        known = [key for key, value in vars(module).items() if callable(value)]
        raise ConfigError(
            f"{subject}: {module_name} has no function {function_name!r}: "
            f"{suggestion(function_name, known)}"
        )
    return function  # type: ignore[no-any-return]


def _load_provided(names: Iterable[str]) -> None:
    """Register the codecs of these names that installed packages provide."""
    # To search all installed packages takes 10 ms, and each process does it for each admission.
    wanted = {name for name in names if not _has_codec(name)}
    for entry in entry_points(group=GROUP) if wanted else ():
        for name in wanted & {entry.name, entry.value}:
            try:
                function = entry.load()
            except Exception as error:
                raise ConfigError(
                    f"codec {name!r}: its entry point {entry.value!r} cannot be loaded, it raises "
                    f"{type(error).__name__}: {error}: correct or remove the package"
                ) from error
            _imported.add(entry.module)
            _register_codec(name, function)


def _has_codec(name: str) -> bool:
    if name in BITS:
        return True
    from decoupled_diloco.merge.codec import has_codec  # imports torch

    return has_codec(name)


def _register_codec(name: str, function: Callable[..., Any]) -> None:
    from decoupled_diloco.merge.codec import register_own_codec

    register_own_codec(name, function)


def _register_outer(name: str, function: Callable[..., Any]) -> None:
    from decoupled_diloco.merge.outer import register_own_outer

    register_own_outer(name, function)


def _register_rule(name: str, function: Callable[..., Any]) -> None:
    from decoupled_diloco.merge.rules import register_rule

    register_rule(name, function)


def _register_participation(name: str, function: Callable[..., Any]) -> None:
    learners = [Candidate(f"learner-{i}", 8 - i, i < 2, i > 1, 1.0) for i in range(4)]
    for count in (1, 4):
        round = TriedRound(0, 1, 8, learners[:count])
        try:
            for each in round.learners:
                why_included(function, each, round)
        except MethodError as error:
            raise ConfigError(f"{name!r}: {error}: correct the function") from error
    _functions[name] = function


_REGISTER = {
    "codec": _register_codec,
    "outer optimizer": _register_outer,
    "merge rule": _register_rule,
    "schedule": _functions.__setitem__,  # `RunConfig` tries it with the steps of the run
    "participation rule": _register_participation,
}


def _version_of(name: str) -> str:
    """A module's version, if it has one, and the digest of its source."""
    top = name.partition(".")[0]
    version = getattr(sys.modules.get(top), "__version__", None)
    return " ".join(filter(None, [version or _installed_version(top), _source_digest(name)]))


def _installed_version(top: str) -> str:
    try:
        return metadata.version(top)
    except metadata.PackageNotFoundError:
        return ""


def _source_digest(name: str) -> str:
    file = getattr(sys.modules[name], "__file__", None)
    try:
        return f"sha256:{hashlib.sha256(Path(file).read_bytes()).hexdigest()[:16]}" if file else ""
    except OSError:
        return ""
