"""`ddiloco plan`: which link, which settings, before a run is made."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from decoupled_diloco.cli.options import fail, listed, make_console
from decoupled_diloco_plan.bandwidth.options import (
    METHODS,
    PARTITIONS,
    SOURCES,
    ChipCount,
    Down,
    Flops,
    Fragments,
    GraceMargin,
    HubLink,
    Json,
    Latency,
    Layers,
    Learners,
    LinkOf,
    LinkShare,
    Method,
    Overlap,
    Own,
    Params,
    Partition,
    Period,
    Plot,
    PriceChipHour,
    PriceGb,
    Quorum,
    Run,
    Shards,
    SiteOf,
    Sites,
    StepSeconds,
    SyncerAt,
    SystemOf,
    Table,
    Tokens,
    TokensPerStep,
    Up,
    Utilization,
)
from decoupled_diloco.errors import ConfigError

if TYPE_CHECKING:
    from decoupled_diloco.config import RunConfig
    from decoupled_diloco_plan.bandwidth.document import Plan
    from decoupled_diloco_plan.bandwidth.inputs import Inputs
    from decoupled_diloco_plan.bandwidth.network import Network
    from decoupled_diloco_plan.bandwidth.search import Proposal, Wanted
    from decoupled_diloco_plan.bandwidth.setting import Format, Setting

THOUGHT_OF = "4bit"
"""Published to be as good as bf16 (arXiv 2604.21428, text 55.3 against 55.4); not a codec here."""

DEFAULT_PERIOD, DEFAULT_FRAGMENTS, DEFAULT_OVERLAP = 24, 24, 2
"""The paper's, where nothing is proposed."""


def plan(
    run: Run = None,
    params: Params = None,
    layers: Layers = None,
    step_seconds: StepSeconds = None,
    chips: ChipCount = None,
    flops: Flops = None,
    tokens_per_step: TokensPerStep = None,
    tokens: Tokens = None,
    sites: Sites = None,
    site: SiteOf = None,
    learners: Learners = None,
    link: LinkOf = None,
    latency: Latency = "0",  # type: ignore[assignment]
    own: Own = False,
    syncer: SyncerAt = None,
    hub_link: HubLink = None,
    link_share: LinkShare = None,
    up: Up = None,
    down: Down = None,
    period: Period = None,
    fragments: Fragments = None,
    overlap: Overlap = None,
    quorum: Quorum = None,
    shards: Shards = None,
    grace_margin: GraceMargin = None,
    partition: Partition = None,
    utilization: Utilization = None,
    price_chip_hour: PriceChipHour = None,
    price_gb: PriceGb = None,
    method: Method = "own",
    system: SystemOf = None,
    table: Table = None,
    json_to: Json = None,
    plot: Plot = None,
) -> None:
    """Which link, which settings: utilisation, traffic, cost; or what setting reaches an aim."""
    given = {name: value for name, value in locals().items() if value is not None}
    _known("--method", method, METHODS)
    if plot is not None and plot.suffix.lower() not in (".png", ".svg", ".pdf"):
        fail(f"--plot {plot} does not end in .png, .svg or .pdf: give such a file")
    if method == "published":
        _published(given)
    else:
        _own(given)


# ---- the published tables


def _published(given: dict[str, Any]) -> None:
    from dataclasses import asdict

    from decoupled_diloco_plan.bandwidth import published

    wanted = {"params", "layers", "step_seconds", "period", "method", "system", "table", "json_to"}
    _refuse_others(given, wanted | {"latency", "own", "utilization"}, "with --method published")
    lacking = [name for name in ("params", "layers", "step_seconds", "period") if name not in given]
    if lacking:
        options = ", ".join("--" + name.replace("_", "-") for name in lacking)
        raise ConfigError(f"--method published lacks {options}: give them")
    if "table" in given:
        _known("--table", given["table"], SOURCES)
    target = given.get("utilization")
    rows = published.rows(
        params=given["params"],
        layers=given["layers"],
        step_seconds=given["step_seconds"],
        period=given["period"],
        systems=listed(given.get("system", ",".join(published.SYSTEMS))),
        source=given.get("table"),
        targets=published.TARGETS if target is None else (target,),
    )
    if not _write_json([asdict(row) for row in rows], given.get("json_to")):
        from decoupled_diloco_plan.bandwidth.tables import print_published

        print_published(rows, make_console())


