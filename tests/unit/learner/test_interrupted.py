"""Ctrl-C at the wrong moment leaves no thread behind."""

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
    """Ctrl-C comes when the event loop's thread runs already, and nobody has it yet."""

    def beside(self, main: Callable[[], Coroutine[Any, Any, None]], name: str) -> Beside:
        super().beside(main, name)
        time.sleep(0.2)  # it has begun to dial
        raise KeyboardInterrupt


def test_ctrl_c_while_the_background_starts_ends_it() -> None:
    with within(Interrupted()), pytest.raises(KeyboardInterrupt):
        Learner(nn.Linear(2, 2), "http://127.0.0.1:9")
    deadline = time.monotonic() + 10
    while any(thread.name == "ddiloco" for thread in threading.enumerate()):
        assert time.monotonic() < deadline, "it dials for ever"
        time.sleep(0.05)
