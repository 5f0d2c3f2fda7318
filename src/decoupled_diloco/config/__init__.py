"""The configuration of a run: one TOML file, frozen settings, errors that show the way out."""

from decoupled_diloco.config.files import dump_config, load_config
from decoupled_diloco.config.run import RunConfig, RunSettings, WorkloadSettings
from decoupled_diloco.config.settings import Settings, suggestion
from decoupled_diloco.config.sync import OuterSettings, SyncSettings
from decoupled_diloco.config.syncer import SyncerSettings

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
