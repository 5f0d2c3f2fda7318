"""The tensor side of every effect, behind a narrow seam.

A virtual world decides when a body moves; a `Bodies` says what is in it. Two of them exist: real
tensors (whole training runs in virtual time), and `NoBodies`, which carries lineage instead of
numbers: which steps of which learner are merged into a copy. It asserts, at every operation, that

- a contribution was made against the copy that it is folded onto, or one that led to it;
- no step of a learner is merged twice along the history of a copy, nor kept by a learner that
  takes a copy with that step in it;
- the counters that travel with a contribution are those of its snapshot;
- a difference is applied to the copy that it was made from, and digests are what was announced.

The seam is one object per process life. Payloads are opaque to the world. All methods are called
in the order of the effects that caused them (merging: when the worker is done).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from decoupled_diloco.protocol.effects import Fold
from decoupled_diloco.protocol.versions import Version


@dataclass(frozen=True, slots=True)
class Body:
    """What travels on the data plane; ``digest`` is what its announcement says."""

    payload: Any
    nbytes: int
    digest: str


class LearnerBodies(Protocol):
    """The tensors of one learner process: parameters, snapshots, held and staged copies."""

    def step(self) -> int:
        """Trains one inner step; the tokens that it took."""

    def snapshot(self, fragment: int, base: Version, step: int) -> None:
        """Effect ``Snapshot``: replaces this fragment's earlier snapshot."""

    def encode(self, fragment: int, base: Version, steps: int, tokens: int, codec: str) -> Body:
        """Effect ``SendBody``: the snapshot minus the held copy ``base``."""

    def copy(self, fragment: int, version: Version | None) -> Body:
        """Effect ``SendCopy``: the held copy, or (no version) the parameters, in fp32."""

    def stage(
        self, fragment: int, version: Version, body: Body, *, whole: bool, digest: str
    ) -> bool:
        """Effect ``Fetch``, its body arrived: stages it; ``False`` if the digest is wrong."""

    def apply(self, fragment: int, version: Version, mode: str, discarded_tokens: int) -> None:
        """Effect ``Apply``: takes the staged copy into the parameters."""

    def relabel(self, fragment: int, version: Version) -> None:
        """Effect ``Relabel``: the newest copy that is here bears another version."""


class ShardBodies(Protocol):
    """The tensors of one shard process: master, published copies, accumulators."""

    def load(self, fragment: int) -> str:
        """Effect ``LoadWeights``: the fragment of the run's file; its digest."""

    def receive_copy(self, fragment: int, body: Body) -> str:
        """A whole fragment has arrived (``ExpectCopy``); its digest."""

    def install(self, fragment: int, version: Version) -> str:
        """Effect ``Install``: what was loaded or received is the published copy ``version``.

        Returns the digest of what was installed.
        """

    def norm(self, fragment: int, body: Body) -> float:
        """The norm of a contribution that has arrived."""

    def keep(self, fragment: int) -> Any:
        """What the disk is given of a fragment."""

    def recover(self, fragment: int, kept: Any) -> str:
        """A fragment from the disk of an earlier life; the digest of its published copy."""

    def fold(self, order: Fold, body: Body) -> None:
        """Effect ``Fold``: a contribution goes into the fragment's accumulator."""

    def forget_folded(self, fragment: int) -> None:
        """A merge cannot be: what was folded for it is forgotten."""

    def merge(self, fragment: int, version: Version, base: Version) -> str:
        """Effect ``Merge``: the new published copy's digest."""

    def difference(self, fragment: int, version: Version) -> Body | None:
        """The encoded difference from the version before, or ``None`` if it is gone."""

    def whole(self, fragment: int, version: Version) -> Body | None:
        """The published copy in fp32, or ``None`` if it is gone."""


class Bodies(Protocol):
    """Makes the tensor side of each process life."""

    def learner(self, name: str, epoch: int, tokens_per_step: int) -> LearnerBodies:
        """The tensors of a learner that was admitted with this epoch."""

    def shard(self, shard: int, owned: tuple[int, ...]) -> ShardBodies:
        """The tensors of a shard process that has just started, empty."""


