"""`ddiloco plan`: from what was said to a plan, and out with it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict

from decoupled_diloco.cli.command_line import option_of
from decoupled_diloco.cli.options import listed, make_console
from decoupled_diloco.config.settings import suggestion
from decoupled_diloco.errors import ConfigError
from decoupled_diloco.protocol.options import Options
from decoupled_diloco_plan.bandwidth import compare, published
from decoupled_diloco_plan.bandwidth.case import Case, Model, wire_format
from decoupled_diloco_plan.bandwidth.document import Plan, document, print_plan, print_published
from decoupled_diloco_plan.bandwidth.inputs import Inputs, read_inputs, size_of
from decoupled_diloco_plan.bandwidth.network import SPREAD, slowest
from decoupled_diloco_plan.bandwidth.options import METHODS, PARTITIONS, SOURCES, PlanOptions
from decoupled_diloco_plan.bandwidth.search import Proposal, look, propose
from decoupled_diloco_plan.output import STDOUT, check_files, write_json

DEFAULT_PERIOD, DEFAULT_FRAGMENTS, DEFAULT_OVERLAP = 24, 24, 2
"""The paper's, where nothing is proposed."""

OF_MODEL = ("params", "layers", "step_seconds")
OF_PUBLISHED = (*OF_MODEL, "period")
"""What the published tables are made of."""


def run(options: PlanOptions) -> None:
    _known("--method", options.method, METHODS)
    check_files(options.json_to, options.plot)
    if options.method == "published":
        _published(options)
    else:
        _own(options)


def _published(options: PlanOptions) -> None:
    wanted = {*OF_PUBLISHED, "method", "system", "table", "json_to", "utilization"}
    for name in options.model_fields_set - wanted:
        raise ConfigError(
            f"{option_of(PlanOptions, name)} would be ignored with --method published: leave it out"
        )
    lacking = [option_of(PlanOptions, n) for n in OF_PUBLISHED if getattr(options, n) is None]
    if lacking:
        raise ConfigError(f"--method published lacks {', '.join(lacking)}: give them")
    if options.table is not None:
        _known("--table", options.table, SOURCES)
    rows = published.rows(
        Model(*(getattr(options, name) for name in OF_MODEL)),
        period=options.period or 0,
        systems=tuple(published.SYSTEMS) if options.system is None else listed(options.system),
        source=options.table,  # type: ignore[arg-type]
        targets=published.TARGETS if options.utilization is None else (options.utilization,),
    )
    if options.json_to != STDOUT:
        print_published(rows, make_console())
    write_json([asdict(row) for row in rows], options.json_to)


def _own(options: PlanOptions) -> None:
    for name in ("system", "table"):
        if name in options.given:
            raise ConfigError(
                f"--{name} is for --method published: leave it out, or say --method published"
            )
    plan = make_plan(options)
    if options.plot is not None:
        _save_plot(plan)
    if options.json_to != STDOUT:
        print_plan(plan, make_console())
    if options.json_to is not None:
        write_json(document(plan), options.json_to)


def make_plan(options: PlanOptions) -> Plan:
    """The plan of what was given on the command line."""
    inputs = read_inputs(options)
    aim = inputs.options.utilization
    if aim is None:
        found = _look(inputs)
    else:
        found = propose(inputs.model, inputs.network, inputs.options, prices=inputs.prices)
    _check_partition(inputs, found.case.options.fragments)
    return Plan(inputs, found, aim)


def _look(inputs: Inputs) -> Proposal:
    """What was given, and the paper's numbers where nothing was."""
    given = inputs.options
    formats = wire_format(given.up or "bf16"), wire_format(given.down or "bf16")
    case = Case(inputs.model, _options(inputs), inputs.network, *formats, given.link_share)
    return look(case, inputs.prices)


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
    """Whole layers make no more fragments than there are."""
    given, layers = inputs.options, inputs.model.layers
    _known("--partition", given.partition, PARTITIONS)
    if given.whole_layers and fragments > layers + 2:
        raise ConfigError(
            f"fragments={fragments} exceeds the {layers} layers, the embedding and the head of "
            f"partition={given.partition!r}: lower the fragments, or cut by 'balanced'"
        )


def _known(option: str, word: str, known: Iterable[str]) -> None:
    if word not in known:
        raise ConfigError(f"{option} {word!r} is unknown: {suggestion(word, known)}")


def _save_plot(plan: Plan) -> None:
    from decoupled_diloco_plan.bandwidth.plots import save_curves  # matplotlib takes a while

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
