"""Find free ports for tests that must know a port before a server listens on it.

The ports are below those that the kernel assigns to connections and to port 0, and each worker of
pytest-xdist has its own range. So no other process takes a port before it is used.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket

_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_FIRST, _EACH = 10_000, 2_500
_untried = random.sample(range(_EACH), _EACH)


def free_ports(count: int) -> list[int]:
    """Return this many free ports, all different from earlier ones of this process."""
    found: list[int] = []
    while len(found) < count:
        port = _FIRST + _WORKER % 8 * _EACH + _untried.pop()
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            found.append(port)
    return found