# ---- our own model


def _own(given: dict[str, Any]) -> None:
    for name in ("system", "table"):
        if name in given:
            fail(f"--{name} is for --method published: leave it out, or say --method published")
    planned = make_plan(given)
    if "plot" in given:
        _save_plot(planned, given["plot"])
    from decoupled_diloco_plan.bandwidth.document import document

    if not _write_json(document(planned), given.get("json_to")):
        from decoupled_diloco_plan.bandwidth.tables import print_plan

        print_plan(planned, make_console())


def make_plan(given: dict[str, Any]) -> Plan:
    """The plan of what was given on the command line, by the names of its parameters.

    Raises:
        ConfigError: it lacks something, or could be no run's.
    """
    from decoupled_diloco_plan.bandwidth import measured
    from decoupled_diloco_plan.bandwidth.document import Plan
    from decoupled_diloco_plan.bandwidth.predict import predict
    from decoupled_diloco_plan.bandwidth.search import limits, propose

    config = _run_of(given)
    if config is not None:
        given = {**_from_run(config), **given}
    inputs = _inputs(given, config)
    share = given.get("link_share", measured.LINK_SHARE)
    if "utilization" in given:
        found = propose(
            inputs.model,
            inputs.network,
            _wanted(given, inputs),
            prices=inputs.prices,
            link_share=share,
        )
        _check_partition(given, inputs, found.setting)
        return Plan(
            inputs=inputs,
            setting=found.setting,
            network=found.network,
            prediction=found.prediction,
            aim=given["utilization"],
            reached=found.reached,
            binds=found.binds,
            link_share=share,
            thought_of=_thought_of(given, inputs, found, share),
        )
    setting = _setting(given, inputs.network)
    _check_partition(given, inputs, setting)
    prediction = predict(
        inputs.model, setting, inputs.network, prices=inputs.prices, link_share=share
    )
    binds = limits(inputs.model, setting, inputs.network, prediction)
    return Plan(inputs, setting, inputs.network, prediction, None, not binds, binds, share)


def _thought_of(
    given: dict[str, Any], inputs: Inputs, found: Proposal, share: float
) -> Proposal | None:
    """What 4 bits each way would bring, if it is more than what was found."""
    from dataclasses import replace

    from decoupled_diloco_plan.bandwidth.search import PERIODS, propose
    from decoupled_diloco_plan.bandwidth.setting import wire_format

    o = found.setting.options
    if {"up", "down"} & set(given) or (found.reached and o.period == PERIODS[0]):
        return None
    narrow = wire_format(THOUGHT_OF)
    wanted = replace(_wanted(given, inputs), formats=[(narrow, narrow)])
    other = propose(inputs.model, inputs.network, wanted, link_share=share)
    better = other.reached and (not found.reached or other.setting.options.period < o.period)
    return other if better else None


def _run_of(given: dict[str, Any]) -> RunConfig | None:
    if "run" not in given:
        return None
    from decoupled_diloco.config import load_config
    from decoupled_diloco.config.shipped import find_shipped

    return load_config(find_shipped("recipes", given["run"]))


def _from_run(config: RunConfig) -> dict[str, Any]:
    """What a run's file says, by the names of the options."""
    from decoupled_diloco_plan.bandwidth.inputs import read_run

    found, sync = read_run(config), config.sync
    fixed = {
        "params": float(found.params),
        "layers": found.layers,
        "step_seconds": found.step_seconds,
        "learners": config.run.learners,
        "quorum": sync.quorum,
        "period": sync.period,
        "fragments": sync.fragments,
        "overlap": sync.overlap,
        "shards": config.syncer.shards,
        "grace_margin": sync.grace_margin,
        "up": sync.uplink_codec,
        "down": sync.downlink_codec,
        "partition": sync.partition,
        "wait": sync.wait,
        "apply": sync.apply,
        "alignment": sync.alignment,
    }
    return {name: value for name, value in fixed.items() if value is not None}


