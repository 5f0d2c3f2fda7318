"""A small OTLP collector over HTTP on loopback, which keeps the protobuf messages it receives."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class ReceivingCollector:
    """The received spans, each with the attributes of its resource.

    Attributes:
        url: Its address.
        answers: Status codes for the next requests; then 200.
        requests: Path, headers and number of spans of each request.
        spans: Spans of all requests that were answered with 200.
    """

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.answers: list[int] = []
        self.requests: list[tuple[str, dict[str, str], int]] = []
        self.spans: list[tuple[dict[str, str], Any]] = []

    def take(self, path: str, headers: dict[str, str], body: bytes) -> int:
        request = ExportTraceServiceRequest.FromString(body)
        spans = [
            ({a.key: a.value.string_value for a in each.resource.attributes}, span)
            for each in request.resource_spans
            for scope in each.scope_spans
            for span in scope.spans
        ]
        self.requests.append((path, headers, len(spans)))
        status = self.answers.pop(0) if self.answers else 200
        self.spans += spans if status == 200 else []
        return status


@contextmanager
def receiving() -> Iterator[ReceivingCollector]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(collector.take(self.path, dict(self.headers.items()), body))
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    collector = ReceivingCollector(server.server_address[1])
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
