"""`ddiloco plan`: make a plan from the options, and print it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict

from decoupled_diloco.cli.command_line import option_of
from decoupled_diloco.cli.shared_options import listed, make_console
from decoupled_diloco.config.settings import suggestion
from decoupled_diloco.config.sync import UPLINK_LADDER
from decoupled_diloco.errors import ConfigError
from decoupled_diloco.protocol.machine_options import Options
from decoupled_diloco_plan.bandwidth import compare, published_tables
from decoupled_diloco_plan.bandwidth.case import Case, Model, wire_format, wire_formats
from decoupled_diloco_plan.bandwidth.inputs import Inputs, read_inputs, size_of
from decoupled_diloco_plan.bandwidth.network import SPREAD, slowest
from decoupled_diloco_plan.bandwidth.plan_document import (
    Plan,
    document,
    print_plan,
    print_published,
)
from decoupled_diloco_plan.bandwidth.plan_options import METHODS, PARTITIONS, SOURCES, PlanOptions
from decoupled_diloco_plan.bandwidth.search import Proposal, evaluate, propose
from decoupled_diloco_plan.output import check_files, write_json

DEFAULT_PERIOD, DEFAULT_FRAGMENTS, DEFAULT_OVERLAP = 24, 24, 2
"""The paper's values, used if no setting is searched for."""

OF_MODEL = ("params", "layers", "step_seconds")
OF_PUBLISHED = (*OF_MODEL, "period")
"""Options that the published tables need."""


def run(options: PlanOptions) -> None:
    _known("--method", options.method, METHODS)
    check_files(options.out, options.plot)
    if options.method == "published":
        _published(options)
    else:
        _own(options)


def _published(options: PlanOptions) -> None:
    wanted = {*OF_PUBLISHED, "method", "system", "table", "as_json", "out", "utilization"}
    for name in options.model_fields_set - wanted:
        raise ConfigError(
            f"{option_of(PlanOptions, name)} cannot be combined with --method published: omit it"
        )
    lacking = [option_of(PlanOptions, n) for n in OF_PUBLISHED if getattr(options, n) is None]
    if lacking:
        raise ConfigError(f"--method published requires {', '.join(lacking)}: add them")
    if options.table is not None:
        _known("--table", options.table, SOURCES)
    rows = published_tables.rows(
        Model(*(getattr(options, name) for name in OF_MODEL)),
        period=options.period or 0,
        systems=tuple(published_tables.SYSTEMS)
        if options.system is None
        else listed(options.system),
        source=options.table,  # type: ignore[arg-type]
        targets=published_tables.TARGETS if options.utilization is None else (options.utilization,),
    )
    if not options.as_json:
        print_published(rows, make_console())
    write_json([asdict(row) for row in rows], printed=options.as_json, out=options.out)


def _own(options: PlanOptions) -> None:
    for name in ("system", "table"):
        if name in options.given:
            raise ConfigError(
                f"--{name} requires --method published: add --method published, or omit --{name}"
            )
    plan = make_plan(options)
    if options.plot is not None:
        _save_plot(plan)
    if not options.as_json:
        print_plan(plan, make_console())
    if options.as_json or options.out is not None:
        write_json(document(plan), printed=options.as_json, out=options.out)


def make_plan(options: PlanOptions) -> Plan:
    """Make the plan for the options of the command line."""
    inputs = read_inputs(options)
    aim = inputs.options.utilization
    if aim is None:
        found = _evaluate_given(inputs)
    else:
        found = propose(inputs.model, inputs.network, inputs.options, prices=inputs.prices)
    _check_partition(inputs, found.case.options.fragments)
    return Plan(inputs, found, aim)


def _evaluate_given(inputs: Inputs) -> Proposal:
    """Evaluate the given setting, with the paper's values for options that are missing."""
    given = inputs.options
    up, *coarser = wire_formats(given.up or ",".join(UPLINK_LADDER))
    case = Case(
        inputs.model,
        _options(inputs),
        inputs.network,
        up,
        wire_format(given.down or "bf16"),
        given.link_share,
        coarser=tuple(coarser),
    )
    return evaluate(case, inputs.prices)


def _options(inputs: Inputs) -> Options:
    given, network = inputs.options, inputs.network
    period = DEFAULT_PERIOD if given.period is None else given.period
    fragments = min(period, DEFAULT_FRAGMENTS) if given.fragments is None else given.fragments
    overlap = min(DEFAULT_OVERLAP, max(0, period - 1)) if given.overlap is None else given.overlap
    shards = given.shards
    if shards is None:
        spread = len(network.sites) if network.syncer == SPREAD else 1
        shards = max(1, min(spread, fragments))
    return Options(
        fragments=fragments,
        period=period,
        overlap=overlap,
        quorum=given.quorum,
        shards=shards,
        grace_margin=given.grace_margin,
        wait=given.wait,  # type: ignore[arg-type]
        apply=given.apply,  # type: ignore[arg-type]
        alignment=given.alignment,  # type: ignore[arg-type]
    )


def _check_partition(inputs: Inputs, fragments: int) -> None:
    """Check that a partition into whole layers has at least `fragments` parts."""
    given, layers = inputs.options, inputs.model.layers
    _known("--partition", given.partition, PARTITIONS)
    if given.whole_layers and fragments > layers + 2:
        raise ConfigError(
            f"fragments={fragments} exceeds the {layers} layers, the embedding and the head with "
            f"partition={given.partition!r}: lower --fragments, or use --partition balanced"
        )


def _known(option: str, word: str, known: Iterable[str]) -> None:
    if word not in known:
        raise ConfigError(f"{option} {word!r} is unknown: {suggestion(word, known)}")


def _save_plot(plan: Plan) -> None:
    # matplotlib is slow to import, so only --plot pays for it
    from decoupled_diloco_plan.bandwidth.plots import save_curves

    case, path = plan.case, plan.inputs.options.plot
    assert path is not None
    save_curves(
        compare.curves(case),
        path,
        title=f"{size_of(case.model.params)} parameters, {len(case.network.sites)} sites, "
        f"H={case.options.period}",
        given=slowest(case.network.sites).least,
        error_of=compare.DECOUPLED,
    )
