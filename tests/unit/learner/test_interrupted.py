"""Ctrl-C during the start of the background leaves no thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from torch import nn

from decoupled_diloco import Learner
from decoupled_diloco.runtime import Beside, Runtime, within


class Interrupted(Runtime):
    """A runtime with Ctrl-C when the event loop's thread runs but was not returned yet."""

    def beside(self, main: Callable[[], Coroutine[Any, Any, None]], name: str) -> Beside:
        super().beside(main, name)
        time.sleep(0.2)  # it has started to connect
        raise KeyboardInterrupt


def test_ctrl_c_while_the_background_starts_ends_it() -> None:
    with within(Interrupted()), pytest.raises(KeyboardInterrupt):
        Learner(nn.Linear(2, 2), "http://127.0.0.1:9")
    deadline = time.monotonic() + 10
    while any(thread.name == "ddiloco" for thread in threading.enumerate()):
        assert time.monotonic() < deadline, "it tries to connect forever"
        time.sleep(0.05)