def _inputs(given: dict[str, Any], config: RunConfig | None) -> Inputs:
    from decoupled_diloco_plan.bandwidth.inputs import Chips, Inputs, model_of, prices_of

    if "params" not in given:
        raise ConfigError("the model's size is missing: give --params, such as 12e9, or a RUN")
    chips = Chips(
        given.get("chips"),
        given.get("flops"),
        given.get("tokens_per_step"),
        given.get("tokens"),
    )
    if chips.tokens is not None and chips.tokens_per_step is None:
        raise ConfigError("--tokens needs --tokens-per-step, to know the number of steps: add it")
    step, taped = _step_seconds(given, config)
    model, assumed = model_of(given["params"], given.get("layers"), step, chips)
    prices = prices_of(given.get("price_chip_hour"), given.get("price_gb"), chips)
    return Inputs(model, _network(given), chips, prices, taped + assumed)


def _step_seconds(
    given: dict[str, Any], config: RunConfig | None
) -> tuple[float | None, tuple[str, ...]]:
    """A step as given, or as it took in the run that was made, and then a word on that."""
    from decoupled_diloco_plan.bandwidth.inputs import taped_step_seconds
    from decoupled_diloco.units import format_duration

    if config is None or "step_seconds" in given or "flops" in given:
        return given.get("step_seconds"), ()
    step = taped_step_seconds(config.run.folder)
    if step is None:
        raise ConfigError(
            f"{given['run']} does not say how long a step takes, and {config.run.folder} has no "
            "tape of a run that was made: give --step-seconds, as measured on the learners' "
            "machines"
        )
    return step, (f"a step of {format_duration(step)}, as on the tape in {config.run.folder}",)


def _network(given: dict[str, Any]) -> Network:
    from decoupled_diloco_plan.bandwidth.network import (
        HUB,
        SPREAD,
        Link,
        Network,
        equal_sites,
        parse_link,
        parse_site,
    )

    alone = given.get("sites", given.get("learners", 1)) == 1 and "site" not in given
    place = given.get("syncer", HUB if alone or "hub_link" in given else SPREAD)
    hub = None
    if "hub_link" in given or place == HUB:
        hub = parse_link(given["hub_link"]) if "hub_link" in given else Link(math.inf, math.inf)
    if "site" in given:
        for name in ("sites", "link"):
            if name in given:
                raise ConfigError(f"--site says what --{name} says: give one of them")
        found = tuple(parse_site(text) for text in given["site"])
        if given.get("learners", sum(s.learners for s in found)) != sum(s.learners for s in found):
            raise ConfigError(
                f"learners={given['learners']}, but the sites have "
                f"{sum(s.learners for s in found)}: give each --site its part"
            )
        return Network(found, place, hub)
    if "link" not in given:
        raise ConfigError("the link is missing: give --link, such as 2Gbit, or --site for each one")
    count = given.get("sites", given.get("learners", 1))
    learners = given.get("learners", max(1, count))
    link = parse_link(given["link"], latency_seconds=given["latency"], shared=not given["own"])
    return Network(equal_sites(count, learners, link), place, hub)


def _setting(given: dict[str, Any], network: Network) -> Setting:
    from decoupled_diloco_plan.bandwidth.network import SPREAD
    from decoupled_diloco_plan.bandwidth.setting import Setting, wire_format
    from decoupled_diloco.protocol.options import Options

    period = given.get("period", DEFAULT_PERIOD)
    fragments = given.get("fragments", min(period, DEFAULT_FRAGMENTS))
    shards = len(network.sites) if network.syncer == SPREAD else 1
    overlap = given.get("overlap", min(DEFAULT_OVERLAP, max(0, period - 1)))
    options = Options(
        fragments=fragments,
        period=period,
        overlap=overlap,
        quorum=given.get("quorum", 1),
        shards=given.get("shards", max(1, min(shards, fragments))),
        grace_margin=given.get("grace_margin", 0.8),
        wait=given.get("wait", "never"),
        apply=given.get("apply", "on_arrival"),
        alignment=given.get("alignment", "overwrite"),
    )
    setting = Setting(
        options, wire_format(given.get("up", "bf16")), wire_format(given.get("down", "bf16"))
    )
    setting.check(network.learners)
    return setting


