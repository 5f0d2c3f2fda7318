"""Export of traces to a collector for OTLP over HTTP, with OpenTelemetry's library.

The library reads keys and certificates from its standard environment variables:
``OTEL_EXPORTER_OTLP_HEADERS``, ``OTEL_EXPORTER_OTLP_CERTIFICATE``, …. They are never printed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from functools import cache
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, urlsplit

from decoupled_diloco._version import __version__
from decoupled_diloco.errors import ConfigError, TransportError
from decoupled_diloco.monitor.spans import Attribute, Attributes, Process, Span

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.trace import SpanContext

TRACES_PATH = "/v1/traces"
"""Path of the traces, relative to the collector's address."""

BATCH_SPANS = 512
"""Spans per request."""

GIVE_UP_SECONDS = 60.0
"""Time after which a collector that accepts nothing is an error."""

PAUSE_SECONDS = 3.0
"""Pause between two attempts. Each attempt includes the library's own retries, up to 10 s."""

TEXT_MAX = 1000
"""Maximum number of characters in an attribute."""

_INT_MAX = 2**63 - 1

INSTALL = "run pip install -e '.[traces]' in the clone"


class Collector:
    """Sends spans in batches, with retries.

    Args:
        url: Address of the collector or of its traces: ``http://127.0.0.1:4318``.
        give_up_seconds: Time during which the collector may reject everything.

    Attributes:
        url: The URL to which it sends.
        sent: Number of spans sent.

    Raises:
        ConfigError: The address or the library's settings are not valid, or the library is not
            installed.
    """

    def __init__(self, url: str, give_up_seconds: float = GIVE_UP_SECONDS) -> None:
        self.url = traces_url(url)
        self.sent = 0
        self._give_up_seconds = give_up_seconds
        self._batch: list[Span] = []
        self._log = _LibraryLog()
        self._answers = _LastAnswer()
        self._exporter = self._open()

    def _open(self) -> Any:
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        except ImportError as error:
            raise ConfigError(f"OpenTelemetry's exporter is not installed: {INSTALL}") from error
        self._log.listen()
        exporter = OTLPSpanExporter(endpoint=self.url, session=self._answers.session())
        if self._log.names:
            self._log.stop()
            raise ConfigError(
                "OTEL_EXPORTER_OTLP_HEADERS, or another variable of OTEL_EXPORTER_OTLP_…, cannot "
                "be read: write headers as name=value,name=value, with %20 for a space"
            )
        return exporter

    def send(self, spans: Iterable[Span]) -> None:
        """Add spans, and send each full batch.

        Raises:
            TransportError: The collector rejects them, or accepted nothing for too long.
        """
        for span in spans:
            self._batch.append(span)
            if len(self._batch) >= BATCH_SPANS:
                self.flush()

    def flush(self) -> None:
        """Send the spans that are still buffered; see `send`."""
        if not self._batch:
            return
        from opentelemetry.sdk.trace.export import SpanExportResult

        batch, since = [_readable(span) for span in self._batch], time.monotonic()
        while self._exporter.export(batch) is not SpanExportResult.SUCCESS:
            again = time.monotonic() - since < self._give_up_seconds
            if self._answers.is_final or not again:
                raise TransportError(self._problem())
            time.sleep(PAUSE_SECONDS)
        self.sent += len(batch)
        self._batch.clear()

    def close(self) -> None:
        """Shut the exporter down; buffered spans are not sent."""
        self._exporter.shutdown()
        self._log.stop()

    def _problem(self) -> str:
        fix = "start the collector, or correct its address"
        if self._answers.wants_key:
            fix = "write its key into OTEL_EXPORTER_OTLP_HEADERS"
        return (
            f"{self.url} accepts no traces: {self._answers.problem} ({self.sent} spans were sent): "
            f"{fix}, then repeat the command: spans have the same ids each time"
        )


def traces_url(text: str) -> str:
    """Return the URL for traces of the collector at an address.

    >>> traces_url("http://127.0.0.1:4318")
    'http://127.0.0.1:4318/v1/traces'
    >>> traces_url("https://otlp.example.org/otlp/v1/traces")
    'https://otlp.example.org/otlp/v1/traces'

    Raises:
        ConfigError: The address is not valid, or contains a secret.
    """
    try:
        parts = urlsplit(text)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname)
        port = parts.port
    except ValueError:
        parts, is_address, port = SplitResult("", "", "", "", ""), False, None
    if parts.username is not None or parts.password is not None or parts.query or parts.fragment:
        raise ConfigError(
            "--collector must be an address without user, password, query or fragment: write keys "
            "into OTEL_EXPORTER_OTLP_HEADERS, as in 'Authorization=Bearer%20KEY'"
        )
    if not is_address or port == 0:
        raise ConfigError(
            f"--collector {text!r} is not a valid collector address: write http://HOST:4318 or "
            "https://HOST, where it accepts OTLP over HTTP"
        )
    base = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"
    return base if base.endswith(TRACES_PATH) else base + TRACES_PATH


