"""Inputs of a plan, and the values that were assumed for missing options."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from decoupled_diloco.config import RunConfig, load_config
from decoupled_diloco.config.method import options_of
from decoupled_diloco.config.settings import is_own
from decoupled_diloco.config.sync import bits_of
from decoupled_diloco.config.toml_files import RECIPES
from decoupled_diloco.errors import ConfigError
from decoupled_diloco.tape import TapeReader, tapes_in
from decoupled_diloco.units import format_count, format_duration, format_rate
from decoupled_diloco_plan.bandwidth import measured
from decoupled_diloco_plan.bandwidth.case import (
    Extra,
    Model,
    assumed_layers,
    assumed_step_seconds,
    step_seconds_of,
)
from decoupled_diloco_plan.bandwidth.network import (
    HUB,
    RELAY_RATE,
    SPREAD,
    Link,
    Network,
    Site,
    equal_sites,
    parse_link,
    parse_site,
)
from decoupled_diloco_plan.bandwidth.plan_options import MOST, PlanOptions
from decoupled_diloco_plan.bandwidth.predict import Prices
from decoupled_diloco_plan.checks import between

NO_SITE = "(no site)"
"""Name of the place that stands for the learners that are at no site of a run's file."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """A model on a network, the other options, and one sentence per assumed value."""

    options: PlanOptions
    model: Model
    network: Network
    prices: Prices | None
    assumed: tuple[str, ...]


def read_inputs(options: PlanOptions) -> Inputs:
    """Read the command line and the run's configuration file.

    Raises:
        ConfigError: A value is missing, out of range, or given twice.
    """
    for name, most in MOST.items():
        if (value := getattr(options, name)) is not None:
            between(0, most, **{name: value})
    assumed: list[str] = []
    if (given := options.config) is not None:
        config = load_config(RECIPES.find(given))
        options = options.after(_settings_of(config))
        if options.step_seconds is None and options.flops is None:
            step = _taped(given, config.run.folder)
            shown = format_duration(step)
            assumed.append(f"a step of {shown}, from the tape in {config.run.folder}")
            options = options.after({"step_seconds": step})
    model, network = _model(options, assumed), _network(options)
    if network.has_relays and options.relay_link is None:
        rate = format_rate(network.relay_rate)
        assumed.append(f"{rate} between a relay and its site's learners (--relay-link)")
    return Inputs(options, model, network, _prices(options), tuple(assumed))


def _model(options: PlanOptions, assumed: list[str]) -> Model:
    """Return the model; assume layers and step time where they are not given."""
    if options.params is None:
        raise ConfigError("the model size is missing: give --params, such as 12e9, or a CONFIG")
    if options.tokens is not None and options.tokens_per_step is None:
        raise ConfigError("--tokens needs --tokens-per-step to compute the number of steps: add it")
    layers = options.layers
    if layers is None:
        layers = assumed_layers(options.params) if options.params > 0 else 1
        assumed.append(f"{layers} layers, from the depth of the published models (--layers)")
    step, why = _step_seconds(options, options.params)
    if why:
        assumed.append(f"a step of {format_duration(step)}{why}")
    return Model(options.params, layers, step, _extra(options))


def _step_seconds(options: PlanOptions, params: float) -> tuple[float, str]:
    """Return the step time, and its origin unless it was given."""
    chips, tokens = options.chips, options.tokens_per_step
    if options.step_seconds is not None:
        if None not in (options.flops, chips, tokens) and options.tokens is None:
            raise ConfigError(
                "the step time is given twice, by --step-seconds and by --flops with --chips: "
                "leave one out"
            )
        return options.step_seconds, ""
    if options.flops is None:
        why = ", scaled from the published 10B model's 0.8 s (--step-seconds)"
        return assumed_step_seconds(params), why
    if chips is None or tokens is None:
        raise ConfigError("--flops needs --chips and --tokens-per-step to give the step: add them")
    step = step_seconds_of(params, tokens, chips, options.flops)
    return step, ": 6·N·B/(R·Q), without losses inside a learner"


def _prices(options: PlanOptions) -> Prices | None:
    if options.price_chip_hour is None and options.price_gb is None:
        return None
    if options.chips is None or options.tokens_per_step is None:
        raise ConfigError(
            "a cost per token needs --chips and --tokens-per-step in addition to prices: add them"
        )
    rates = (options.price_chip_hour or 0.0, options.price_gb or 0.0)
    return Prices(*rates, options.chips, options.tokens_per_step)


def _network(options: PlanOptions) -> Network:
    sites = _sites(options)
    at_hub = len(sites) == 1 and options.site is None
    at_hub |= any(site.relay for site in sites) or options.hub_link is not None
    place = options.syncer or (HUB if at_hub else SPREAD)
    hub = None
    if options.hub_link is not None:
        hub = parse_link(options.hub_link)
    elif place == HUB:
        hub = Link(math.inf, math.inf)
    rate = RELAY_RATE
    if options.relay_link is not None:
        if not any(site.relay for site in sites):
            raise ConfigError(
                "--relay-link needs a relay: add --relay, or ':relay' to a --site, or omit it"
            )
        rate = options.relay_link
    return Network(sites, place, hub, rate)


def _sites(options: PlanOptions) -> tuple[Site, ...]:
    learners = options.learners
    if options.site is not None:
        return _given_sites(options)
    if options.link is None:
        raise ConfigError(
            "the link is missing: give --link, such as 2Gbit, or --site for each site"
        )
    link = parse_link(options.link, latency_seconds=options.latency, shared=not options.own)
    if options.run_sites and options.sites is None:
        if options.relay:
            raise ConfigError(f"{options.config} has [[sites]] with relays already: omit --relay")
        return _sites_of_run(options, link)
    count = _given_or(options.sites, learners, 1)
    return equal_sites(count, _given_or(learners, max(1, count)), link, relay=options.relay)


