"""Options of `ddiloco plan`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from decoupled_diloco.cli.command_line import CommandOptions
from decoupled_diloco.cli.shared_options import complete_recipe
from decoupled_diloco.config.sync import MomentSettings
from decoupled_diloco.units import parse_count, parse_duration, parse_rate
from decoupled_diloco_plan.bandwidth import measured

METHODS = ("own", "published")
SYSTEMS = ("data-parallel", "diloco", "streaming", "streaming-overlap", "streaming-overlap-4bit")
SOURCES = ("streaming-diloco", "scaling-laws")
MOST = {
    "params": 1e14,
    "layers": 10_000,
    "chips": 1e9,
    "flops": 1e21,
    "tokens_per_step": 1e15,
    "tokens": 1e21,
    "sites": 256,
    "learners": 256,
    "period": 100_000,
    "fragments": 10_000,
}
"""The largest values that the planner simulates in a reasonable time, and prints readably."""

PARTITIONS = ("balanced", "tensor", "layer-strided", "layer-sequential")


def _parsed(parse: Callable[[str], float], text: str) -> float:
    try:
        return parse(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def _share(text: str) -> float:
    """Parse a share or a percentage."""
    number, percent, rest = text.strip().partition("%")
    try:
        if rest:
            raise ValueError
        return float(number) / (100 if percent else 1)
    except ValueError:
        raise ValueError(f"{text!r} is not a valid share: write 0.95 or 95%") from None


def _complete(names: Iterable[str]) -> Callable[[str], list[str]]:
    def complete(incomplete: str) -> list[str]:
        return [name for name in names if name.startswith(incomplete)]

    return complete


def complete_formats(incomplete: str) -> list[str]:
    from decoupled_diloco.merge import codec_names

    return _complete(codec_names())(incomplete)


_option: Any = typer.Option
_count: Any = partial(typer.Option, parser=partial(_parsed, parse_count))
_time: Any = partial(typer.Option, parser=partial(_parsed, parse_duration), metavar="TIME")


class PlanOptions(CommandOptions):
    """Options of `ddiloco plan`; ``None``: the planner chooses, or assumes a value."""

    config: Annotated[
        str | None, typer.Argument(metavar="CONFIG", autocompletion=complete_recipe)
    ] = None
    """TOML file of a run, or name of a shipped recipe: plan with its model, learners and settings.
    Options override them."""

    params: Annotated[float | None, _count(metavar="N")] = None
    """Number of parameters, such as 12e9 or 12B."""

    layers: Annotated[int | None, _option(metavar="L")] = None
    """Number of layers. Default: as in published models of the same size."""

    step_seconds: Annotated[float | None, _time()] = None
    """Time of one inner step of a learner, such as 0.8 (seconds) or 800ms. Default: from --flops,
    --chips and --tokens-per-step, from the tape of CONFIG's run, or 0.08 s per billion
    parameters."""

    chips: Annotated[float | None, _count(metavar="R")] = None
    """Number of chips of all learners together."""

    flops: Annotated[float | None, _count(metavar="Q")] = None
    """Achieved FLOP/s of a chip, such as 4e14 or 400T."""

    tokens_per_step: Annotated[float | None, _count(metavar="B")] = None
    """Tokens in one step of all learners together."""

    tokens: Annotated[float | None, _count(metavar="D")] = None
    """Token budget, to predict the duration; requires --tokens-per-step."""

    sites: Annotated[int | None, _option(metavar="COUNT")] = None
    """Number of equal sites, each connected by --link."""

    site: Annotated[
        list[str] | None,
        _option(metavar="NAME:LEARNERS:UP[/DOWN][:LATENCY][:own][:relay[=SITE]][:step=TIME]"),
    ] = None
    """One of several different sites, such as oslo:2:5Gbit/1Gbit:20ms:step=1.2s, where a step of a
    learner takes 1.2 s. Give it once per site. relay: its learners are behind a relay. relay=SITE:
    its link leads to that site, and its relay is behind the one there. It replaces the sites of
    CONFIG."""

    learners: Annotated[int | None, _option(metavar="M")] = None
    """Number of learners. Default: one per site."""

    link: Annotated[str | None, _option(metavar="UP[/DOWN]")] = None
    """Bandwidth of a site's link, such as 2Gbit or 500Mbit/1Gbit."""

    latency: Annotated[float, _time()] = 0.0
    """Latency from a site to the center, such as 0.02 (seconds) or 20ms. Two sites are twice as far
    from each other."""

    own: Annotated[bool, _option("--own/--shared")] = False
    """Give each learner its own link, or share one link per site."""

    relay: Annotated[bool, _option("--relay")] = False
    """Put a relay at each site of --sites. With [[sites]] in CONFIG there are relays without this
    option."""

    relay_link: Annotated[
        float | None, _option(parser=partial(_parsed, parse_rate), metavar="RATE")
    ] = None
    """Bandwidth between a relay and all learners of its site, in each direction. Default: 10
    Gbit/s."""

    syncer: Annotated[str | None, _option("--syncer-site", metavar="spread|hub|SITE")] = None
    """Place of the shards: spread over the sites, at a hub without learners (--hub-link), or at one
    site, such as site-0. Default: spread, or the proposed place; hub for a single site, and with
    relays."""

    hub_link: Annotated[str | None, _option(metavar="UP[/DOWN]")] = None
    """Bandwidth of the hub's link. Default: no limit."""

    link_share: Annotated[float, _option(metavar="SHARE")] = measured.LINK_SHARE
    """Share of a link's bandwidth that payloads reach, 0 to 1."""

    up: Annotated[
        str | None, _option(metavar="FORMAT[,FORMAT…]", autocompletion=complete_formats)
    ] = None
    """Uplink format: a codec, or 4bit for a hypothetical one. Several formats with commas between
    them are a ladder: each site uses the first one that its link carries. Default: the default
    ladder of a run; with --utilization, bf16 and then int4."""

    down: Annotated[str | None, _option(metavar="FORMAT", autocompletion=complete_formats)] = None
    """Downlink format: a codec, or 4bit for a hypothetical one."""

    period: Annotated[int | None, _option(metavar="H")] = None
    """Steps between two syncs of a fragment."""

    fragments: Annotated[int | None, _option(metavar="P")] = None
    """Number of fragments."""

    overlap: Annotated[int | None, _option(metavar="τ")] = None
    """Steps between the start of a sync and its application."""

    quorum: Annotated[int, _option(metavar="K")] = 1
    """Minimum number of learners in a round."""

    shards: Annotated[int | None, _option(metavar="S")] = None
    """Number of syncer shards."""

    grace_margin: Annotated[float, _option(metavar="γ")] = 0.8
    """Share of the slack that the grace window uses, 0 to 1."""

    partition: Annotated[str, _option(metavar="NAME", autocompletion=_complete(PARTITIONS))] = (
        "balanced"
    )
    """Partition of the parameters into fragments: balanced, tensor, layer-strided or
    layer-sequential."""

    utilization: Annotated[
        float | None, _option(parser=partial(_parsed, _share), metavar="SHARE")
    ] = None
    """Find settings that reach this utilization, such as 0.95. Given settings are kept."""

    price_chip_hour: Annotated[float | None, _option(metavar="PRICE")] = None
    """Price of a chip per hour, in any currency."""

    price_gb: Annotated[float | None, _option(metavar="PRICE")] = None
    """Price of 10⁹ bytes that leave a site, in the same currency."""

    method: Annotated[str, _option(metavar="NAME", autocompletion=_complete(METHODS))] = "own"
    """own: simulate the rounds on your links. published: rebuild the published tables of bandwidth
    and utilization."""

    system: Annotated[
        str | None, _option(metavar="NAME[,NAME…]", autocompletion=_complete(SYSTEMS))
    ] = None
    """Systems for --method published: data-parallel, diloco, streaming, streaming-overlap,
    streaming-overlap-4bit. Default: all."""

    table: Annotated[str | None, _option(metavar="NAME", autocompletion=_complete(SOURCES))] = None
    """With --method published: table of streaming-diloco or of scaling-laws. Default: the one with
    the given --period; streaming-diloco for 100."""

    as_json: Annotated[bool, _option("--json")] = False
    """Print JSON to standard output instead of tables."""

    out: Annotated[Path | None, _option(metavar="FILE.json")] = None
    """Also write the JSON to this file."""

    plot: Annotated[Path | None, _option(metavar="FILE")] = None
    """Plot the utilization of each system over the bandwidth: .png, .svg or .pdf."""

    wait: str = "never"
    apply: str = "on_arrival"
    alignment: str = "overwrite"
    run_sites: tuple[tuple[str, int, str], ...] = ()
    moments: MomentSettings | None = None
    average: bool = False
    """Only CONFIG sets these. Of each of its sites: name, number of learners, upstream."""

    def after(self, settings: Mapping[str, Any]) -> PlanOptions:
        """Return these options, with settings where no option was given."""
        known = {name: value for name, value in settings.items() if value is not None}
        return PlanOptions(**{**known, **self.given})

    @property
    def whole_layers(self) -> bool:
        """Whether a fragment consists of whole layers."""
        return self.partition.startswith("layer")
