"""Where traces go: a collector that understands OTLP over HTTP, by OpenTelemetry's own library.

The library reads keys and certificates from its standard environment variables, of which nothing
is ever printed: ``OTEL_EXPORTER_OTLP_HEADERS``, ``OTEL_EXPORTER_OTLP_CERTIFICATE``, ….
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
"""Where a collector takes traces, below its address."""

BATCH_SPANS = 512
"""So many spans are sent at once."""

GIVE_UP_SECONDS = 60.0
"""A collector that takes nothing for so long is given up."""

PAUSE_SECONDS = 3.0
"""Between two tries; each is several already, within the library's timeout of 10 s."""

TEXT_MAX = 1000
"""Characters of an attribute."""

_INT_MAX = 2**63 - 1

INSTALL = "pip install 'decoupled-diloco[traces]' (in a clone: pip install -e '.[traces]')"


class Collector:
    """Sends spans, a batch at a time, and tries again for a while.

    Args:
        url: The collector's address, or that of its traces: ``http://127.0.0.1:4318``.
        give_up_seconds: So long it may take nothing.

    Attributes:
        url: Where it sends.
        sent: How many spans it has sent.

    Raises:
        ConfigError: The address is none, the library is not installed, or its settings are wrong.
    """

    def __init__(self, url: str, give_up_seconds: float = GIVE_UP_SECONDS) -> None:
        self.url = traces_url(url)
        self.sent = 0
        self._give_up_seconds = give_up_seconds
        self._batch: list[Span] = []
        self._said = _Said()
        self._answers = _LastAnswer()
        self._exporter = self._open()

    def _open(self) -> Any:
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        except ImportError as error:
            raise ConfigError(f"OpenTelemetry's exporter is not installed: {INSTALL}") from error
        self._said.listen()
        exporter = OTLPSpanExporter(endpoint=self.url, session=self._answers.session())
        if self._said.names:
            self._said.stop()
            raise ConfigError(
                "OTEL_EXPORTER_OTLP_HEADERS, or another variable of OTEL_EXPORTER_OTLP_…, cannot "
                "be read: headers are written as name=value,name=value, with %20 for a blank"
            )
        return exporter

    def send(self, spans: Iterable[Span]) -> None:
        """Takes spans, and sends them once they are a batch.

        Raises:
            TransportError: The collector refuses them, or took nothing for too long.
        """
        for span in spans:
            self._batch.append(span)
            if len(self._batch) >= BATCH_SPANS:
                self.flush()

    def flush(self) -> None:
        """Sends what it has; see `send`."""
        if not self._batch:
            return
        from opentelemetry.sdk.trace.export import SpanExportResult

        told, since = [_told(span) for span in self._batch], time.monotonic()
        while self._exporter.export(told) is not SpanExportResult.SUCCESS:
            again = time.monotonic() - since < self._give_up_seconds
            if self._answers.is_final or not again:
                raise TransportError(self._problem())
            time.sleep(PAUSE_SECONDS)
        self.sent += len(told)
        self._batch.clear()

    def close(self) -> None:
        """Sends nothing more."""
        self._exporter.shutdown()
        self._said.stop()

    def _problem(self) -> str:
        way_out = "start the collector, or mend its address"
        if self._answers.wants_key:
            way_out = "write its key into OTEL_EXPORTER_OTLP_HEADERS"
        return (
            f"{self.url} takes no traces: {self._answers.problem} ({self.sent} spans were sent): "
            f"{way_out}, and give the command again, for spans have the same ids each time"
        )


def traces_url(text: str) -> str:
    """Where a collector at this address takes traces.

    >>> traces_url("http://127.0.0.1:4318")
    'http://127.0.0.1:4318/v1/traces'
    >>> traces_url("https://otlp.example.org/otlp/v1/traces")
    'https://otlp.example.org/otlp/v1/traces'

    Raises:
        ConfigError: It is no address, or has a secret in it.
    """
    try:
        parts = urlsplit(text)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname)
        port = parts.port
    except ValueError:
        parts, is_address, port = SplitResult("", "", "", "", ""), False, None
    if parts.username is not None or parts.password is not None or parts.query or parts.fragment:
        raise ConfigError(
            "--to takes an address without user, password, query or fragment: write keys into "
            "OTEL_EXPORTER_OTLP_HEADERS, as in 'Authorization=Bearer%20KEY'"
        )
    if not is_address or port == 0:
        raise ConfigError(
            f"--to {text!r} is no address of a collector: write http://HOST:4318 or "
            "https://HOST, where it takes OTLP over HTTP"
        )
    base = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"
    return base if base.endswith(TRACES_PATH) else base + TRACES_PATH


class _LastAnswer:
    """What the collector answered last, which the library does not tell."""

    def __init__(self) -> None:
        self._status: int | None = None
        self._reason = ""
        self._error: OSError | None = None

    def session(self) -> Any:
        """A session of ``requests`` that notes them."""
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
        """Whether trying again cannot help."""
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
            return "its request cannot be made, see OTEL_EXPORTER_OTLP_HEADERS"
        return f"it answers {self._status} {self._reason}".rstrip()


def _innermost(error: BaseException) -> str:
    """What the lowest layer says: the layers above repeat it at length."""
    found: BaseException = error
    while True:
        deeper = getattr(found, "reason", None) or (found.args[0] if found.args else None)
        deeper = found.__cause__ or (deeper if isinstance(deeper, BaseException) else None)
        if deeper is None:
            break
        found = deeper
    return str(found).rpartition(": ")[2] if isinstance(found, OSError) else str(found)


class _Said(logging.Handler):
    """Keeps what the library says off the terminal, for there may be keys in it."""

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


def _told(span: Span) -> ReadableSpan:
    """The span as the library has it."""
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

    told: Attributes = {
        "service.name": process.name,
        "service.instance.id": process.instance,
        "service.namespace": process.run or "decoupled-diloco",
        "service.version": process.release,
        "ddiloco.run": process.run,
    }
    return Resource.create(_plain(told))


def _plain(attributes: Attributes) -> dict[str, Attribute]:
    """What the wire format can hold: a tape may be spoilt."""
    return {key: _value(value) for key, value in attributes.items()}


def _value(value: Attribute) -> Attribute:
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, int) and abs(value) > _INT_MAX:
        return _text(str(value))
    return value


def _text(text: str) -> str:
    return text[:TEXT_MAX].encode(errors="replace").decode()
