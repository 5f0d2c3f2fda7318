"""Random worlds: options, learners, links and what befalls them, all drawn from one seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from decoupled_diloco.protocol.options import Options
from decoupled_diloco.simulate.bodies import NoBodies
from decoupled_diloco.simulate.bounds import Bounds
from decoupled_diloco.simulate.checkers import Checker
from decoupled_diloco.simulate.choices import Choices
from decoupled_diloco.simulate.claim_checker import ClaimChecker
from decoupled_diloco.simulate.claims import Standbys
from decoupled_diloco.simulate.faults import (
    Fault,
    random_faults,
    random_hardships,
    random_takeovers,
    strike,
)
from decoupled_diloco.simulate.learner_process import LearnerSpec
from decoupled_diloco.simulate.leased_loop import NumberedParts, VirtualData
from decoupled_diloco.simulate.network import Link
from decoupled_diloco.simulate.shrink import Changes, Size
from decoupled_diloco.simulate.world import Mishaps, World


def random_options(choices: Choices, learners: int) -> Options:
    """Settings drawn from all of those that make sense together."""
    fragments, period = choices.integer(1, 10), choices.integer(1, 10)
    quorum = choices.pick([1, 1, 2, learners, choices.integer(1, learners)])
    quorum = min(quorum, learners)
    wait = quorum == learners and choices.chance(0.4)
    overlap = choices.integer(0, 3)
    return Options(
        fragments=fragments,
        period=period,
        overlap=min(overlap, period - 1) if wait else overlap,
        quorum=quorum,
        shards=choices.integer(1, min(3, fragments)),
        grace_margin=choices.chance(0.7) * choices.uniform(0.0, 0.95),
        participants=choices.pick(["reported", "all"]),
        alignment=choices.pick(["overwrite", "carry", "blend"]),
        missed=choices.pick(["overwrite", "rebase"]),
        apply=choices.pick(["on_arrival", "at_tau"]),
        wait="at_overlap" if wait else "never",
        counter_cap_periods=choices.integer(1, 4),
        norm_gate=choices.fork("gate").pick([0.0, 10.0]),
        oversized=choices.fork("oversized").pick(["refuse", "clip"]),
        checkpoint_every_seconds=choices.fork("cuts").pick([0.0, 2.0, 5.0, 15.0]),
    )


def random_learners(choices: Choices, count: int, step_seconds: float) -> list[LearnerSpec]:
    """Learners of different speeds behind different links; sometimes an observer."""
    spread = choices.pick([1.0, 1.2, 2.0, 4.0])
    latency = choices.log_uniform(0.0002, 0.2)
    specs = []
    for number in range(count):
        rate = choices.log_uniform(300.0, 1e6) / step_seconds
        specs.append(
            LearnerSpec(
                name=f"learner-{number}",
                step_seconds=step_seconds * choices.pick([1.0, spread, choices.uniform(1, spread)]),
                variance=choices.pick([0.0, 0.02, 0.3]),
                latency=latency * choices.uniform(0.5, 2.0),
                jitter=latency * choices.pick([0.0, 0.0, 1.0, 10.0]),
                up_bytes_per_second=rate,
                down_bytes_per_second=rate * choices.uniform(1.0, 10.0),
                tokens_per_step=choices.integer(1, 100),
                joins_at=choices.pick([0.0, 0.0, choices.uniform(0.0, 30.0)]),
            )
        )
    if choices.chance(0.2):
        specs.append(LearnerSpec("observer", joins_at=choices.uniform(0, 20), role="observer"))
    return specs


def random_sizes(choices: Choices, fragments: int) -> list[int]:
    """Bytes of the fragments' copies: in a third of all worlds one is far larger than the rest."""
    sizes = [choices.integer(10, 1000) for _ in range(fragments)]
    uneven = choices.fork("uneven")
    if uneven.chance(0.33):
        sizes = [uneven.integer(80, 160) for _ in sizes]
        sizes[uneven.integer(0, fragments - 1)] *= uneven.integer(2, 60)
    return sizes


