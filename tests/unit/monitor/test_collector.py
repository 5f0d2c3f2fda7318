"""Failures of a collector: wrong address, missing key, missing library, no answer."""

from __future__ import annotations

import logging
import sys
from io import StringIO

import pytest

from decoupled_diloco.errors import ConfigError, TransportError
from decoupled_diloco.monitor import collector as collector_module
from decoupled_diloco.monitor.collector import Collector
from decoupled_diloco.monitor.spans import Process, Span
from free_ports import free_ports
from otlp_collector import receiving

SPAN = Span(1, 2, None, "round", Process("shard-0", "made-up", 1.5), 10, 20)
KEY = "hush-hush"


def send_to(url: str, **options: float) -> Collector:
    sender = Collector(url, **options)
    try:
        sender.send([SPAN])
        sender.flush()
    finally:
        sender.close()
    return sender


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        (
            "127.0.0.1:4318",
            "--collector '127.0.0.1:4318' is not a valid collector address: write http://HOST:4318",
        ),
        ("grpc://here:4317", "is not a valid collector address"),
        ("http://", "is not a valid collector address"),
        ("http://here:99999", "is not a valid collector address"),
        ("http://here:0", "is not a valid collector address"),
        (f"https://me:{KEY}@here", "write keys into OTEL_EXPORTER_OTLP_HEADERS"),
        (f"https://here/?key={KEY}", "write keys into OTEL_EXPORTER_OTLP_HEADERS"),
    ],
)
def test_a_wrong_address_is_reported(url: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as told:
        Collector(url)
    assert sentence in str(told.value)
    assert KEY not in str(told.value)


def test_a_missing_library_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
    monkeypatch.setitem(sys.modules, name, None)  # as if it were not installed
    with pytest.raises(ConfigError, match=r"run pip install -e '\.\[traces\]' in the clone"):
        Collector("http://127.0.0.1:4318")


def test_headers_and_path_are_those_of_the_standard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", f"Authorization=Bearer%20{KEY}")
    with receiving() as collector:
        for url in (collector.url, f"{collector.url}/", f"{collector.url}/v1/traces"):
            send_to(url)
    assert {path for path, _, _ in collector.requests} == {"/v1/traces"}
    headers = {name.lower(): value for name, value in collector.requests[0][1].items()}
    assert headers["authorization"] == f"Bearer {KEY}"
    told, span = collector.spans[0]
    assert (told["service.name"], told["service.namespace"]) == ("shard-0", "made-up")
    assert told["service.instance.id"] == "shard-0@1970-01-01T00:00:01.500000Z"
    assert (span.trace_id, span.span_id) == ((1).to_bytes(16), (2).to_bytes(8))


@pytest.mark.parametrize("headers", [KEY, f"key={KEY}%0Amore"])
def test_invalid_headers_are_reported_without_their_content(
    monkeypatch: pytest.MonkeyPatch, headers: str
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", headers)
    shown = StringIO()
    handler = logging.StreamHandler(shown)
    logging.getLogger().addHandler(handler)
    try:
        with pytest.raises((ConfigError, TransportError)) as told:
            send_to("http://127.0.0.1:4318")
    finally:
        logging.getLogger().removeHandler(handler)
    assert "OTEL_EXPORTER_OTLP_HEADERS" in str(told.value)
    assert KEY not in str(told.value) + shown.getvalue()


def test_a_collector_that_requires_a_key_is_reported_at_once() -> None:
    with receiving() as collector:
        collector.answers = [401]
        with pytest.raises(TransportError) as told:
            send_to(collector.url)
    assert "answered 401 Unauthorized (0 spans were sent): write its key into" in str(told.value)
    assert len(collector.requests) == 1


def test_a_collector_that_comes_back_receives_all_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collector_module, "PAUSE_SECONDS", 0.01)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.5")  # so that each attempt is one request
    with receiving() as collector:
        collector.answers = [503, 503]
        sender = send_to(collector.url)
    assert len(collector.spans) == sender.sent == 1
    assert len(collector.requests) >= 3


def test_an_unreachable_collector_is_an_error_after_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(collector_module, "PAUSE_SECONDS", 0.01)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.2")
    (port,) = free_ports(1)
    with pytest.raises(TransportError, match=r"Connection refused \(0 spans were sent\): start"):
        send_to(f"http://127.0.0.1:{port}", give_up_seconds=0.3)