# ---- lineage instead of tensors

Life = tuple[str, int]
"""A learner's name and epoch."""

Steps = int
"""A set of a life's steps: bit s is set if step s is in it."""


@dataclass(frozen=True, slots=True)
class Value:
    """The content of a published copy: which steps of each learner's life are merged in."""

    number: int
    fragment: int
    merged: dict[Life, Steps]

    @property
    def digest(self) -> str:
        """Equal exactly for equal content."""
        return f"value-{self.number}"

    def has(self, span: Span) -> bool:
        """Whether a step of this span is merged in."""
        return bool(span.steps & self.merged.get(span.life, 0))

    def last(self, life: Life) -> int:
        """The last step of a life that is merged in; 0: none."""
        return max(0, self.merged.get(life, 0).bit_length() - 1)


@dataclass(frozen=True, slots=True)
class Span:
    """The steps ``first < s <= last`` of one life."""

    life: Life
    first: int
    last: int

    @property
    def steps(self) -> Steps:
        """The same as a set."""
        return (2 << self.last) - (2 << self.first)


@dataclass(frozen=True, slots=True)
class Delta:
    """A contribution against one value: the steps ``first < s <= last`` of the life that sends it.

    ``earlier``: steps of lives before it, which it has from its checkpoint.
    """

    life: Life
    fragment: int
    base: int
    first: int
    last: int
    earlier: tuple[Span, ...] = ()

    @property
    def spans(self) -> tuple[Span, ...]:
        """All steps that are in it."""
        return (*self.earlier, Span(self.life, self.first, self.last))

    @property
    def steps(self) -> int:
        """How many steps are in it."""
        return sum(span.last - span.first for span in self.spans)


@dataclass(frozen=True, slots=True)
class Difference:
    """An encoded difference between two values."""

    base: int
    value: Value


@dataclass
class NoBodies:
    """Lineage instead of tensors; see the module's head for what it asserts.

    Attributes:
        fragment_bytes: the size of each fragment's fp32 copy.
        ratio: encoded size over fp32 size of contributions and differences.
    """

    fragment_bytes: list[int]
    ratio: float = 0.5
    values: int = 0
    file: dict[int, Value] = field(default_factory=dict)

    def new_value(self, fragment: int, merged: dict[Life, Steps]) -> Value:
        """A value that equals no other."""
        self.values += 1
        return Value(self.values, fragment, merged)

    def from_file(self, fragment: int) -> Value:
        """The initial weights of the run's file."""
        if fragment not in self.file:
            self.file[fragment] = self.new_value(fragment, {})
        return self.file[fragment]

    def whole(self, value: Value) -> Body:
        """The fp32 body of a value."""
        return Body(value, self.fragment_bytes[value.fragment], value.digest)

    def encoded(self, fragment: int, payload: Any, digest: str) -> Body:
        """The encoded body of a contribution or a difference."""
        return Body(payload, max(1, int(self.fragment_bytes[fragment] * self.ratio)), digest)

    def learner(self, name: str, epoch: int, tokens_per_step: int) -> LineageLearner:
        """See `Bodies.learner`."""
        return LineageLearner(self, (name, epoch), tokens_per_step)

    def shard(self, shard: int, owned: tuple[int, ...]) -> LineageShard:
        """See `Bodies.shard`."""
        return LineageShard(self)


@dataclass(slots=True)
class Local:
    """One fragment at a learner: steps after ``since`` are its own and not merged.

    ``earlier``: steps of earlier lives that are in the parameters, too, by a checkpoint.
    """

    since: int = 0
    earlier: tuple[Span, ...] = ()
    held: Value | None = None
    held_version: Version | None = None
    staged: Value | None = None
    staged_version: Version | None = None
    snapshot: Delta | None = None