def with_slow_links(
    choices: Choices, learners: list[LearnerSpec], options: Options, sizes: list[int]
) -> list[LearnerSpec]:
    """In a third of all worlds some uplinks and some downlinks are slow, each by itself.

    So slow that all contributions to the model's fragments take up to a hundred and twenty steps;
    a third of that where others wait for them.
    """
    if not choices.chance(0.33):
        return learners
    longest = 120.0 if options.wait == "never" else 40.0
    nbytes = NoBodies.ratio * sum(sizes)

    def rate(learner: LearnerSpec, otherwise: float) -> float:
        steps = choices.log_uniform(0.5, longest)
        return nbytes / (steps * learner.step_seconds) if choices.chance(0.4) else otherwise

    return [
        replace(
            learner,
            up_bytes_per_second=rate(learner, learner.up_bytes_per_second),
            down_bytes_per_second=rate(learner, learner.down_bytes_per_second),
        )
        for learner in learners
    ]


def random_data(choices: Choices) -> VirtualData | None:
    """Parts of some batches each, in half of all worlds."""
    if choices.chance(0.5):
        return None
    parts = NumberedParts(choices.integer(1, 12), choices.pick([1, 4, 12]))
    return VirtualData(parts, choices.integer(1, 3), choices.pick([1, 1, 3]))


def random_standbys(choices: Choices, changes: Changes) -> Standbys | None:
    """A standby for every shard, in a third of all worlds."""
    without = choices.chance(0.67) and not changes.with_standbys
    if without or changes.without_standbys:
        return None
    return Standbys(
        lease_seconds=choices.log_uniform(1.0, 15.0),
        storage_seconds=choices.log_uniform(0.0005, 0.1),
        storage_fails=choices.pick([0.0, 0.0, 0.05]),
    )


@dataclass(slots=True)
class Scenario:
    """One random world and what will befall it."""

    seed: int
    options: Options
    learners: list[LearnerSpec]
    faults: list[Fault]
    mishaps: Mishaps
    world: World
    checker: Checker
    bounds: Bounds
    claims: ClaimChecker
    faulty_seconds: float
    step_seconds: float
    ends: bool

    @property
    def size(self) -> Size:
        """What can be taken away from it."""
        mishaps = tuple(f.name for f in fields(Mishaps) if getattr(self.mishaps, f.name))
        learners = tuple(spec.name for spec in self.learners)
        return Size(len(self.faults), learners, mishaps, self.faulty_seconds)


