"""The options of `ddiloco plan`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from decoupled_diloco.cli.command_line import CommandOptions
from decoupled_diloco.cli.options import complete_recipe
from decoupled_diloco.units import parse_count, parse_duration
from decoupled_diloco_plan.bandwidth import measured

METHODS = ("own", "published")
SYSTEMS = ("data-parallel", "diloco", "streaming", "streaming-overlap", "streaming-overlap-4bit")
SOURCES = ("streaming-diloco", "scaling-laws")
PARTITIONS = ("balanced", "tensor", "layer-strided", "layer-sequential")


def _parsed(parse: Callable[[str], float], text: str) -> float:
    try:
        return parse(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def _share(text: str) -> float:
    """A share, also as a percentage."""
    number, percent, rest = text.strip().partition("%")
    try:
        if rest:
            raise ValueError
        return float(number) / (100 if percent else 1)
    except ValueError:
        raise ValueError(f"{text!r} is no share: write 0.95, or 95%") from None


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
    """What is planned; what is None is open."""

    run: Annotated[str | None, typer.Argument(metavar="[RUN]", autocompletion=complete_recipe)] = (
        None
    )
    """A run's TOML file or recipe, whose model, learners and settings are taken; options go before
    it."""

    params: Annotated[float | None, _count(metavar="N")] = None
    """Parameters, such as 12e9 or 12B."""

    layers: Annotated[int | None, _option(metavar="L")] = None
    """Layers. Default: as deep as the published models."""

    step_seconds: Annotated[float | None, _time()] = None
    """One inner step of one learner, such as 0.8 or 800ms. Default: from --flops, --chips and
    --tokens-per-step, from the tape of a RUN, or 0.08 s for each billion parameters."""

    chips: Annotated[float | None, _count(metavar="R")] = None
    """Chips of all learners together."""

    flops: Annotated[float | None, _count(metavar="Q")] = None
    """What a chip really does, FLOP/s: 4e14, 400T."""

    tokens_per_step: Annotated[float | None, _count(metavar="B")] = None
    """Tokens of one step of all learners together."""

    tokens: Annotated[float | None, _count(metavar="D")] = None
    """Token budget, for the wall-clock; with --tokens-per-step."""

    sites: Annotated[int | None, _option(metavar="COUNT")] = None
    """Sites that are alike, joined by --link."""

    site: Annotated[
        list[str] | None, _option(metavar="NAME:LEARNERS:UP[/DOWN][:LATENCY][:own][:step=TIME]")
    ] = None
    """One site of several that differ, such as oslo:2:5Gbit/1Gbit:20ms:step=1.2s, where a step
    takes its learners 1.2 s."""

    learners: Annotated[int | None, _option(metavar="M")] = None
    """Learners. Default: one for each site."""

    link: Annotated[str | None, _option(metavar="UP[/DOWN]")] = None
    """A site's link, such as 2Gbit or 500Mbit/s / 1Gbit/s without the blanks."""

    latency: Annotated[float, _time()] = 0.0
    """One way from a site to the middle; two sites are twice that apart."""

    own: Annotated[bool, _option("--own/--shared")] = False
    """Each learner has such a link, or those of a site share one."""

    syncer: Annotated[str | None, _option(metavar="spread|hub|SITE")] = None
    """Where the shards are: divided among the sites, at a place without learners (--hub-link), or
    at a site such as site-0. Default: spread, or what is proposed; for a single site hub."""

    hub_link: Annotated[str | None, _option(metavar="UP[/DOWN]")] = None
    """Link of the hub. Default: no limit."""

    link_share: Annotated[float, _option(metavar="SHARE")] = measured.LINK_SHARE
    """How much of a link bodies fill, as measured."""

    up: Annotated[str | None, _option(metavar="FORMAT", autocompletion=complete_formats)] = None
    """Wire format of what learners send: a codec, or 4bit for one only thought of."""

    down: Annotated[str | None, _option(metavar="FORMAT", autocompletion=complete_formats)] = None
    """Wire format of what the syncer sends."""

    period: Annotated[int | None, _option(metavar="H")] = None
    """Steps between two syncs."""

    fragments: Annotated[int | None, _option(metavar="P")] = None
    """Fragments."""

    overlap: Annotated[int | None, _option(metavar="τ")] = None
    """Steps until a merge is applied."""

    quorum: Annotated[int, _option(metavar="K")] = 1
    """Minimum quorum."""

    shards: Annotated[int | None, _option(metavar="S")] = None
    """Syncer shards."""

    grace_margin: Annotated[float, _option(metavar="γ")] = 0.8
    """Share of the slack to wait in."""

    partition: Annotated[str, _option(metavar="NAME", autocompletion=_complete(PARTITIONS))] = (
        "balanced"
    )
    """How parameters are cut: balanced, tensor, layer-strided, layer-sequential."""

    utilization: Annotated[
        float | None, _option(parser=partial(_parsed, _share), metavar="SHARE")
    ] = None
    """Find me a setting that reaches this, such as 0.95. What is given stays."""

    price_chip_hour: Annotated[float | None, _option(metavar="PRICE")] = None
    """Price of a chip for an hour, in any currency."""

    price_gb: Annotated[float | None, _option(metavar="PRICE")] = None
    """Price of 10⁹ bytes that leave a site."""

    method: Annotated[str, _option(metavar="NAME", autocompletion=_complete(METHODS))] = "own"
    """own: our event-level model of rounds on your links; published: rebuild the published tables
    of bandwidth against utilisation."""

    system: Annotated[
        str | None, _option(metavar="NAME[,NAME…]", autocompletion=_complete(SYSTEMS))
    ] = None
    """With --method published: data-parallel, diloco, streaming, streaming-overlap,
    streaming-overlap-4bit. Default: all."""

    table: Annotated[str | None, _option(metavar="NAME", autocompletion=_complete(SOURCES))] = None
    """With --method published: whose table, streaming-diloco or scaling-laws. Default: the one that
    has the period; Streaming DiLoCo's is all at H=100."""

    json_to: Annotated[Path | None, _option("--json", metavar="FILE|-")] = None
    """Write JSON; -: print nothing else."""

    plot: Annotated[Path | None, _option(metavar="FILE.png")] = None
    """Plot utilisation over bandwidth for each system."""

    wait: str = "never"
    apply: str = "on_arrival"
    alignment: str = "overwrite"
    """Set by a run's file only."""

    def after(self, settings: Mapping[str, Any]) -> PlanOptions:
        """What is given, and these where nothing is."""
        told = {name: value for name, value in settings.items() if value is not None}
        return PlanOptions(**{**told, **self.given})

    @property
    def whole_layers(self) -> bool:
        """Whether a fragment is a layer at least."""
        return self.partition.startswith("layer")
