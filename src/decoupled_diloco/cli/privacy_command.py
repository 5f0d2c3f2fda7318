"""`ddiloco privacy`: what a run with `[privacy.dp]` will reveal, and what that costs."""

from __future__ import annotations

from math import ceil, sqrt
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from decoupled_diloco.cli.command_line import CommandOptions, command
from decoupled_diloco.cli.shared_options import (
    RunConfigFile,
    Sets,
    fail,
    make_console,
)

if TYPE_CHECKING:
    from decoupled_diloco.config import RunConfig
    from decoupled_diloco.config.privacy import DpSettings

LEARNERS = (8, 64, 1_000, 10_000)
"""Numbers of learners beside that of the run."""

LENGTHS = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Lengths beside that of the run, as multiples of it."""

NOISE_USUAL = 1.0
"""Noise up to the length of the clip: more of it hides what a period has learned."""


class PrivacyOptions(CommandOptions):
    """Options of `ddiloco privacy`."""

    config: RunConfigFile
    parameters: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Number of synced parameters. Default: those of the workload's model.",
            show_default=False,
        ),
    ] = None
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Plot ε over the length of the run, for this noise and for others: an .svg file.",
            show_default=False,
        ),
    ] = None
    settings: Sets = None


@command(PrivacyOptions)
def privacy(options: PrivacyOptions) -> None:
    """Print what a run reveals about one learner, for other lengths and numbers of learners."""
    from decoupled_diloco.config import load_config

    config = load_config(options.config, options.settings or ())
    dp = config.privacy.dp
    if dp is None:
        fail(
            f"{config.run.name} has no [privacy.dp], so its weights may reveal anything: add clip, "
            "noise_multiplier, epsilon_max and delta (docs/how-to/privacy.md)"
        )
    numel = options.parameters or _numel(config)
    console = make_console()
    for line in _sentences(config, dp, numel):
        console.print_text(line)
    console.print_text("")
    console.print(_lengths(config, dp))
    console.print_text("")
    console.print(_counts(config, dp, numel))
    if options.plot is not None:
        from decoupled_diloco.show.report import write_page

        write_page(options.plot, _plot(config, dp))
        console.print_text(f"\nwritten  {options.plot}")


def periods_of(config: RunConfig, dp: DpSettings) -> int:
    """Return the merges of a fragment in a run, with the closing one; without steps, its limit."""
    assert dp.periods is not None
    steps = config.run.max_steps
    return dp.periods if steps is None else ceil(steps / config.sync.sync_every) + 1


def noise_ratio(z: float, numel: int, learners: int) -> float:
    """Return the length of the noise of a mean, in multiples of the clip.

    A mean of n learners has noise of z·C/n in each of N elements, so of √N·z·C/n in all. What it
    merges is at most C long.
    """
    return sqrt(numel) * z / learners


def delta_for(dp: DpSettings, learners: int) -> float:
    """Return δ for a number of learners: the run's, or a tenth of 1 / learners if that is less."""
    return min(dp.delta, 0.1 / learners)


def _numel(config: RunConfig) -> int | None:
    if config.workload is None:
        return None
    from decoupled_diloco.config.method import synchronised
    from decoupled_diloco.merge import layout_of
    from decoupled_diloco.workloads import workload_of

    workload = workload_of(config)
    return synchronised(layout_of(workload.model()), config).numel


def _sentences(config: RunConfig, dp: DpSettings, numel: int | None) -> list[str]:
    learners, periods = config.run.learners, periods_of(config, dp)
    assert dp.periods is not None
    spent = _spent(config, dp.noise_multiplier, min(periods, dp.periods), dp.delta)
    lines = [
        f"{config.run.name}: {learners} learners, {periods} periods of {config.sync.sync_every} "
        f"steps, noise of {dp.noise_multiplier:g} clips, δ = {dp.delta:g}",
        f"A learner that takes part in {'all' if periods <= dp.periods else dp.periods} of them "
        f"spends ε = {spent:.3g} of {dp.epsilon_max:g}.",
    ]
    if periods > dp.periods:
        lines.append(
            f"The run is longer than ε allows: after {dp.periods} periods a learner is merged no "
            f"longer. Raise noise_multiplier to {_needed(config, dp, dp.delta):.3g}, raise "
            "epsilon_max, or shorten the run."
        )
    if numel is None:
        lines.append("Pass --parameters to see how long the noise is beside the training.")
        return lines
    ratio = noise_ratio(dp.mechanism(numel).noise_multiplier, numel, learners)
    lines.append(
        f"The noise of each mean is {ratio:.3g} times as long as the clip ({numel} parameters)."
    )
    counts = dp.mechanism(numel).adaptive
    if counts is not None:
        error = counts.noise_multiplier * sqrt(config.sync.fragments) / (2 * learners)
        lines.append(
            f"Each merge measures the share of contributions within the clip to ±{100 * error:.2g} "
            "percentage points. Set clip_rate so low that many merges make up for it."
        )
    if ratio > NOISE_USUAL:
        enough = ceil(learners * ratio / NOISE_USUAL)
        lines.append(
            f"That hides what the learners have trained: with {learners} learners, hiding a whole "
            f"learner costs nearly everything. It takes about {enough} learners for noise as long "
            "as the clip. With fewer, protect single examples instead: train each learner with "
            "Opacus (docs/how-to/privacy.md)."
        )
    return lines