class LineageLearner:
    """Lineage of one learner's life."""

    def __init__(self, bodies: NoBodies, life: Life, tokens_per_step: int) -> None:
        self.bodies = bodies
        self.life = life
        self.tokens_per_step = tokens_per_step
        self.steps = 0
        self.fragments = [Local() for _ in bodies.fragment_bytes]
        self.initial: dict[int, Value] = {}

    def step(self) -> int:
        """See `LearnerBodies.step`."""
        self.steps += 1
        return self.tokens_per_step

    def snapshot(self, fragment: int, base: Version, step: int) -> None:
        """See `LearnerBodies.snapshot`."""
        local = self.fragments[fragment]
        assert step == self.steps, "a snapshot is taken at the present boundary"
        assert local.held is not None
        assert local.held_version == base, "a snapshot is taken against the held version"
        local.snapshot = Delta(
            self.life, fragment, local.held.number, local.since, step, local.earlier
        )

    def encode(self, fragment: int, base: Version, steps: int, tokens: int, codec: str) -> Body:
        """See `LearnerBodies.encode`."""
        local = self.fragments[fragment]
        delta = local.snapshot
        assert delta is not None, "there is a snapshot to send"
        assert local.held is not None
        assert local.held.number == delta.base, "its base is still held"
        assert local.held_version == base
        assert steps == delta.steps, "c_steps are those of the snapshot"
        assert tokens == steps * self.tokens_per_step, "c_tokens are those of the snapshot"
        return self.bodies.encoded(fragment, delta, f"delta-{delta.life}-{fragment}-{delta.last}")

    def copy(self, fragment: int, version: Version | None) -> Body:
        """See `LearnerBodies.copy`."""
        local = self.fragments[fragment]
        if version is None:
            assert self.steps == 0, "initial weights come from an untrained model"
            if fragment not in self.initial:
                self.initial[fragment] = self.bodies.new_value(fragment, {})
            return self.bodies.whole(self.initial[fragment])
        assert local.held is not None
        assert local.held_version == version
        return self.bodies.whole(local.held)

    def stage(
        self, fragment: int, version: Version, body: Body, *, whole: bool, digest: str
    ) -> bool:
        """See `LearnerBodies.stage`."""
        local = self.fragments[fragment]
        if whole:
            value: Value = body.payload
        else:
            difference: Difference = body.payload
            newest = local.staged or local.held
            assert newest is not None
            assert newest.number == difference.base, "a difference fits the copy that is here"
            value = difference.value
        if value.digest != digest:
            return False
        local.staged, local.staged_version = value, version
        return True

    def apply(self, fragment: int, version: Version, mode: str, discarded_tokens: int) -> None:
        """See `LearnerBodies.apply`."""
        local = self.fragments[fragment]
        if local.staged is None:
            local.staged, local.staged_version = local.held, local.held_version
        assert local.staged is not None
        assert local.staged_version == version
        if mode == "overwrite":
            earlier = sum(span.last - span.first for span in local.earlier)
            assert discarded_tokens <= (self.steps - local.since + earlier) * self.tokens_per_step
            assert discarded_tokens >= 0
            local.since, local.earlier = self.steps, ()
        elif mode in ("carry", "blend"):
            assert local.snapshot is not None, "carrying needs the snapshot that was sent"
            local.since, local.earlier = local.snapshot.last, ()
        else:
            assert mode == "rebase"
            assert local.held is not None
            assert not local.earlier, "what an earlier life has trained is never rebased"
        own = Span(self.life, local.since, self.steps)
        assert not local.staged.has(own), f"{own} would be merged twice ({mode})"
        local.held, local.held_version = local.staged, version
        local.staged = local.staged_version = local.snapshot = None

    def relabel(self, fragment: int, version: Version) -> None:
        """See `LearnerBodies.relabel`."""
        local = self.fragments[fragment]
        if local.staged is not None:
            local.staged_version = version
        else:
            assert local.held is not None
            local.held_version = version
            assert not local.held.has(Span(self.life, local.since, self.steps))

    def keep(self) -> tuple[tuple[Value, Version, tuple[Span, ...]], ...]:
        """What a checkpoint of this boundary has of each fragment."""
        kept = []
        for local in self.fragments:
            assert local.held is not None
            assert local.held_version is not None
            own = Span(self.life, local.since, self.steps)
            spans = (*local.earlier, own) if own.last > own.first else local.earlier
            kept.append((local.held, local.held_version, spans))
        return tuple(kept)

    def resume(self, kept: tuple[tuple[Value, Version, tuple[Span, ...]], ...]) -> None:
        """Goes on from what an earlier life has kept."""
        for local, (held, version, spans) in zip(self.fragments, kept, strict=True):
            local.held, local.held_version, local.earlier = held, version, spans


