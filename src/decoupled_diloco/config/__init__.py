"""The configuration of a run: one TOML file, frozen settings, errors that show the way out."""

from decoupled_diloco.config.files import dump_config, load_config
from decoupled_diloco.config.run import (
    OuterSettings,
    RunConfig,
    RunSettings,
    SyncerSettings,
    SyncSettings,
    WorkloadSettings,
)
from decoupled_diloco.config.settings import Settings, suggestion

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
