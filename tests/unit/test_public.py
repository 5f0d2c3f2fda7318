"""What others import stays what it is, and answers at once."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import decoupled_diloco as dd


def test_the_public_names_are_these() -> None:
    assert dd.__all__ == [
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
    assert all(hasattr(dd, name) for name in dd.__all__)


def test_each_public_name_has_a_level() -> None:
    """`dd.data` has its names in the table."""
    page = (Path(__file__).parents[2] / "docs/reference/stability.md").read_text()
    rows = [line for line in page.splitlines() if re.search(r"\| (stable|beta|internal) \|$", line)]
    for name in dd.__all__:
        where = f"dd.data.{dd.data.__all__[0]}" if name == "data" else name
        assert any(re.search(rf"`(dd\.)?{re.escape(where)}`", row) for row in rows), name


LEARNER = (
    *("addresses", "attach", "budget_reached", "checkpoint", "close", "count", "discarded_tokens"),
    *("ended", "flush", "global_step", "incarnation", "index", "load_state_dict", "name"),
    *("on_weights_updated", "rejection_reason", "request_stop", "run_config", "state_dict", "step"),
    *("steps", "tokens", "versions", "wrap"),
)
DEVICE = ("close", "name", "save", "step", "steps", "tokens", "train", "visit")
OBSERVER = (
    *("averaged", "budget_reached", "close", "done", "ended", "global_step", "log", "name", "pull"),
    *("rejection_reason", "run_config", "updates", "versions", "wait"),
)
ELASTIC_LOADER = (
    *("bind", "iter_partition", "load_state_dict", "partitions", "position", "state_dict"),
)


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (dd.Learner, LEARNER),
        (dd.Device, DEVICE),
        (dd.Observer, OBSERVER),
        (dd.data.ElasticLoader, ELASTIC_LOADER),
    ],
)
def test_the_public_members_of_a_class_are_these(kind: type, names: tuple[str, ...]) -> None:
    assert tuple(name for name in dir(kind) if not name.startswith("_")) == names


ARGUMENTS: dict[Any, tuple[str, ...]] = {
    dd.Learner: (
        *("model", "syncer", "name", "auth_token", "tls", "optimizer", "checkpoint", "timeouts"),
        *("state_sharing", "observability", "sync_ranks", "party"),
    ),
    dd.Device: (
        *("model", "syncer", "name", "checkpoint", "auth_token", "tls", "optimizer", "timeouts"),
        *("observability", "party"),
    ),
    dd.Learner.step: ("self", "loss", "tokens"),
    dd.Device.step: ("self", "loss", "tokens"),
    dd.Device.train: ("self", "step", "steps", "tokens"),
    dd.Observer: ("model", "syncer", "name", "auth_token", "tls", "timeouts", "event_tape"),
    dd.Checkpointing: ("folder", "interval_seconds", "state"),
    dd.Timeouts: ("join", "disconnect", "flush"),
    dd.StateSharing: ("objects",),
    dd.PartyFiles: ("parties", "key"),
    dd.Observability: ("tracker", "metrics_address", "event_tape"),
    dd.data.ElasticLoader: (
        *("dataset", "partitions", "batch_size", "seed", "prefetch", "loader_options"),
    ),
}


@pytest.mark.parametrize("kind", ARGUMENTS)
def test_the_arguments_are_these(kind: Any) -> None:
    assert tuple(inspect.signature(kind).parameters) == ARGUMENTS[kind]


def test_the_module_of_data_has_two_names() -> None:
    assert dd.data.__all__ == ["ElasticLoader", "PartitionedData"]


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        *[("ElasticLoader", "data.ElasticLoader"), ("Error", "DilocoError"), ("Tls", "TLSConfig")],
        *[("TlsConfig", "TLSConfig"), ("Timeout", "Timeouts"), ("leased", "data.ElasticLoader")],
        *[("load_exported", "load_model"), ("load_weight", "load_weights"), ("Syncer", "")],
    ],
)
def test_a_name_that_does_not_exist_gets_a_suggestion(name: str, meant: str) -> None:
    with pytest.raises(AttributeError) as caught:
        getattr(dd, name)
    suggestion = f": did you mean {meant!r}?" if meant else ""
    assert str(caught.value) == f"module 'decoupled_diloco' has no attribute {name!r}{suggestion}"


def test_a_suggestion_needs_no_torch() -> None:
    code = (
        "import sys, decoupled_diloco as dd\n"
        "assert not hasattr(dd, 'Timeout') and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_help_is_told_without_torch() -> None:
    """`ddiloco --help` would take seconds with it; so would each completion."""
    code = (
        "import sys; from decoupled_diloco.cli.main import app\n"
        "try: app(['--help'])\n"
        "except SystemExit as end: assert not end.code\n"
        "slow = {'torch', 'numpy', 'matplotlib', 'aiohttp', 'sklearn', 'transformers'}\n"
        "assert not slow & set(sys.modules), slow & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Usage: " in done.stdout