def _wanted(given: dict[str, Any], inputs: Inputs) -> Wanted:
    from decoupled_diloco_plan.bandwidth.network import HUB
    from decoupled_diloco_plan.bandwidth.search import Wanted

    if given.get("wait") == "at_overlap":
        raise ConfigError(
            "a setting is proposed for learners that never wait, and this run's do "
            '(wait="at_overlap"): leave --utilization out'
        )
    return Wanted(
        given["utilization"],
        _formats(given),
        period=given.get("period"),
        fragments=given.get("fragments"),
        overlap=given.get("overlap"),
        shards=given.get("shards"),
        syncer_fixed="syncer" in given or inputs.network.syncer == HUB,
        fragments_max=inputs.model.layers + 2 if _whole_layers(given) else None,
        quorum=given.get("quorum", 1),
        grace_margin=given.get("grace_margin", 0.8),
    )


def _formats(given: dict[str, Any]) -> list[tuple[Format, Format]]:
    """What is given stays; else every codec of 16 bits or fewer, the most exact first."""
    from decoupled_diloco.merge import codec_names
    from decoupled_diloco_plan.bandwidth.setting import wire_format

    known = [wire_format(name) for name in codec_names()]
    tried = sorted((each for each in known if each.bits <= 16), key=lambda each: -each.bits)
    fixed = {name: wire_format(given[name]) for name in ("up", "down") if name in given}
    pairs = [(fixed.get("up", each), fixed.get("down", each)) for each in tried]
    return list(dict.fromkeys(pairs))


def _check_partition(given: dict[str, Any], inputs: Inputs, setting: Setting) -> None:
    """Whole layers make no more fragments than there are."""
    name = given.get("partition", "balanced")
    _known("--partition", name, PARTITIONS)
    fragments, layers = setting.options.fragments, inputs.model.layers
    if _whole_layers(given) and fragments > layers + 2:
        raise ConfigError(
            f"fragments={fragments} exceeds the {layers} layers, the embedding and the head of "
            f"partition={name!r}: lower the fragments, or cut by 'balanced'"
        )


def _whole_layers(given: dict[str, Any]) -> bool:
    return str(given.get("partition", "balanced")).startswith("layer")


# ---- shared


def _known(option: str, word: str, known: Any) -> None:
    from decoupled_diloco.config import suggestion

    if word not in known:
        raise ConfigError(f"{option} {word!r} is unknown: {suggestion(word, known)}")


def _refuse_others(given: dict[str, Any], wanted: set[str], why: str) -> None:
    for name in given:
        if name not in wanted:
            fail(f"--{name.replace('_', '-')} would be ignored {why}: leave it out")


def _write_json(value: Any, to: str | None) -> bool:
    """Writes JSON if that was asked for; whether nothing else is to be printed."""
    if to is None:
        return False
    text = json.dumps(value, indent=1, allow_nan=False) + "\n"
    if to == "-":
        sys.stdout.write(text)
        return True
    try:
        Path(to).write_text(text, encoding="utf-8")
    except OSError as error:
        fail(f"--json {to} cannot be written: {error.strerror}", 6)
    return False


def _save_plot(planned: Plan, path: Path) -> None:
    from decoupled_diloco_plan.bandwidth import compare
    from decoupled_diloco_plan.bandwidth.inputs import size_of
    from decoupled_diloco_plan.bandwidth.network import slowest
    from decoupled_diloco_plan.bandwidth.plots import save_curves

    link = slowest(planned.network.sites)
    curves = compare.curves(
        planned.inputs.model, planned.setting, planned.network, link_share=planned.link_share
    )
    o = planned.setting.options
    try:
        save_curves(
            curves,
            path,
            title=f"{size_of(planned.inputs.model.params)} parameters, "
            f"{len(planned.network.sites)} sites, H={o.period}",
            given=min(link.up, link.down),
            error_of=compare.DECOUPLED,
        )
    except OSError as error:
        fail(f"--plot {path} cannot be written: {error.strerror}", 6)
