"""History of a run: a bounded number of samples of its `RunModel`, and their charts.

The model has only the present state, whatever the run's length. `PageHistory` samples it at equal
intervals of the run's time, also while an old tape is read. If there are too many samples, every
other one is dropped, and the interval doubles.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

from markupsafe import Markup

from decoupled_diloco.run_model import RunModel
from decoupled_diloco.run_model.facts import Rate
from decoupled_diloco.run_model.phrases import listing, natural
from decoupled_diloco.show.charts import Canvas, Chart, Frame, Point, framed
from decoupled_diloco.show.figures import COLORS, loss_limits, time_unit
from decoupled_diloco.show.status import ABSENT_STATES, state_of
from decoupled_diloco.units import format_count

SAMPLES_MAX = 360
INTERVAL_SECONDS = 1.0
"""Initial interval between samples."""

LINES_MAX = 12
"""With more learners than this, one line shows the median of their losses, in a band."""

MEDIAN, LOW, HIGH = "median", "first tenth", "last tenth"
"""Names of the lines that represent many learners."""

POINTS_MAX = 900
"""Approximate maximum of points in all lines of a chart, which is sent again at each sample."""

AWAY_STATES = (*ABSENT_STATES, "finished", "ended")
"""States in which a learner's time does not count."""

GROUPS = {
    "training": ("stepping",),
    "joining": ("joining", "joined", "restarting"),
    "waiting": ("quiet",),
    "cutoff": ("cut off", "out of reach"),
    "down": ("down",),
    "gone": AWAY_STATES,
}
"""Layers of the chart of states, from the bottom, by their class."""

Show = Callable[[float], str]

Span = list[Any]
"""Number of the first sample, and the state."""


class PageSample(NamedTuple):
    """A run at one instant: rates per second, number of learners by state, losses by name."""

    tokens: float | None
    sent: float | None
    received: float | None
    states: dict[str, int]
    losses: dict[str, float | None]


