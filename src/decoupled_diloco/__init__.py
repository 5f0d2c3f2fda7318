"""Decoupled DiLoCo for PyTorch: learners that never wait, and a syncer that merges their training.

>>> import decoupled_diloco as dd
>>> dd.Learner.__name__
'Learner'
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from decoupled_diloco._version import __version__
from decoupled_diloco.errors import (
    AccessError,
    ConfigError,
    DilocoError,
    MergeError,
    ProtocolError,
    StorageError,
    TransportError,
)

if TYPE_CHECKING:
    from decoupled_diloco import data
    from decoupled_diloco.config.plugins import allow_codec
    from decoupled_diloco.device import Device
    from decoupled_diloco.export.run_export import load_model
    from decoupled_diloco.export.run_weights import load_weights
    from decoupled_diloco.learner.optimizers import register_weight_copies
    from decoupled_diloco.learner.option_groups import (
        Checkpointing,
        Observability,
        PartyFiles,
        StateSharing,
        Timeouts,
    )
    from decoupled_diloco.merge.codec import register_codec
    from decoupled_diloco.participants import Learner, Observer
    from decoupled_diloco.proximal import ProximalTerm
    from decoupled_diloco.transport.tls import TLSConfig

__all__ = [
    "AccessError",
    "Checkpointing",
    "ConfigError",
    "Device",
    "DilocoError",
    "Learner",
    "MergeError",
    "Observability",
    "Observer",
    "PartyFiles",
    "ProtocolError",
    "ProximalTerm",
    "StateSharing",
    "StorageError",
    "TLSConfig",
    "Timeouts",
    "TransportError",
    "__version__",
    "allow_codec",
    "data",
    "load_model",
    "load_weights",
    "register_codec",
    "register_weight_copies",
]

_MODULES = {
    "Checkpointing": "learner.option_groups",
    "Device": "device",
    "Learner": "participants",
    "Observability": "learner.option_groups",
    "Observer": "participants",
    "PartyFiles": "learner.option_groups",
    "ProximalTerm": "proximal",
    "StateSharing": "learner.option_groups",
    "Timeouts": "learner.option_groups",
    "TLSConfig": "transport.tls",
    "allow_codec": "config.plugins",
    "load_model": "export.run_export",
    "load_weights": "export.run_weights",
    "register_codec": "merge.codec",
    "register_weight_copies": "learner.optimizers",
}
"""The module of each name that is imported at its first use."""


def __getattr__(name: str) -> Any:
    """Import modules that need torch at their first use, so that the command line starts fast."""
    if name == "data":
        return importlib.import_module(f"{__name__}.data")
    if name == "lab":
        return _lab()
    if name in _MODULES:
        return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{_suggestion(name)}")


def _lab() -> Any:
    """Return the lab, which a separate package provides."""
    from importlib.metadata import entry_points

    for entry in entry_points(group=f"{__name__}.modules", name="lab"):
        return entry.load()
    raise ModuleNotFoundError(
        f"{__name__}.lab is not installed: run pip install -e packages/lab in the clone"
    )


_EARLIER = {
    "Error": "DilocoError",
    "PartedData": "data.PartitionedData",
    "leased": "data.ElasticLoader",
    "load_exported": "load_model",
}
"""Earlier names whose present names are not the most similar ones."""


_OF_DATA = ("data.ElasticLoader", "data.PartitionedData")


def _suggestion(name: str) -> str:
    if name.startswith("_"):  # asked for by tools, such as pickle
        return ""
    import difflib

    places = {full.rpartition(".")[2].lower(): full for full in (*__all__, *_OF_DATA)}
    word = name.lower()
    near = difflib.get_close_matches(word, places, n=1)
    near += [place for place in places if len(word) > 1 and place.startswith(word)]
    meant = _EARLIER.get(name) or (places[near[0]] if near else "")
    return f": did you mean {meant!r}?" if meant else ""
