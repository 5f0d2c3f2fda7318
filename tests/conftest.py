"""Hooks and fixtures for all tests."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator

import pytest

# A background job may start with interrupts ignored, and every process that a test starts would
# inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Group tests by shared fixture, so that with `--dist=loadgroup` one process creates it."""
    for item in items:
        info = getattr(item, "_fixtureinfo", None)
        used = [each[-1] for each in info.name2fixturedefs.values()] if info else []
        shared = {each.baseid for each in used if each.scope in ("module", "session")}
        ours = sorted(each for each in shared if each.startswith("tests/"))
        if ours and not item.get_closest_marker("xdist_group"):
            item.add_marker(pytest.mark.xdist_group(ours[0]))


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Fail if groups are ignored: each process would silently create each shared fixture."""
    if not getattr(session.config.option, "loadgroup", False):
        return
    for item in session.items:
        if item.get_closest_marker("xdist_group") and "@" not in item.nodeid:
            raise pytest.UsageError("pytest and pytest-xdist ignore groups: see pyproject.toml")


def learners() -> set[threading.Thread]:
    """Return the threads of learners in this process."""
    return {thread for thread in threading.enumerate() if thread.name == "ddiloco"}


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """After each test, restore the interrupt handler and check that no learner still runs."""
    handler, before = signal.getsignal(signal.SIGINT), learners()
    yield
    signal.signal(signal.SIGINT, handler)
    until = time.monotonic() + 5
    while (left := learners() - before) and time.monotonic() < until:
        time.sleep(0.01)
    assert not left, "the test leaves a running learner"