class _LastAnswer:
    """The collector's last answer, which the library does not expose."""

    def __init__(self) -> None:
        self._status: int | None = None
        self._reason = ""
        self._error: OSError | None = None

    def session(self) -> Any:
        """Return a ``requests`` session that records answers and errors."""
        import requests

        answers = self

        class NotingSession(requests.Session):
            def send(self, request: Any, **options: Any) -> Any:
                answers._status, answers._error = None, None
                try:
                    answer = super().send(request, **options)
                except OSError as error:
                    answers._error = error
                    raise
                answers._status, answers._reason = answer.status_code, str(answer.reason or "")
                return answer

        return NotingSession()

    @property
    def is_final(self) -> bool:
        """Whether another attempt cannot help."""
        import requests

        if self._error is not None:
            return not isinstance(self._error, requests.ConnectionError | requests.Timeout) or (
                isinstance(self._error, requests.exceptions.SSLError)
            )
        return self._status is None or self._status not in (429, 502, 503, 504)

    @property
    def wants_key(self) -> bool:
        return self._status in (401, 403)

    @property
    def problem(self) -> str:
        if self._error is not None:
            return _innermost(self._error)
        if self._status is None:
            return "the request cannot be created, see OTEL_EXPORTER_OTLP_HEADERS"
        return f"it answered {self._status} {self._reason}".rstrip()


def _innermost(error: BaseException) -> str:
    """Return the text of the innermost error; the outer layers repeat it at length."""
    found: BaseException = error
    while True:
        deeper = getattr(found, "reason", None) or (found.args[0] if found.args else None)
        deeper = found.__cause__ or (deeper if isinstance(deeper, BaseException) else None)
        if deeper is None:
            break
        found = deeper
    return str(found).rpartition(": ")[2] if isinstance(found, OSError) else str(found)


class _LibraryLog(logging.Handler):
    """Keeps the library's log off the terminal, because it may contain keys."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def listen(self) -> None:
        logger = logging.getLogger("opentelemetry")
        logger.addHandler(self)
        logger.propagate = False

    def stop(self) -> None:
        logger = logging.getLogger("opentelemetry")
        logger.removeHandler(self)
        logger.propagate = True

    def emit(self, record: logging.LogRecord) -> None:
        self.names.append(record.name)


def _readable(span: Span) -> ReadableSpan:
    """Convert a span to the library's class."""
    from opentelemetry.sdk.trace import Event, ReadableSpan
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import Link, SpanKind, Status, StatusCode

    link = span.link
    return ReadableSpan(
        span.name,
        context=_context(span.trace, span.id),
        parent=None if span.parent is None else _context(span.trace, span.parent),
        resource=_resource(span.process),
        attributes=_plain(span.attributes),
        events=[Event(e.name, _plain(e.attributes), e.at) for e in span.events],
        links=[] if link is None else [Link(_context(link.trace, link.span))],
        kind=SpanKind[span.kind.upper()],
        status=Status(StatusCode.ERROR, _text(span.error)) if span.error else Status(),
        start_time=span.start,
        end_time=span.end,
        instrumentation_scope=InstrumentationScope("decoupled_diloco", __version__),
    )


def _context(trace: int, span: int) -> SpanContext:
    from opentelemetry.trace import SpanContext, TraceFlags

    return SpanContext(trace, span, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))


@cache
def _resource(process: Process) -> Resource:
    from opentelemetry.sdk.resources import Resource

    attributes: Attributes = {
        "service.name": process.name,
        "service.instance.id": process.instance,
        "service.namespace": process.run or "decoupled-diloco",
        "service.version": process.release,
        "ddiloco.run": process.run,
    }
    return Resource.create(_plain(attributes))


def _plain(attributes: Attributes) -> dict[str, Attribute]:
    """Limit values to what the wire format can represent; a tape may be corrupted."""
    return {key: _value(value) for key, value in attributes.items()}


def _value(value: Attribute) -> Attribute:
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, int) and abs(value) > _INT_MAX:
        return _text(str(value))
    return value


def _text(text: str) -> str:
    return text[:TEXT_MAX].encode(errors="replace").decode()