def _given_sites(options: PlanOptions) -> tuple[Site, ...]:
    for name in ("sites", "link", "relay"):
        if getattr(options, name):
            also = ", which says ':relay' itself" if name == "relay" else ""
            raise ConfigError(f"--site{also} cannot be combined with --{name}: give one of them")
    sites = tuple(map(parse_site, options.site or ()))
    learners = sum(site.learners for site in sites)
    if options.learners not in (None, learners):
        raise ConfigError(
            f"learners={options.learners}, but the sites have {learners}: leave --learners "
            "out, or change the learners of each --site"
        )
    return sites


def _sites_of_run(options: PlanOptions, link: Link) -> tuple[Site, ...]:
    """Return the sites of a run's file; learners without a site have their own links."""
    sites = [
        Site(name, count, link, relay=True, upstream=upstream)
        for name, count, upstream in options.run_sites
    ]
    rest = (options.learners or 0) - sum(site.learners for site in sites)
    if rest < 0:
        raise ConfigError(
            f"learners={options.learners}, but the sites of {options.config} have "
            f"{options.learners - rest if options.learners else -rest}: leave --learners out"
        )
    if rest:
        sites.append(Site(NO_SITE, rest, replace(link, shared=False)))
    return tuple(sites)


def _given_or(*values: int | None) -> int:
    """Return the first value that is given."""
    return next(value for value in values if value is not None)


def _settings_of(config: RunConfig) -> Mapping[str, Any]:
    """Return the settings of a run's configuration file by the names of the options."""
    sync = config.sync
    if sync.participation == "async":
        raise ConfigError(
            f"the run {config.run.name!r} has participation='async', which the planner does not "
            "support, because each merge of one learner is sent to all learners: plan it with "
            "participation='active', and divide the downlink's rate by the number of learners"
        )
    for name, own in (("schedule", sync.schedule), ("participation", sync.participation)):
        if own is not None and is_own(own):
            raise ConfigError(
                f"the run {config.run.name!r} has {name}={own!r}, which the planner does not "
                f"support: plan it without {name}, for each value of sync_every that it may have"
            )
    options = options_of(config)
    same = ("quorum", "period", "fragments", "overlap", "grace_margin", "shards")
    return {
        **{name: getattr(options, name) for name in (*same, "wait", "apply", "alignment")},
        **model_of(config),
        "learners": config.run.learners,
        "partition": sync.partition.scheme,
        "up": _uplinks(config),
        "down": sync.codec.downlink,
        "moments": sync.moments,
        "average": config.outer.average is not None,
        "run_sites": tuple((s.name, len(s.learners), s.upstream) for s in config.sites),
    }


def _extra(options: PlanOptions) -> Extra:
    """Return what merged moments and the average of the weights add."""
    average = measured.COPY_BYTES if options.average else 0
    if (moments := options.moments) is None:
        return Extra(shard_bytes=average)
    names = len(moments.names)
    return Extra(
        moment_bits=names * bits_of(moments.codec) / moments.every,
        copy_bytes=names * measured.COPY_BYTES,
        shard_bytes=names * measured.MOMENT_BYTES + average,
    )


def _uplinks(config: RunConfig) -> str:
    """Return the ladder of contributions' formats; masked ones have whole bytes."""
    if not config.privacy.secure_sums:
        return ",".join(config.sync.codec.uplinks)
    from decoupled_diloco.merge.fixed_point import FixedPoint  # imports torch

    return f"{FixedPoint.of(config.privacy.bits, config.run.learners).modulus_bits}bit"


def model_of(config: RunConfig) -> dict[str, Any]:
    """Return the size of a run's model, and its step time if the workload is paced."""
    from decoupled_diloco.workloads import workload_of  # imports torch

    workload = workload_of(config)
    tensors = {
        name: each.numel()
        for name, each in workload.model().named_parameters()
        if each.requires_grad
    }
    blocks = {match[0] for name in tensors if (match := re.match(r".*?\.\d+\.", name))}
    settings = config.required_workload
    pace = settings.options.get("step_seconds") if settings.name == "paced" else None
    step = max(pace) if isinstance(pace, list | tuple) else pace
    size = float(sum(tensors.values()))
    return {"params": size, "layers": len(blocks) or None, "step_seconds": step}


def _taped(run: str, folder: Path) -> float:
    """Return the step time of a recorded run: the median of the learners' median steps."""
    medians = []
    tapes = [tape for tape in tapes_in(folder / "tape") if tape.name.startswith("learner-")]
    for path in tapes:
        ends = [record.at for record in TapeReader(path) if record.type == "StepFinished"]
        if len(ends) > 1:
            medians.append(median(b - a for a, b in pairwise(ends)))
    if not medians:
        raise ConfigError(
            f"{run} does not specify the step time, and {folder} has no tape of a finished run: "
            "give --step-seconds, as measured on the learners' machines"
        )
    return median(medians)


def size_of(params: float) -> str:
    """Format a number of parameters.

    >>> size_of(12e9), size_of(853_120)
    ('12B', '853k')
    """
    return format_count(params).replace("G", "B")


def summary(model: Model, network: Network) -> str:
    """Describe the planned model and network in one line."""
    n, m = len(network.sites), network.learners
    paces = sorted(set(network.paces(model.step_seconds)))
    ends = dict.fromkeys((paces[0], paces[-1]))
    return (
        f"{size_of(model.params)} parameters, {model.layers} layers, a step of "
        f"{' to '.join(map(format_duration, ends))}; {m} learner{'s' * (m > 1)} at {n} "
        f"site{'s' * (n > 1)}"
    )
