"""Hosts that are dialed without the environment's proxy."""

from __future__ import annotations

import socket

import pytest
from yarl import URL

from decoupled_diloco.transport.routing import proxy_for


@pytest.fixture(autouse=True)
def proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("no_proxy", "NO_PROXY", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")


@pytest.mark.parametrize(
    ("no_proxy", "host"),
    [
        ("10.0.0.0/8", "10.1.2.3"),
        ("x.lan, 172.16.0.0/12", "172.20.0.1"),
        ("10.1.2.3/8", "10.9.9.9"),
        ("fd00::/8", "[fd00::1]"),
        ("[fd00::1]", "[fd00::1]"),
        ("[fd00::1]:7070", "[fd00::1]"),
        ("10.1.2.3", "10.1.2.3"),
        ("10.1.2.3:7070", "10.1.2.3"),
        (".lan", "syncer.lan"),
        ("*.lan", "syncer.lan"),
        ("lan", "syncer.lan"),
        ("LAN:7070", "syncer.lan"),
        ("a, *", "syncer"),
        ("", socket.gethostname()),
        ("", "localhost"),
    ],
)
def test_a_host_in_no_proxy_is_dialed_directly(
    monkeypatch: pytest.MonkeyPatch, no_proxy: str, host: str
) -> None:
    monkeypatch.setenv("no_proxy", no_proxy)
    assert proxy_for(URL(f"http://{host}:7070")) is None


@pytest.mark.parametrize(
    ("no_proxy", "host"),
    [
        ("10.0.0.0/8", "11.1.1.1"),
        ("10.0.0.0/8", "ten.lan"),
        ("10.0.0.0/99", "10.1.2.3"),
        ("syncer.lan:80", "syncer.lan"),
        ("lan", "other-lan"),
        ("", "syncer"),
        (",", "syncer"),
    ],
)
def test_other_hosts_are_dialed_through_the_proxy(
    monkeypatch: pytest.MonkeyPatch, no_proxy: str, host: str
) -> None:
    monkeypatch.setenv("no_proxy", no_proxy)
    assert str(proxy_for(URL(f"http://{host}:7070"))) == "http://127.0.0.1:9"
