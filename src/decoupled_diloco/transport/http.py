"""The transport over HTTP: one port for control, bodies and health."""

from __future__ import annotations

from decoupled_diloco.transport.http_client import HttpClient
from decoupled_diloco.transport.http_server import HttpServer

__all__ = ["HttpClient", "HttpServer"]