def _needed(config: RunConfig, dp: DpSettings, delta: float) -> float:
    from decoupled_diloco.privacy.accountant import noise_multiplier_for

    periods, discrete = periods_of(config, dp), config.privacy.secure_sums
    return noise_multiplier_for(periods, dp.epsilon_max, delta, discrete=discrete)


def _spent(config: RunConfig, noise_multiplier: float, periods: int, delta: float) -> float:
    from decoupled_diloco.privacy.accountant import epsilon_spent

    discrete = config.privacy.secure_sums
    return epsilon_spent(noise_multiplier, periods, delta, discrete=discrete)


def _counts_shown(config: RunConfig) -> list[int]:
    return sorted({config.run.learners, *LEARNERS})


def _lengths_shown(config: RunConfig, dp: DpSettings) -> list[int]:
    return sorted({max(1, round(periods_of(config, dp) * factor)) for factor in LENGTHS})


def _lengths(config: RunConfig, dp: DpSettings) -> object:
    """Return the table of ε for each number of learners and length."""
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("ε by learners and periods", no_wrap=True)
    table.add_column("δ", justify="right")
    periods = _lengths_shown(config, dp)
    for each in periods:
        table.add_column(f"{each}", justify="right")
    for count in _counts_shown(config):
        delta = delta_for(dp, count)
        spent = [f"{_spent(config, dp.noise_multiplier, n, delta):.3g}" for n in periods]
        table.add_row(_name(config, count), f"{delta:.0e}", *spent)
    return table


def _counts(config: RunConfig, dp: DpSettings, numel: int | None) -> object:
    """Return the table of what ε of the settings costs for each number of learners."""
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column(f"for ε = {dp.epsilon_max:g} in the whole run", no_wrap=True)
    table.add_column("noise_multiplier", justify="right")
    table.add_column("noise beside the clip", justify="right")
    for count in _counts_shown(config):
        z = _needed(config, dp, delta_for(dp, count))
        ratio = "unknown" if numel is None else f"{noise_ratio(z, numel, count):.3g} ×"
        table.add_row(_name(config, count), f"{z:.3g}", ratio)
    return table


def _name(config: RunConfig, count: int) -> str:
    return f"{count} (this run)" if count == config.run.learners else str(count)


def _plot(config: RunConfig, dp: DpSettings) -> str:
    """Return a picture of ε over the periods, for half, all and twice the noise."""
    from decoupled_diloco.show.charts import Canvas, Chart, framed, standalone

    last = 2 * periods_of(config, dp)
    shown = sorted({max(1, round(last * step / 60)) for step in range(61)})
    lines = [
        (css, factor * dp.noise_multiplier) for css, factor in zip("abc", (0.5, 1, 2), strict=True)
    ]
    top = 3 * dp.epsilon_max

    def draw(canvas: Canvas) -> None:
        frame = framed(canvas, (0, last, "periods"), (0, top, "ε"))
        canvas.stroke(frame.points([(0, dp.epsilon_max), (last, dp.epsilon_max)]), "limit")
        canvas.text(frame.x(0) + 6, frame.y(dp.epsilon_max) - 5, "epsilon_max")
        for css, z in lines:
            spent = [(n, _spent(config, z, n, dp.delta)) for n in shown]
            inside = [point for point in spent if point[1] <= top]
            canvas.line(frame.points(inside), css)
            if inside:
                x, y = frame.points(inside[-1:])[0]
                canvas.text(min(x, canvas.width - 70), y + 16, f"z = {z:g}", css)

    label = f"ε over the periods in which a learner takes part, with δ = {dp.delta:g}"
    return standalone(Chart(label, lambda narrow: 320.0, draw))