@dataclass
class PageHistory:
    """Samples of a run, and values derived from them.

    Attributes:
        interval: Seconds between two samples.
        spans: For each learner and shard, its states, each with the number of its first sample.
        evaluations: Instants and losses of the global weights.
        thinned: Number of times that samples were dropped.
    """

    interval: float = INTERVAL_SECONDS
    samples: list[PageSample] = field(default_factory=list)
    spans: dict[str, list[Span]] = field(default_factory=dict)
    evaluations: list[Point] = field(default_factory=list)
    thinned: int = 0
    stepping_seconds: float = 0.0
    learner_seconds: float = 0.0
    sent: Rate = field(default_factory=Rate)
    received: Rate = field(default_factory=Rate)
    _evaluated_at: float = -1.0

    @property
    def due(self) -> float:
        """The instant of the next sample, in seconds since the run's first record."""
        return len(self.samples) * self.interval

    @property
    def time_in_steps(self) -> float | None:
        """Approximate share of the learners' time so far that was spent in steps."""
        return self.stepping_seconds / self.learner_seconds if self.learner_seconds else None

    def follow(self, run: RunModel, now: float) -> None:
        """Take the samples that are due at `now`; `run` has the current state."""
        for evaluation in run.evaluations[-1:]:
            if evaluation.at > self._evaluated_at and evaluation.loss is not None:
                self._evaluated_at = evaluation.at
                self.evaluations.append((evaluation.at, evaluation.loss))
                if len(self.evaluations) > SAMPLES_MAX:
                    self.evaluations = self.evaluations[:-1:2] + self.evaluations[-1:]
        moved = run.bytes_total
        if moved is not None:
            self.sent.add(now, moved.data_sent)
            self.received.add(now, moved.data_received)
        while self.due <= now:
            self._sample(run, min(now, self.due))

    def _sample(self, run: RunModel, at: float) -> None:
        states = {name: state_of(run, one, at) for name, one in run.learners.items()}
        shards = {name: shard.phase for name, shard in run.shards.items()}
        for name, state in (states | shards).items():
            spans = self.spans.setdefault(name, [])
            if not spans or spans[-1][1] != state:
                spans.append([len(self.samples), state])
        if run.tokens:
            there = [state for state in states.values() if state not in AWAY_STATES]
            self.learner_seconds += self.interval * len(there)
            self.stepping_seconds += self.interval * there.count("stepping")
        rates = (rate.per_second(at) for rate in (run.token_rate, self.sent, self.received))
        tokens, sent, received = rates
        counts = Counter(states.values())
        self.samples.append(PageSample(tokens, sent, received, counts, _losses(run)))
        if len(self.samples) > SAMPLES_MAX:
            self._thin()

    def _thin(self) -> None:
        """Replace each two samples with one: means of rates and losses, otherwise the later one."""
        pairs = (self.samples[i : i + 2] for i in range(0, len(self.samples), 2))
        self.samples = [
            pair[-1]._replace(
                tokens=_mean(each.tokens for each in pair),
                sent=_mean(each.sent for each in pair),
                received=_mean(each.received for each in pair),
                losses={n: _mean(each.losses.get(n) for each in pair) for n in pair[-1].losses},
            )
            for pair in pairs
        ]
        self.interval *= 2
        self.thinned += 1
        for name, spans in self.spans.items():
            kept: list[Span] = []
            for begin, state in spans:
                if kept and kept[-1][0] == begin // 2:
                    kept.pop()
                if not kept or kept[-1][1] != state:
                    kept.append([begin // 2, state])
            self.spans[name] = kept

    def series(self, values: Iterable[float | None]) -> list[Point]:
        """Return one value per sample over the run's seconds, without unknown values."""
        numbered = enumerate(values)
        return [(n * self.interval, value) for n, value in numbered if value is not None]


def _losses(run: RunModel) -> dict[str, float | None]:
    """Return the last loss of each learner or, for many learners, their distribution."""
    known = {name: one.loss for name, one in run.learners.items() if one.loss is not None}
    if len(run.learners) <= LINES_MAX:
        return {**known}
    if len(known) < 2:
        return {}
    tenths = statistics.quantiles(known.values(), n=10)
    return {LOW: tenths[0], MEDIAN: tenths[4], HIGH: tenths[-1]}


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


class _Line(NamedTuple):
    name: str
    css: str
    points: list[Point]
    dotted: bool = False


def charts_of(history: PageHistory, learners: Iterable[str]) -> dict[str, Any]:
    """Return the page's charts as SVG, empty without data, and the legend of the losses."""
    samples = history.samples
    lines, band = _loss_lines(history, learners)
    sent = _Line("sent", "c0", history.series(each.sent for each in samples))
    received = _Line("received", "c1", history.series(each.received for each in samples))
    tokens = _Line("tokens", "c2", history.series(each.tokens for each in samples))
    many = max((sum(each.states.values()) for each in samples), default=0) > LINES_MAX
    keys = [[line.css, line.name] for line in lines]
    return {
        "loss": _drawn(_line_chart(history, "Loss", "mean loss per token", lines, band)),
        "counts": _drawn(_states_chart(history) if many else None),
        "bytes": _drawn(_line_chart(history, "Bytes per second", "bytes/s", [sent, received])),
        "speed": _drawn(_line_chart(history, "Tokens per second", "tokens/s", [tokens])),
        "keys": [*keys, ["band", "eight of ten learners"]] if band else keys,
    }


def _drawn(chart: Chart | None) -> str:
    return "" if chart is None else str(Markup(chart))


def _loss_lines(
    history: PageHistory, learners: Iterable[str]
) -> tuple[list[_Line], tuple[list[Point], list[Point]] | None]:
    """Return a line per learner, or the median and band for many; and the evaluations."""

    def losses(name: str) -> list[Point]:
        return history.series(each.losses.get(name) for each in history.samples)

    band, lines = None, list[_Line]()
    if history.samples and MEDIAN in history.samples[-1].losses:
        band = (losses(LOW), losses(HIGH))
        lines = [_Line("median of all learners", "c0", _smoothed(losses(MEDIAN)))]
    else:
        for number, name in enumerate(sorted(learners, key=natural)):
            lines.append(_Line(name, f"c{number % COLORS}", _smoothed(losses(name))))
    lines.append(_Line("global weights", "ink", history.evaluations, dotted=True))
    return [line for line in lines if line.points], band


def _smoothed(points: list[Point]) -> list[Point]:
    """Return means over a few neighbors, because single losses are noisy."""
    reach = min(6, len(points) // 12)
    values = [value for _, value in points]
    near = (values[max(0, n - reach) : n + reach + 1] for n in range(len(values)))
    return [(at, statistics.fmean(each)) for (at, _), each in zip(points, near, strict=True)]


def _axes(
    canvas: Canvas, history: PageHistory, y: tuple[float, float, str], show_y: Show = "{:g}".format
) -> tuple[Frame, float]:
    """Return the frame of a chart over the run's time, and the seconds per unit of its axis."""
    seconds = history.interval * max(1, len(history.samples) - 1)
    unit, name = time_unit(seconds)
    x = (0.0, seconds / unit, f"time since the start of the run [{name}]")
    return framed(canvas, x, y, show_y=show_y), unit


def _line_chart(
    history: PageHistory,
    what: str,
    axis: str,
    lines: Sequence[_Line],
    band: tuple[list[Point], list[Point]] | None = None,
) -> Chart | None:
    """Return lines over the run's time. Losses fill the height; other values begin at 0."""
    lines = [line for line in lines if line.points]
    values = [value for line in lines for _, value in line.points]
    if not values:
        return None
    is_loss = what == "Loss"
    values += [value for side in band or () for _, value in side]
    ends = [line.points[-1][1] for line in lines]
    low, high = loss_limits(values, ends) if is_loss else (0.0, 1.06 * max(values) or 1.0)
    show: Show = "{:.3f}".format if is_loss else format_count
    most = max(40, POINTS_MAX // len(lines))

    def draw(canvas: Canvas) -> None:
        frame, unit = _axes(canvas, history, (low, high, axis), "{:g}".format if is_loss else show)

        def placed(points: Sequence[Point]) -> list[Point]:
            group = -(-len(points) // most)  # rounded up; the newest point is always included
            thin = [*points[:-1:group], points[-1]]
            return frame.points((at / unit, min(high, max(low, value))) for at, value in thin)

        if band:
            canvas.shape([*placed(band[0]), *reversed(placed(band[1]))], "band")
        for line in lines:
            points = placed(line.points)
            canvas.line(points, line.css, line.name)
            for point in points if line.dotted and len(points) <= 60 else ():
                canvas.dot(point, line.css)
            if line.dotted:
                x, y = points[-1]
                canvas.text(x - 2, max(16, y - 9), show(line.points[-1][1]), "value", "end")

    values_now = listing(
        [f"{line.name} {show(end)}" for line, end in zip(lines, ends, strict=True)]
    )
    label = f"{what} over time; now {values_now}."
    return Chart(label, lambda narrow: 240 if narrow else 300, draw)


def _states_chart(history: PageHistory) -> Chart:
    """Return the number of learners in each state over time, stacked."""
    tops = [
        list(accumulate(sum(each.states.get(s, 0) for s in states) for states in GROUPS.values()))
        for each in history.samples
    ]

    def draw(canvas: Canvas) -> None:
        frame, unit = _axes(canvas, history, (0.0, max(top[-1] for top in tops), "learners"))
        ats = [n * history.interval / unit for n in range(len(tops))]
        below = frame.points((at, 0.0) for at in ats)
        for layer, css in enumerate(GROUPS):
            above = frame.points((at, top[layer]) for at, top in zip(ats, tops, strict=True))
            if above != below:
                canvas.shape([*above, *reversed(below)], css)
            below = above

    counts = listing([f"{count} {state}" for state, count in history.samples[-1].states.items()])
    label = f"Learners by state over time; now {counts}."
    return Chart(label, lambda narrow: 240 if narrow else 300, draw)
