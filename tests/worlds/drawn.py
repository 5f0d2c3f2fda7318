"""Draw the settings, learners and links of a random world from a seed."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from decoupled_diloco.config.signing_keys import PublicKey
from decoupled_diloco.config.sync import BITS
from decoupled_diloco.protocol.adapt import AdaptLimits
from decoupled_diloco.protocol.machine_options import Options
from decoupled_diloco_lab.simulate.choices import Choices
from decoupled_diloco_lab.simulate.spec import LearnerSpec, RelaySpec
from worlds.data_checker import Parts

CONTRIBUTED = 0.5
"""Size of a contribution (bf16) relative to a copy (fp32)."""

BUDGET_STEPS_MIN = 6

LADDER = tuple((name, BITS[name]) for name in ("bf16", "int4", "int2"))

EVENTS_MAX = 1000.0
"""Approximate number of events of a world with a budget, without those of faults and leases."""


def random_options(choices: Choices, learners: int) -> Options:
    """Draw from all settings that are valid together."""
    fragments, period = choices.integer(1, 10), choices.integer(1, 10)
    quorum = choices.pick([1, 1, 2, learners, choices.integer(1, learners)])
    quorum = min(quorum, learners)
    uplink = choices.fork("codec").pick(["bf16", "bf16", "bf16", "int4", "int2", "topk-4"])
    ladder = choices.fork("ladder").pick([(), (), LADDER])
    wait = quorum == learners and choices.chance(0.4)
    overlap = choices.integer(0, 3)
    return Options(
        fragments=fragments,
        period=period,
        overlap=min(overlap, period - 1),
        quorum=quorum,
        shards=choices.integer(1, min(3, fragments)),
        grace_margin=choices.chance(0.7) * choices.uniform(0.0, 0.95),
        participants=choices.pick(["reported", "all"]),
        alignment=choices.pick(["overwrite", "carry", "blend"]),
        missed=choices.pick(["overwrite", "rebase"]),
        apply=choices.pick(["on_arrival", "at_tau"]),
        wait="at_overlap" if wait else "never",
        counter_cap_periods=choices.integer(1, 4),
        uplink_codec=uplink,
        error_feedback=uplink != "bf16" or bool(ladder),
        ladder=ladder,
        chain=choices.fork("downlink").pick([1, 1, 7]),
        late=choices.fork("late").pick(["next", "next", "drop"]),
        norm_gate=choices.fork("gate").pick([0.0, 10.0]),
        oversized=choices.fork("oversized").pick(["refuse", "clip"]),
        probation_periods=choices.fork("probation").pick([0, 0, 0, 1]),
        checkpoint_every_seconds=choices.fork("cuts").pick([0.0, 2.0, 5.0, 15.0]),
    )


def with_own_rounds(choices: Choices, options: Options, learners: int) -> Options:
    """Let learners open rounds by themselves in some of the worlds that allow it."""
    can = options.quorum == 1 and options.wait == "never" and options.late == "next"
    if not can or options.adapt is not None or not choices.chance(0.15):
        return options
    own = replace(options, participants="own", grace_margin=0.0, missed="rebase")
    return with_devices(choices.fork("devices"), own, learners)


def with_devices(choices: Choices, options: Options, learners: int) -> Options:
    """Let learners be devices in half of these worlds: they come, contribute and go.

    Their processes are the same. The faults that stop them, and start them again later, are their
    visits.
    """
    if not choices.chance(0.5):
        return options
    drawn = replace(
        options,
        quorum=choices.integer(1, learners),
        history=choices.integer(1, 8),
        cohort=choices.pick([None, learners]),
        visit_seconds=1e6,  # the checkers follow one visit per life of a process
        late_discount=choices.pick([1.0, 0.5, "polynomial"]),
    )
    if drawn.late_discount == 1.0:
        return drawn
    return replace(drawn, discount_of=choices.fork("discount").pick(["weight", "change"]))


def with_secure_sums(choices: Choices, options: Options, learners: int) -> Options:
    """Let the shards see only sums of contributions, and leave out what this rules out."""
    threshold = choices.integer(2, learners)
    return replace(
        options,
        threshold=threshold,
        quorum=max(options.quorum, threshold),
        late="drop",
        norm_gate=0.0,
        uplink_codec="bf16",
        error_feedback=False,
        ladder=(),
    )


def random_parties(choices: Choices, learners: int) -> list[dict[str, Any]]:
    """Divide the learners among parties with limited shares."""
    members: dict[str, list[str]] = {}
    for number in range(learners):
        party = f"party-{choices.integer(0, 2)}"
        members.setdefault(party, []).append(f"learner-{number}")
    even = 1.0 / len(members)
    return [
        {
            "name": party,
            "learners": names,
            "key": str(PublicKey(party.encode().ljust(32))),
            "share_min": choices.pick([0.0, choices.uniform(0.0, even)]),
            "share_max": choices.pick([1.0, min(1.0, choices.uniform(even, 2 * even))]),
        }
        for party, names in sorted(members.items())
    ]


def random_moments(choices: Choices) -> dict[str, Any]:
    """Draw how often the momentum of the learners' optimizers is merged, and in which codec."""
    return {
        "every": choices.integer(1, 4),
        "codec": choices.pick(["fp32", "bf16", "int8", "int4"]),
        "names": ["momentum_buffer"],
    }


