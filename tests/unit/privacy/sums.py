"""Run one secure sum without processes."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from decoupled_diloco.merge.fixed_point import (
    FixedPoint,
    Integers,
    first_bounds,
    quantize,
    read,
    write,
    zeros,
)
from decoupled_diloco.merge.fragments import Segment
from decoupled_diloco.merge.plan import token_weight
from decoupled_diloco.privacy.dp import Mechanism
from decoupled_diloco.privacy.secure_sum import Claim, Cohort, Opening, SumMember, read_cohort

SEGMENTS = (Segment(0, 9, "rda"), Segment(9, 20, "mean"), Segment(20, 24, "buffer"))
STEPS_MAX = 96


@dataclass
class View:
    """Everything that the shard receives."""

    claims: list[Claim] = field(default_factory=list)
    shares: dict[str, dict[str, bytes]] = field(default_factory=dict)
    payloads: dict[str, bytes] = field(default_factory=dict)
    answers: dict[str, dict[str, bytes]] = field(default_factory=dict)


@dataclass
class SecureSum:
    """One sum of random contributions.

    Args:
        count: The number of learners.
        threshold: The least number of contributions.
        seed: Determines the contributions and all secrets.
        segments: Of the fragment.
        bits: See `FixedPoint.of`.
        mechanism: Clips the contributions and adds noise to them, in shares.
    """

    count: int
    threshold: int = 2
    seed: int = 0
    segments: Sequence[Segment] = SEGMENTS
    bits: int | None = None
    mechanism: Mechanism | None = None

    def __post_init__(self) -> None:
        noise = 0.0
        if self.mechanism is not None:
            noise = self.mechanism.noise_of_sum(self.segments[-1].stop)
        self.form = FixedPoint.of(self.bits, self.count, noise)
        self.names = [f"learner-{n:03}" for n in range(self.count)]
        generator = torch.Generator().manual_seed(self.seed)
        numel = self.segments[-1].stop
        self.base = torch.randn(numel, generator=generator)
        self.vectors = {n: torch.randn(numel, generator=generator) / 10 for n in self.names}
        for segment in self.segments:
            for vector in self.vectors.values():
                if segment.merge == "buffer":
                    vector[segment.start : segment.stop] += self.base[segment.start : segment.stop]
        self.rng = random.Random(self.seed)
        self.members = {n: SumMember(n, self.threshold, self.rng.randbytes) for n in self.names}
        self.view = View()
        self.plain = zeros(self.form, self.segments)
        self.total = zeros(self.form, self.segments)
        self.survivors: list[str] = []

    def claim(self, names: Collection[str] | None = None) -> Cohort:
        """Step 1."""
        for number, name in enumerate(self.names):
            if names is None or name in names:
                claim = self.members[name].claim("sum", 24, 24 * (10 + number % 7))
                self.view.claims.append(claim)
        bounds = first_bounds(self.segments, self.base)
        if self.mechanism is not None:
            bounds = (self.mechanism.clip_of(self.segments[-1].stop),)
        cohort = Cohort("sum", tuple(self.view.claims), bounds, self.threshold)
        self.cohort = read_cohort(cohort.to_text())
        return self.cohort

    def share(self, dropped: Collection[str] = ()) -> None:
        """Step 2."""
        for name in self.cohort.names:
            if name not in dropped:
                self.view.shares[name] = self.members[name].share(self.cohort)

    def for_member(self, name: str) -> dict[str, bytes]:
        """Return the shares that the shard passes on to a member."""
        return {s: parts[name] for s, parts in self.view.shares.items() if name in parts}

    def integers(self, name: str) -> Integers:
        """Return a learner's contribution, not masked."""
        weights = self.cohort.weights(token_weight, STEPS_MAX)
        share = weights[name] / max(weights.values())
        args = (self.vectors[name], self.base, share, self.cohort.bounds)
        if self.mechanism is None:
            return quantize(self.form, self.segments, *args)
        found = quantize(self.form, self.segments, *args, private=True)
        limits = (self.form.one, self.cohort.needed, self.rng.randbytes)
        self.mechanism.add_share_(found.elements, *limits)
        return found

    def mask(self, dropped: Collection[str] = (), late: Collection[str] = ()) -> None:
        """Step 3; the payload of a ``late`` member arrives, but is not in the sum."""
        for name in self.view.shares:
            if name in dropped:
                continue
            integers = self.integers(name)
            plain = integers.clone()
            body = write(self.form, self.members[name].mask(self.for_member(name), integers))
            self.view.payloads[name] = body.numpy().tobytes()
            if name not in late:
                self.total.add(read(self.form, self.segments, body))
                self.plain.add(plain)
                self.survivors.append(name)

    def open(self, dropped: Collection[str] = ()) -> Opening:
        """Step 4."""
        for name in self.survivors:
            if name not in dropped:
                self.view.answers[name] = self.members[name].open(self.survivors)
        return Opening(
            self.cohort,
            tuple(self.view.shares),
            tuple(self.survivors),
            self.view.answers,
            STEPS_MAX,
        )

    def contributions(self) -> tuple[list[Tensor], list[float]]:
        """Return the vectors and the weights of the survivors."""
        weights = self.cohort.weights(token_weight, STEPS_MAX)
        return [self.vectors[n] for n in self.survivors], [weights[n] for n in self.survivors]
