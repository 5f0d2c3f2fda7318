"""Compare the planner's rounds with the protocol's rounds in virtual time on the same links."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import mean

import pytest

from cases import long_after
from decoupled_diloco.config import RunConfig
from decoupled_diloco.protocol.machine_options import Options
from decoupled_diloco_lab.simulate import virtual_runtime
from decoupled_diloco_lab.simulate.protocol_run import ProtocolRun, Tally
from decoupled_diloco_lab.simulate.scenario import load_scenario
from decoupled_diloco_lab.simulate.spec import LearnerSpec, RelaySpec
from decoupled_diloco_lab.simulate.system import System
from decoupled_diloco_plan.bandwidth.case import Case, Model
from decoupled_diloco_plan.bandwidth.network import HUB, Link, Network, Site
from decoupled_diloco_plan.bandwidth.round_periods import simulate
from decoupled_diloco_plan.bandwidth.steady_state import Rounds

PARAMETERS, LEARNERS, PERIOD, STEPS = 48_000_000, 4, 12, 120

RUN = """
[run]
learners = {learners}
max_steps = {steps}
evaluator = false
[sync]
fragments = {fragments}
sync_every = 12
overlap_steps = {overlap}
quorum = {quorum}
grace_margin = {grace}
wait = "{wait}"
[workload]
name = "paced"
"""

STORY = """
run = "run.toml"
parameters = {parameters}
{groups}
[[links]]
name = "all"
latency_seconds = {latency}
up = "{mbit}Mbit/s"
down = "{mbit}Mbit/s"
shared = {shared}
"""


GROUP = """
[[learners]]
count = {count}
step_seconds = {step}
link = "all"
"""


def protocol(
    folder: Path,
    mbit: int,
    latency: float,
    shared: bool,
    options: Options,
    steps: tuple[float, ...] = (1.0,),
) -> ProtocolRun:
    """Run the protocol with the same number of learners for each step time."""
    (folder / "run.toml").write_text(
        RUN.format(
            learners=LEARNERS,
            steps=STEPS,
            fragments=options.fragments,
            overlap=options.overlap,
            quorum=options.quorum,
            grace=options.grace_margin,
            wait=options.wait,
        )
    )
    (folder / "story.toml").write_text(
        STORY.format(
            parameters=PARAMETERS,
            groups="".join(GROUP.format(count=LEARNERS // len(steps), step=s) for s in steps),
            latency=latency,
            mbit=mbit,
            shared=str(shared).lower(),
        )
    )
    run = ProtocolRun(load_scenario(folder / "story.toml"))
    while run.advance():
        pass
    run.close()
    assert run.finished, run.reason
    return run


def planned(
    mbit: int,
    latency: float,
    shared: bool,
    options: Options,
    steps: tuple[float, ...] = (1.0,),
) -> Rounds:
    """Plan with the assumptions of virtual time: full link rates, and processes take no time."""
    rate = mbit * 1e6 / 8
    link = Link(rate, rate, latency, shared)
    sites = tuple(Site(f"all at {step}", LEARNERS // len(steps), link, step) for step in steps)
    network = Network(sites, HUB, Link(math.inf, math.inf, 0.0005))
    case = Case(
        Model(PARAMETERS, 4, 1.0),
        options,
        network,
        link_share=1.0,
        step_overhead=0.0,
        handling_seconds=0.0,
    )
    return simulate(case)


@pytest.mark.parametrize(
    ("mbit", "latency", "shared"),
    long_after(
        2,
        [
            (400, 0.02, False),
            (100, 0.02, True),
            (100, 0.02, False),
            (400, 0.3, False),
            (200, 0.02, True),
        ],
    ),
)
def test_rounds_of_learners_that_never_wait(
    tmp_path: Path, mbit: int, latency: float, shared: bool
) -> None:
    """The rounds are the same and take about the same time if the links carry all of them.

    Otherwise the planner finds fewer rounds with more contributions each, because its learners are
    identical: all of them are in a round, or none is. The protocol has at most as many
    contributions as the plan and at least two fifths of them. A copy after a skipped one is fetched
    whole, with twice as many bytes.
    """
    options = Options(fragments=12, period=PERIOD, overlap=2)
    real = protocol(tmp_path, mbit, latency, shared, options)
    plan = planned(mbit, latency, shared, options)
    seconds = mean(real.tally.finished_seconds)
    merged = (real.tally.merged - 12) / STEPS  # each fragment also has a closing round
    folded = (real.tally.states["folded"] - 12 * LEARNERS) / STEPS / LEARNERS
    if plan.kept == 1.0:
        assert merged == pytest.approx(1.0, abs=0.05)
        assert plan.merge_seconds == pytest.approx(seconds, rel=0.12)
    else:
        assert plan.merged <= merged + 0.05
        assert 0.4 * plan.kept <= folded <= plan.kept + 0.05


@pytest.mark.parametrize(
    ("fragments", "overlap", "mbit"), long_after(2, [(12, 2, 50), (1, 0, 50), (12, 2, 100)])
)
def test_steps_of_learners_that_wait(
    tmp_path: Path, fragments: int, overlap: int, mbit: int
) -> None:
    """The run takes the planned time, apart from its first weights and its last rounds."""
    options = Options(
        fragments=fragments, period=PERIOD, overlap=overlap, quorum=LEARNERS, wait="at_overlap"
    )
    real = protocol(tmp_path, mbit, 0.02, False, options)
    plan = planned(mbit, 0.02, False, options)
    whole = 2 * 4 * PARAMETERS * 8 / (mbit * 1e6)  # fp32, from the first learner and to all
    last = 4 * PARAMETERS * 8 / (mbit * 1e6)  # a round of every fragment, up and down in bf16
    share = STEPS / (real.system.now - whole - last / 2)
    assert plan.compute == pytest.approx(min(1.0, share), abs=0.08)


@pytest.mark.parametrize("grace", long_after(1, [0.8, 0.0]))
@pytest.mark.parametrize("steps", [(1.0, 1.18, 1.29, 1.37), (1.0, 1.7, 2.1, 3.3)])
def test_participation_of_learners_with_different_speeds(
    tmp_path: Path, steps: tuple[float, ...], grace: float
) -> None:
    """With a quorum of one, the fastest learner sets the pace, and participation is within 8 %.

    All steps differ, because one of two learners that report at the same instant is always later.
    """
    options = Options(fragments=12, period=PERIOD, overlap=3, quorum=1, grace_margin=grace)
    real = protocol(tmp_path, 400, 0.02, False, options, steps)
    plan = planned(400, 0.02, False, options, steps)
    folded = real.tally.states["folded"] / real.tally.merged
    assert sum(plan.participation) == pytest.approx(folded, abs=0.3)
    assert plan.step_seconds == 1.0


ELEMENTS, FACTOR = 8000, 100
"""Elements of a simulated fragment, and the size of the planned fragment in such fragments."""

FAR = 0.02
"""One-way latency of the shard's link, seconds."""