def random_phases(choices: Choices, options: Options) -> tuple[int, ...]:
    """Draw when fragments are due, if they are not evenly spread: all at once, or at random."""
    if not choices.chance(0.15):
        return ()
    steps = choices.integer(1, options.period)
    return tuple(choices.integer(0, steps - 1) for _ in range(options.fragments))


def random_limits(choices: Choices, options: Options) -> AdaptLimits | None:
    """Draw limits within which H and τ follow the links, in a third of the worlds that allow it."""
    can = options.wait == "never" and not options.phases and options.participants != "own"
    if not can or not choices.chance(0.33):
        return None
    period = (choices.integer(1, options.period), options.period * choices.integer(1, 4))
    least = choices.integer(0, min(options.overlap, period[0] - 1))
    overlap = (least, options.overlap + choices.integer(0, 3))
    return AdaptLimits(period, overlap, choices.pick([0.25, 0.75, 1.0]))


def random_budget(choices: Choices, options: Options, learners: int) -> int:
    """Draw the number of steps: fewer with many events per step, so that worlds cost the same."""
    events_a_step = learners * (2.0 + 9.0 * options.fragments / options.period)
    most = max(BUDGET_STEPS_MIN, math.ceil(EVENTS_MAX / events_a_step))
    return min(choices.integer(8, 24), most)


def random_learners(choices: Choices, count: int, step_seconds: float) -> list[LearnerSpec]:
    """Draw learners with different speeds and links, and sometimes an observer."""
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
        specs.append(LearnerSpec("evaluator", joins_at=choices.uniform(0, 20), role="observer"))
    return specs


def with_ranks(choices: Choices, learners: list[LearnerSpec]) -> list[LearnerSpec]:
    """Give several ranks to some learners, in a third of all worlds."""
    if not choices.chance(0.33):
        return learners

    def ranked(spec: LearnerSpec) -> LearnerSpec:
        if spec.role != "learner" or not choices.chance(0.6):
            return spec
        ranks = choices.integer(2, 3)
        return replace(
            spec,
            ranks=ranks,
            sync_ranks=choices.integer(1, ranks),
            staged=choices.chance(0.6),
            variance=min(spec.variance, 0.02),  # all ranks wait for the slowest one
        )

    return [ranked(spec) for spec in learners]


def random_relays(
    choices: Choices, learners: list[LearnerSpec]
) -> tuple[list[LearnerSpec], list[RelaySpec]]:
    """Put most learners behind one to three relays, some of which are behind another one."""
    relays: list[RelaySpec] = []
    for number in range(choices.integer(1, 3)):
        upstream = choices.pick(relays).name if relays and choices.chance(0.5) else ""
        rate = choices.log_uniform(1e3, 1e6)
        relays.append(
            RelaySpec(
                f"site-{number}",
                upstream,
                latency=choices.log_uniform(0.0002, 0.1),
                up_bytes_per_second=rate,
                down_bytes_per_second=rate * choices.uniform(1.0, 10.0),
            )
        )

    def placed(spec: LearnerSpec) -> LearnerSpec:
        return replace(spec, relay=choices.pick(relays).name) if choices.chance(0.8) else spec

    return [placed(spec) for spec in learners], relays


def random_sizes(choices: Choices, fragments: int) -> list[int]:
    """Draw the sizes of fragments. In a third of all worlds one is far larger than the rest."""
    sizes = [choices.integer(2, 250) for _ in range(fragments)]
    uneven = choices.fork("uneven")
    if uneven.chance(0.33):
        sizes = [uneven.integer(20, 40) for _ in sizes]
        sizes[uneven.integer(0, fragments - 1)] *= uneven.integer(2, 60)
    return sizes


def with_slow_links(
    choices: Choices,
    learners: list[LearnerSpec],
    options: Options,
    sizes: list[int],
    *,
    waited_for: bool,
) -> list[LearnerSpec]:
    """Make some uplinks and downlinks slow independently, in a third of all worlds.

    All contributions to the model's fragments then take up to 60 steps. The limit is 20 steps if
    other learners wait for them, or if the world waits until they are merged (``waited_for``).
    """
    if not choices.chance(0.33):
        return learners
    longest = 20.0 if waited_for or options.wait != "never" else 60.0
    nbytes = 4 * CONTRIBUTED * sum(sizes)

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


@dataclass(frozen=True, slots=True)
class Data:
    """Leased data.

    Attributes:
        parts: The partitions.
        ahead: Number of leases that a learner requests ahead.
    """

    parts: Parts
    ahead: int


def random_data(choices: Choices) -> Data | None:
    """Draw partitions of some batches each, in half of all worlds."""
    if choices.chance(0.5):
        return None
    parts = choices.integer(1, 12)
    batches = parts * choices.pick([1, 4, 12]) + choices.integer(0, parts - 1)
    return Data(Parts(parts, batches), choices.integer(1, 3))


@dataclass(frozen=True, slots=True)
class Standbys:
    """Settings of standbys, and of the storage of their leadership leases.

    Attributes:
        lease_seconds: How long a lease holds without a sign of life.
        storage_seconds: Duration of a storage operation.
        storage_fails: Probability that a storage operation fails.
    """

    lease_seconds: float
    storage_seconds: float
    storage_fails: float


def random_standbys(choices: Choices) -> Standbys | None:
    """Draw settings with a standby for every shard, in a third of all worlds."""
    if choices.chance(0.67):
        return None
    return Standbys(
        lease_seconds=choices.log_uniform(1.0, 15.0),
        storage_seconds=choices.log_uniform(0.0005, 0.1),
        storage_fails=choices.pick([0.0, 0.0, 0.05]),
    )
