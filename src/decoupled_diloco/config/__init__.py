"""The configuration of a run: one TOML file, frozen settings, and errors that name the fix.

Start at `files.load_config`, which returns a `RunConfig` (`run`) with one model for each table. The
docstrings of the fields are the reference page and the help of options. `method` maps the settings
to the options of the state machines. `renamed` lists earlier names. `addresses` handles hosts and
ports. Creating settings validates them, and reads no file.
"""

from decoupled_diloco.config.run import RunConfig, RunSettings, WorkloadSettings
from decoupled_diloco.config.settings import Settings, suggestion
from decoupled_diloco.config.sync import OuterSettings, SyncSettings
from decoupled_diloco.config.syncer import SyncerSettings
from decoupled_diloco.config.toml_files import dump_config, load_config

__all__ = [
    "OuterSettings",
    "RunConfig",
    "RunSettings",
    "Settings",
    "SyncSettings",
    "SyncerSettings",
    "WorkloadSettings",
    "dump_config",
    "load_config",
    "suggestion",
]
