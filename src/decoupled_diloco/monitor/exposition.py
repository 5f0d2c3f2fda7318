"""Prometheus' text format, made by its own client library, one metric at a time.

A scrape of a shard with thousands of learners is megabytes of text. So it is made in turns of the
event loop, one metric each (`page`): with 4,000 learners 0.2 s of a core, and no turn above 0.1 s.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate
from typing import Any

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    SummaryMetricFamily,
)
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from decoupled_diloco._version import __version__
from decoupled_diloco.monitor.measures import INFO, Measure
from decoupled_diloco.monitor.tally import SECONDS_BOUNDS, Durations
from decoupled_diloco.observe.samples import BytesMoved
from decoupled_diloco.transport.documents import Document

Labelled = Iterable[tuple[tuple[str, ...], float | None]]
Values = float | None | Labelled | Durations | tuple[int, float]
"""Of a gauge or counter its number, or one for each of its labels' values, ``None``: not known; of
a histogram what was counted, of a summary how often and how much."""


async def page(measures: Iterable[Measure], values: Mapping[str, Callable[[], Values]]) -> Document:
    """The answer to a scrape; each metric is asked for its value when it is its turn."""
    texts = []
    for measure in measures:
        texts.append(_text([_family(measure, values[measure.name]())]))
        await asyncio.sleep(0)
    texts.append(_text(ProcessCollector(registry=None).collect()))
    return Document(b"".join(texts), content_type=CONTENT_TYPE_PLAIN_0_0_4)


def info(process: str, run: str) -> Labelled:
    """The value of ``ddiloco_info``."""
    assert INFO.labels == ("process", "run_name", "version")
    return [((process, run, __version__), 1.0)]


def planes(moved: BytesMoved) -> tuple[Labelled, Labelled]:
    """Bytes sent and received, by plane."""
    sent = [(("control",), moved.control_sent), (("data",), moved.data_sent)]
    received = [(("control",), moved.control_received), (("data",), moved.data_received)]
    return sent, received


class _These(Collector):
    def __init__(self, families: Iterable[Family]) -> None:
        self._families = families

    def collect(self) -> Iterable[Family]:
        return self._families


def _text(families: Iterable[Family]) -> bytes:
    made: bytes = generate_latest(_These(families))
    return made


def _family(measure: Measure, values: Any) -> Family:
    """A metric of the client library."""
    name, told = measure.name, measure.help
    match measure.kind:
        case "histogram":
            bounds = (*map(str, SECONDS_BOUNDS), "+Inf")
            buckets = list(zip(bounds, accumulate(values.counts), strict=True))
            return HistogramMetricFamily(name, told, buckets=buckets, sum_value=values.seconds)
        case "summary":
            return SummaryMetricFamily(name, told, count_value=values[0], sum_value=values[1])
    kind = CounterMetricFamily if measure.kind == "counter" else GaugeMetricFamily
    family = kind(name, told, labels=measure.labels)
    for labels, value in _labelled(values):
        family.add_metric(labels, value)
    return family


def _labelled(values: float | Labelled | None) -> Iterator[tuple[tuple[str, ...], float]]:
    """The series that there are: what is not known has none."""
    each = [((), values)] if values is None or isinstance(values, int | float) else values
    return ((labels, value) for labels, value in each if value is not None)