SECONDS = 4.0
"""Length of a period: four steps."""


def long_links(
    folder: Path, relays: list[RelaySpec], learners: int
) -> tuple[Counter[tuple[str, str]], float]:
    """Run the protocol with an equal number of learners at each site.

    Returns:
        The bytes from process to process in a period: payloads of the planned size, and at the
        shard also its messages. The mean seconds from a round's opening to its new version.
    """
    config = RunConfig(
        run={"name": "sites", "learners": learners, "max_steps": 60, "folder": folder}
        | {"evaluator": False, "checkpoint_interval_seconds": 0},
        sync={"fragments": 4, "sync_every": 4, "overlap_steps": 1},
        syncer={"shards": 1},
        learner={"checkpoint_interval_seconds": 0},
        data={},
        workload={},
    )
    specs = [
        LearnerSpec(f"learner-{n}", relay=relays[n * len(relays) // learners].name)
        for n in range(learners)
    ]
    sizes = [ELEMENTS] * 4
    system = System(config, specs, folder, seed=1, sizes=sizes, relays=relays, checks=False)
    moved, transfer = Counter[tuple[str, str]](), system.network.transfer

    def counted(sender, receiver, nbytes, *arguments, **named):  # type: ignore[no-untyped-def]
        moved[sender.name, receiver.name] += FACTOR * nbytes
        transfer(sender, receiver, nbytes, *arguments, **named)

    def so_far() -> Counter[tuple[str, str]]:
        stats = system.shards[0].role.acting._server.stats  # type: ignore[union-attr]
        messages = {("messages", "up"): stats.control_bytes_received}
        return moved + Counter(messages | {("messages", "down"): stats.control_bytes_sent})

    system.shards[0].link.latency = FAR
    system.network.transfer = counted  # type: ignore[method-assign]
    tally = Tally()
    system.recorders.append(tally.record)
    try:
        system.run(until=4.5)  # the learners have joined, and their clock is regular
        before = so_far()
        tally.finished_seconds.clear()
        system.run(until=4.5 + SECONDS)
        assert system.error is None
        return so_far() - before, mean(tally.finished_seconds)
    finally:
        system.close()


@pytest.mark.parametrize(
    ("sites", "learners", "upstream"),
    [(8, 64, ""), (3, 6, "site-0")],
    ids=["sites", "relays-of-relays"],
)
def test_relays_send_the_planned_bytes_over_long_links_in_the_planned_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sites: int, learners: int, upstream: str
) -> None:
    """Bytes over the link of each site and of the shard are within 5 % of the plan."""
    monkeypatch.setattr(virtual_runtime, "WORK_SECONDS", 0.0)  # as if tensors took no time
    above = ["", *[upstream] * (sites - 1)]
    relays = [RelaySpec(f"site-{i}", above[i]) for i in range(sites)]
    moved, seconds = long_links(tmp_path, relays, learners)
    link = Link(1e12, 1e12, 0.001)
    network = Network(
        tuple(
            Site(f"site-{i}", learners // sites, link, relay=True, upstream=above[i])
            for i in range(sites)
        ),
        HUB,
        Link(1e15, 1e15, FAR),
    )
    options = Options(fragments=4, period=4, overlap=1, shards=1)
    model = Model(4 * FACTOR * ELEMENTS, 4, 1.0)
    rounds = simulate(Case(model, options, network, step_overhead=0.0, handling_seconds=0.0))
    plan = {(t.place, t.direction): SECONDS * t.mean for t in rounds.traffic}

    def summed(holds: Callable[[str, str], bool]) -> float:
        return sum(nbytes for way, nbytes in moved.items() if holds(*way))

    for i in range(sites):
        name, target = f"site-{i}", above[i] or "shard-0"
        assert moved[name, target] == pytest.approx(plan[name, "up"], rel=0.05)
        assert moved[target, name] == pytest.approx(plan[name, "down"], rel=0.05)
    # The steps of a real site end up to 0.02 s after those of another one.
    assert rounds.merge_seconds == pytest.approx(seconds, rel=0.15)
    up, down = moved["messages", "up"], moved["messages", "down"]
    into = up + summed(lambda sender, receiver: receiver == "shard-0")
    out = down + summed(lambda sender, receiver: sender == "shard-0")
    assert into == pytest.approx(plan["hub", "down"], rel=0.05)
    assert out == pytest.approx(plan["hub", "up"], rel=0.05)