def draw(seed: int, changes: Changes | None = None) -> Scenario:
    """The random world of a seed, without what is taken away from it."""
    changes = changes or Changes()
    choices = Choices(seed)
    count = choices.pick([1, 2, 2, 3, 4, 6])
    faulty = choices.uniform(20.0, 80.0)
    step_seconds = faulty * count / choices.log_uniform(30.0, 160.0)
    step_seconds = min(step_seconds, 2.0)
    options = random_options(choices.fork("options"), count)
    ends = choices.chance(0.6)
    if ends:
        after, amid = choices.uniform(0.0, 60.0), choices.fork("amid")
        until = amid.uniform(0.2, 1.0) * faulty if amid.chance(0.25) else faulty + after
        steps = int(until / step_seconds) + 1
        options = replace(options, budget_steps=steps)
    learners = random_learners(choices.fork("learners"), count, step_seconds)
    often = choices.pick([0.0, 0.0, 0.02])
    mishaps = Mishaps(
        spurious_ticks=choices.pick([0.0, 0.1]),
        spoil=often,
        merge_fails=often,
        crash_after_persist=choices.pick([0.0, 0.0, 0.2]),
        poison=choices.fork("poison").pick([0.0, 0.0, 0.02]),
        disk_lies=choices.fork("lies").pick([0.0, 0.0, 0.1]),
        disk_lost=choices.fork("disks").pick([0.0, 0.3, 1.0]),
        checkpoints=choices.fork("checkpoints").pick([0.0, 0.05, 0.5]),
        checkpoint_lost=choices.fork("checkpoint lost").pick([0.0, 0.3]),
        donors=choices.fork("donors").pick([0.0, 1.0]),
        preempted=choices.fork("preempted").pick([0.0, 0.5]),
        crash_after_merge=choices.fork("power").pick([0.0, 0.0, 0.0, 0.02]),
        stalls=choices.fork("stalls").pick([0.0, 0.0, 0.0, 0.01]),
        slips=choices.fork("slips").pick([0.0, 0.0, 0.005]),
        copies_slip=choices.fork("copies slip").pick([0.0, 0.0, 0.3]),
    )
    from_file = choices.chance(0.2)
    fragment_bytes = random_sizes(choices, options.fragments)
    slow_links = choices.fork("slow links")
    learners = with_slow_links(slow_links, learners, options, fragment_bytes)
    inbox_seconds = choices.fork("inbox").pick([0.0, 0.0, 0.02, 0.3])
    mean = choices.pick([2.0, 5.0, 15.0, 1000.0])
    faults = random_faults(
        choices.fork("faults"),
        [spec.name for spec in learners],
        options.shards,
        until=faulty,
        mean_seconds=mean,
    )
    standbys = random_standbys(choices.fork("standbys"), changes)
    faults += _of_claims(choices.fork("takeovers"), options.shards, standbys, faulty)
    options = replace(options, **changes.options)
    mishaps = replace(mishaps, **changes.mishaps)
    kept = [
        replace(s, **changes.learners) for s in learners if s.name not in changes.without_learners
    ]
    world = World(
        options,
        kept,
        seed=f"{seed}/world",
        mishaps=mishaps,
        weights_from_file=from_file,
        fragment_bytes=fragment_bytes[: options.fragments],
        inbox_seconds=inbox_seconds,
        data=random_data(choices.fork("data")),
        standbys=standbys,
    )
    # Its orders reach one participant long before another: what a cut must not mind.
    world.coordinator.link = Link(jitter=choices.fork("orders").pick([0.0, 0.0, 3.0, 10.0]))
    faults += _hardships(choices.fork("hardships"), world, faulty)
    strike(world, _left(faults, world, changes))
    return Scenario(
        seed,
        options,
        kept,
        faults,
        mishaps,
        world,
        Checker(world),
        Bounds(world),
        ClaimChecker(world),
        changes.faulty_seconds or faulty,
        step_seconds,
        options.budget_steps is not None,
    )


def _of_claims(
    choices: Choices, shards: int, standbys: Standbys | None, until: float
) -> list[Fault]:
    """What befalls claims, where there are any."""
    if standbys is None:
        return []
    often = choices.pick([3.0, 10.0, 30.0])
    return random_takeovers(choices, shards, until=until, mean_seconds=often)


def _hardships(choices: Choices, world: World, until: float) -> list[Fault]:
    """What makes learners late, in half of all worlds."""
    learners = [learner for learner in world.learners.values() if not learner.is_observer]
    if choices.chance(0.5) or not learners:
        return []
    assert isinstance(world.bodies, NoBodies)
    sizes = world.bodies.fragment_bytes
    return random_hardships(
        choices,
        learners,
        world.options.shards,
        body_bytes=NoBodies.ratio * sum(sizes) / len(sizes),
        until=until,
        mean_seconds=choices.pick([4.0, 10.0, 30.0]),
    )


def _left(faults: Sequence[Fault], world: World, changes: Changes) -> list[Fault]:
    """The faults that are not taken away, nor the process that they would strike."""
    there = {"", *(process.name for process in world.processes)}
    until = changes.faulty_seconds or float("inf")
    return [
        fault
        for number, fault in enumerate(faults)
        if number not in changes.without_faults
        and {fault.process, fault.peer} <= there
        and fault.at < until
    ]
