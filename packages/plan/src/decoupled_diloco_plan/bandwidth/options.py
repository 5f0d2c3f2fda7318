"""The options of `ddiloco plan`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from decoupled_diloco.cli.options import complete_recipe
from decoupled_diloco.units import parse_count, parse_duration, parse_rate

METHODS = {
    "own": "our event-level model of rounds on your links",
    "published": "rebuild the published tables of bandwidth against utilisation",
}
SYSTEMS = ("data-parallel", "diloco", "streaming", "streaming-overlap", "streaming-overlap-4bit")
SOURCES = ("streaming-diloco", "scaling-laws")
PARTITIONS = ("balanced", "tensor", "layer-strided", "layer-sequential")


def _count(text: str) -> float:
    return float(_parsed(parse_count, text))


def _seconds(text: str) -> float:
    return float(_parsed(parse_duration, text))


def _share(text: str) -> float:
    """A share, also as a percentage."""
    number, percent, rest = text.strip().partition("%")
    try:
        if rest:
            raise ValueError
        return float(number) / (100 if percent else 1)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no share: write 0.95, or 95%") from None


def _rate(text: str) -> str:
    """A link as it was written; its rates are checked one by one."""
    _parsed(lambda each: [parse_rate(part) for part in _rates(each)], text)
    return text


def _rates(text: str) -> list[str]:
    return text.replace("bit/s", "bit").replace("B/s", "B").split("/")


def _parsed(parse: Any, text: str) -> Any:
    try:
        return parse(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def _complete(names: Iterable[str]) -> Callable[[str], list[str]]:
    def complete(incomplete: str) -> list[str]:
        return [name for name in names if name.startswith(incomplete)]

    return complete


def complete_formats(incomplete: str) -> list[str]:
    """The wire formats, for the shell."""
    from decoupled_diloco.merge import codec_names

    return [name for name in codec_names() if name.startswith(incomplete)]


Run = Annotated[
    str | None,
    typer.Argument(
        metavar="[RUN]",
        help="A run's TOML file or recipe, whose model, learners and settings are taken; options "
        "go before it.",
        autocompletion=complete_recipe,
    ),
]
Params = Annotated[
    float | None,
    typer.Option(parser=_count, metavar="N", help="Parameters, such as 12e9 or 12B."),
]
Layers = Annotated[
    int | None, typer.Option(metavar="L", help="Layers. Default: as deep as the published models.")
]
StepSeconds = Annotated[
    float | None,
    typer.Option(
        parser=_seconds,
        metavar="TIME",
        help="One inner step of one learner, such as 0.8 or 800ms. Default: from --flops, --chips "
        "and --tokens-per-step, from the tape of a RUN, or 0.08 s for each billion parameters.",
    ),
]
ChipCount = Annotated[
    float | None,
    typer.Option("--chips", parser=_count, metavar="R", help="Chips of all learners together."),
]
Flops = Annotated[
    float | None,
    typer.Option(parser=_count, metavar="Q", help="What a chip really does, FLOP/s: 4e14, 400T."),
]
TokensPerStep = Annotated[
    float | None,
    typer.Option(parser=_count, metavar="B", help="Tokens of one step of all learners together."),
]
Tokens = Annotated[
    float | None,
    typer.Option(
        parser=_count, metavar="D", help="Token budget, for the wall-clock; with --tokens-per-step."
    ),
]
Sites = Annotated[
    int | None, typer.Option(metavar="COUNT", help="Sites that are alike, joined by --link.")
]
SiteOf = Annotated[
    list[str] | None,
    typer.Option(
        "--site",
        metavar="NAME:LEARNERS:UP[/DOWN][:LATENCY][:own][:step=TIME]",
        help="One site of several that differ, such as oslo:2:5Gbit/1Gbit:20ms:step=1.2s, where a "
        "step takes its learners 1.2 s.",
    ),
]
Learners = Annotated[
    int | None, typer.Option(metavar="M", help="Learners. Default: one for each site.")
]
LinkOf = Annotated[
    str | None,
    typer.Option(
        "--link",
        parser=_rate,
        metavar="UP[/DOWN]",
        help="A site's link, such as 2Gbit or 500Mbit/s / 1Gbit/s without the blanks.",
    ),
]
Latency = Annotated[
    float,
    typer.Option(
        parser=_seconds,
        metavar="TIME",
        help="One way from a site to the middle; two sites are twice that apart.",
    ),
]
Own = Annotated[
    bool,
    typer.Option(
        "--own/--shared", help="Each learner has such a link, or those of a site share one."
    ),
]
SyncerAt = Annotated[
    str | None,
    typer.Option(
        "--syncer",
        metavar="spread|hub|SITE",
        help="Where the shards are: divided among the sites, at a place without learners "
        "(--hub-link), or at a site such as site-0. Default: spread, or what is proposed; for a "
        "single site hub.",
    ),
]
HubLink = Annotated[
    str | None,
    typer.Option(parser=_rate, metavar="UP[/DOWN]", help="Link of the hub. Default: no limit."),
]
LinkShare = Annotated[
    float | None,
    typer.Option(metavar="SHARE", help="How much of a link bodies fill. Default: 0.88, measured."),
]
Up = Annotated[
    str | None,
    typer.Option(
        "--up",
        metavar="FORMAT",
        help="Wire format of what learners send: a codec, or 4bit for one only thought of.",
        autocompletion=complete_formats,
    ),
]
Down = Annotated[
    str | None,
    typer.Option(
        "--down",
        metavar="FORMAT",
        help="Wire format of what the syncer sends.",
        autocompletion=complete_formats,
    ),
]
Period = Annotated[int | None, typer.Option(metavar="H", help="Steps between two syncs.")]
Fragments = Annotated[int | None, typer.Option(metavar="P", help="Fragments.")]
Overlap = Annotated[int | None, typer.Option(metavar="τ", help="Steps until a merge is applied.")]
Quorum = Annotated[int | None, typer.Option(metavar="K", help="Minimum quorum. Default: 1.")]
Shards = Annotated[int | None, typer.Option(metavar="S", help="Syncer shards.")]
GraceMargin = Annotated[
    float | None, typer.Option(metavar="γ", help="Share of the slack to wait in. Default: 0.8.")
]
Partition = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help=f"How parameters are cut: {', '.join(PARTITIONS)}. Default: balanced.",
        autocompletion=_complete(PARTITIONS),
    ),
]
Utilization = Annotated[
    float | None,
    typer.Option(
        parser=_share,
        metavar="SHARE",
        help="Find me a setting that reaches this, such as 0.95. What is given stays.",
    ),
]
PriceChipHour = Annotated[
    float | None, typer.Option(metavar="PRICE", help="Of a chip for an hour, in any currency.")
]
PriceGb = Annotated[
    float | None, typer.Option(metavar="PRICE", help="Of 10⁹ bytes that leave a site.")
]
Method = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="; ".join(f"{name}: {text}" for name, text in METHODS.items()) + ".",
        autocompletion=_complete(METHODS),
    ),
]
SystemOf = Annotated[
    str | None,
    typer.Option(
        "--system",
        metavar="NAME[,NAME…]",
        help=f"With --method published: {', '.join(SYSTEMS)}. Default: all.",
        autocompletion=_complete(SYSTEMS),
    ),
]
Table = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="With --method published: whose table, streaming-diloco or scaling-laws. Default: "
        "the one that has the period; Streaming DiLoCo's is all at H=100.",
        autocompletion=_complete(SOURCES),
    ),
]
Json = Annotated[
    str | None, typer.Option("--json", metavar="FILE|-", help="Write JSON; -: print nothing else.")
]
Plot = Annotated[
    Path | None,
    typer.Option(metavar="FILE.png", help="Plot utilisation over bandwidth for each system."),
]
