"""What others import stays what it is, and answers at once."""

from __future__ import annotations

import subprocess
import sys

import decoupled_diloco as dd


def test_the_public_names_are_these() -> None:
    assert dd.__all__ == [
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
    assert all(hasattr(dd, name) for name in dd.__all__)


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
