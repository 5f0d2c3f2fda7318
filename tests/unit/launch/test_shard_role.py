"""The connection limit of a shard's server follows the system's limit of open files."""

from __future__ import annotations

import logging
import resource
from collections.abc import Iterator

import pytest

from decoupled_diloco.launch import shard_role
from decoupled_diloco.launch.shard_role import limits_here
from decoupled_diloco.storage.files import SPARE
from decoupled_diloco.transport.limits import Limits


@pytest.fixture
def files() -> Iterator[tuple[int, int]]:
    """Yield the limits of open files, and restore them after the test."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield before
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_the_process_raises_its_own_limit(files: tuple[int, int]) -> None:
    _, hard = files
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    wanted = limits_here(4).connections
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert wanted == Limits().connections or wanted == soft - SPARE
    assert soft == hard or soft >= wanted + SPARE


def test_a_too_low_limit_of_the_system_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shard_role, "open_files_allowed", lambda files: 1024)
    with caplog.at_level(logging.WARNING):
        assert limits_here(4).connections == 1024 - SPARE
        assert caplog.text == ""
        assert limits_here(4000).connections == 1024 - SPARE
    assert "too low for 4000 learners with 4 connections each: raise it" in caplog.text
