"""Decoupled DiLoCo for PyTorch: learners that never wait, a syncer that merges what it can get.

>>> import decoupled_diloco as dd
>>> dd.Learner.__name__
'Learner'
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from decoupled_diloco._version import __version__
from decoupled_diloco.errors import (
    AccessError,
    ConfigError,
    Error,
    MergeError,
    ProtocolError,
    StorageError,
    TransportError,
)

if TYPE_CHECKING:
    from decoupled_diloco import ray
    from decoupled_diloco.config.plugins import allow_codec
    from decoupled_diloco.export.run import load_exported
    from decoupled_diloco.export.weights import load_weights
    from decoupled_diloco.learner.leased import (
        LeasedBatches,
        MapParts,
        PartedData,
        StreamParts,
        leased,
    )
    from decoupled_diloco.learner.observer import Observer
    from decoupled_diloco.learner.weight_copies import register_weight_copies
    from decoupled_diloco.merge.codec import register_codec
    from decoupled_diloco.ranks.learner import Learner
    from decoupled_diloco.transport.tls import Tls

__all__ = [
    "AccessError",
    "ConfigError",
    "Error",
    "Learner",
    "LeasedBatches",
    "MapParts",
    "MergeError",
    "Observer",
    "PartedData",
    "ProtocolError",
    "StorageError",
    "StreamParts",
    "Tls",
    "TransportError",
    "__version__",
    "allow_codec",
    "leased",
    "load_exported",
    "load_weights",
    "ray",
    "register_codec",
    "register_weight_copies",
]


def __getattr__(name: str) -> Any:
    """Imports torch only when it is needed: the command line answers at once."""
    if name == "Learner":
        from decoupled_diloco.ranks.learner import Learner

        return Learner
    if name == "Observer":
        from decoupled_diloco.learner.observer import Observer

        return Observer
    if name in ("LeasedBatches", "MapParts", "PartedData", "StreamParts", "leased"):
        from decoupled_diloco.learner import leased

        return getattr(leased, name)
    if name == "register_weight_copies":
        from decoupled_diloco.learner.weight_copies import register_weight_copies

        return register_weight_copies
    if name == "Tls":
        from decoupled_diloco.transport.tls import Tls

        return Tls
    if name == "load_exported":
        from decoupled_diloco.export.run import load_exported

        return load_exported
    if name == "load_weights":
        from decoupled_diloco.export.weights import load_weights

        return load_weights
    if name == "allow_codec":
        from decoupled_diloco.config.plugins import allow_codec

        return allow_codec
    if name == "register_codec":
        from decoupled_diloco.merge.codec import register_codec

        return register_codec
    if name == "ray":
        import importlib

        return importlib.import_module("decoupled_diloco.ray")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
