"""A plain client of a run's page, which reads its events in a thread."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
from typing import Any
from urllib.parse import urlencode, urlsplit


class PageReader(threading.Thread):
    """Signs in and receives the page's events, to the end.

    Attributes:
        states: The number of whole states received.
        steps: The global steps received, in order.
        end: The last message.
    """

    def __init__(self, address: str, secret: str) -> None:
        super().__init__(name="page reader", daemon=True)
        parts = urlsplit(address)
        assert parts.hostname is not None
        self._connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=60)
        self._cookie = self._sign_in(secret)
        self.state: dict[str, Any] = {}
        self.states = 0
        self.steps: list[str] = []
        self.end: dict[str, Any] | None = None

    def _sign_in(self, secret: str) -> str:
        form = {"Content-Type": "application/x-www-form-urlencoded"}
        self._connection.request("POST", "/page/sign-in", urlencode({"secret": secret}), form)
        answer = self._connection.getresponse()
        answer.read()
        assert answer.status == 303
        return (answer.getheader("Set-Cookie") or "").partition(";")[0]

    def run(self) -> None:
        self._connection.request("GET", "/page/events", headers={"Cookie": self._cookie})
        answer = self._connection.getresponse()
        assert answer.status == 200
        kind = ""
        with (
            contextlib.closing(self._connection),
            contextlib.closing(answer),
            contextlib.suppress(OSError, http.client.HTTPException),  # the server was killed
        ):
            for line in answer:
                if line.startswith(b"event: "):
                    kind = line[7:].strip().decode()
                elif line.startswith(b"data: "):
                    self._take(kind, json.loads(line[6:]))

    def _take(self, kind: str, told: dict[str, Any]) -> None:
        if kind == "end":
            self.end = told
        elif kind == "state":
            self.state, self.states = told, self.states + 1
        else:
            self.state |= told["set"]
            self.state["learners"] |= told["learners"]
            self.state["charts"] |= told["charts"]
        if kind != "end":
            self.steps.append(self.state["run"]["position"])

    def remarks(self) -> str:
        return "\n".join(text for _, text in self.state.get("remarks", ()))