class LineageShard:
    """Lineage of one shard's life."""

    def __init__(self, bodies: NoBodies) -> None:
        self.bodies = bodies
        self.values: dict[int, Value] = {}
        self.versions: dict[int, Version] = {}
        self.before: dict[int, Difference] = {}
        self.received: dict[int, Value] = {}
        self.folded: dict[int, dict[Life, Steps]] = {}
        self.led: dict[int, list[int]] = {}

    def load(self, fragment: int) -> str:
        """See `ShardBodies.load`."""
        self.received[fragment] = self.bodies.from_file(fragment)
        return self.received[fragment].digest

    def receive_copy(self, fragment: int, body: Body) -> str:
        """See `ShardBodies.receive_copy`."""
        self.received[fragment] = body.payload
        return self.received[fragment].digest

    def install(self, fragment: int, version: Version) -> str:
        """See `ShardBodies.install`."""
        self.values[fragment] = self.received[fragment]
        self.led[fragment] = [self.values[fragment].number]
        self.versions[fragment] = version
        self.before.pop(fragment, None)
        return self.values[fragment].digest

    def norm(self, fragment: int, body: Body) -> float:
        """See `ShardBodies.norm`: as if each step went one unit in the same direction."""
        delta: Delta = body.payload
        return float(delta.steps)

    def keep(self, fragment: int) -> Value:
        """See `ShardBodies.keep`."""
        return self.values[fragment]

    def recover(self, fragment: int, kept: Value) -> str:
        """See `ShardBodies.recover`."""
        self.received[fragment] = kept
        return kept.digest

    def fold(self, order: Fold, body: Body) -> None:
        """See `ShardBodies.fold`."""
        assert 0.0 < order.scale <= 1.0, "a contribution is only ever scaled down"
        delta: Delta = body.payload
        value = self.values[order.fragment]
        assert delta.life[0] == order.learner
        assert delta.fragment == order.fragment
        assert delta.base in self.led[order.fragment], "its base has not led to this copy"
        folded = self.folded.setdefault(order.fragment, {})
        for span in delta.spans:
            assert not value.has(span), f"{delta} would be merged twice"
            before = folded.get(span.life, 0)
            assert not before & span.steps, f"{delta} is folded twice"
            folded[span.life] = before | span.steps

    def forget_folded(self, fragment: int) -> None:
        """See `ShardBodies.forget_folded`."""
        self.folded.pop(fragment, None)

    def merge(self, fragment: int, version: Version, base: Version) -> str:
        """See `ShardBodies.merge`."""
        assert self.versions[fragment] == base, "a merge starts from the current version"
        assert version > base
        before, merged = self.values[fragment], dict(self.values[fragment].merged)
        for life, steps in self.folded.pop(fragment).items():
            merged[life] = merged.get(life, 0) | steps
        value = self.bodies.new_value(fragment, merged)
        self.values[fragment], self.versions[fragment] = value, version
        self.before[fragment] = Difference(before.number, value)
        self.led[fragment].append(value.number)
        return value.digest

    def difference(self, fragment: int, version: Version) -> Body | None:
        """See `ShardBodies.difference`."""
        if self.versions.get(fragment) != version or fragment not in self.before:
            return None
        difference = self.before[fragment]
        return self.bodies.encoded(fragment, difference, difference.value.digest)

    def whole(self, fragment: int, version: Version) -> Body | None:
        """See `ShardBodies.whole`."""
        if self.versions.get(fragment) != version:
            return None
        return self.bodies.whole(self.values[fragment])
