"""Shards whose process and machine die again and again: what does the disk still have?

    python -m decoupled_diloco.simulate.crashes --seed 17         # repeat one story
    python -m decoupled_diloco.simulate.crashes --runs 200        # seeds 0, 1, 2, …

A story is lives of one small shard with the real `ShardDisk` on a `SimulatedDisk`: each merges,
takes checkpoints, finds the disk full now and then, and is killed at some operation; the next one
recovers from what a `Loss` has left. Checked each time: a version that was told to anybody is
there, or a newer one of its fragment, master, published copy and momentum bit for bit. Where syncs
lie an older version may be found, or none; never other bits, and nothing that stops recovery.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from decoupled_diloco.errors import StorageError
from decoupled_diloco.merge import body_digest, digest, layout_of, make_outer, values_digest
from decoupled_diloco.merge.plan import MergePlan
from decoupled_diloco.protocol.versions import Asking, Version
from decoupled_diloco.runtime import Runtime, within
from decoupled_diloco.simulate.choices import Choices
from decoupled_diloco.simulate.disk import (
    Content,
    CrashError,
    Loss,
    SimulatedDisk,
    remains,
    write_folder,
)
from decoupled_diloco.syncer.durable import Durable, ShardDisk
from decoupled_diloco.syncer.fragments import FragmentTensors, OuterStep, ShardTensors

COMMAND = "python -m decoupled_diloco.simulate.crashes --seed {seed}"

FRAGMENTS = (0, 1)
FOLDER = Path("durable/shard-0")
IDENTITY = "a story's"


@dataclass
class Known:
    """What a story's versions are, as bits, and which of them anybody was told of.

    Attributes:
        told: The newest version of each fragment that was told.
        bits: By fragment and version: the digests of its state; one, once it was told.
    """

    told: dict[int, Version] = field(default_factory=dict)
    bits: dict[tuple[int, Version], set[str]] = field(default_factory=dict)

    def tried(self, fragment: int, version: Version, bits: str) -> None:
        """A version may be on the disk from now on; nobody knows of it."""
        if self.told.get(fragment) is None or version > self.told[fragment]:
            self.bits.setdefault((fragment, version), set()).add(bits)

    def tell(self, fragment: int, version: Version, bits: str) -> None:
        """Somebody may hold this version from now on."""
        before = self.told.get(fragment)
        assert before is None or version > before, f"fragment {fragment}: {version} after {before}"
        self.told[fragment] = version
        self.bits[fragment, version] = {bits}


class Tensors(ShardTensors):
    """The shard's tensors, which say what a merge is about to lead to.

    Attributes:
        prepared: The state after the outer step that was last prepared, as bits.
    """

    prepared = ""

    def prepare(self, fragment: int) -> OuterStep:
        """See `ShardTensors`."""
        step = super().prepare(fragment)
        self.prepared = bits_of(step.after)
        return step


class Life:
    """One life of the shard.

    Args:
        root: The run folder.
        disk: What its files are written with.
        term: Of its versions.
        known: What its predecessors knew.
        choices: Where its contributions are drawn from.
    """

    def __init__(
        self, root: Path, disk: SimulatedDisk, term: int, known: Known, choices: Choices
    ) -> None:
        self.term, self.known, self.choices = term, known, choices
        self.tensors = Tensors(_plan(), FRAGMENTS)
        self.disk = ShardDisk(root / FOLDER, IDENTITY, self.tensors)
        self.surroundings = Runtime(disk)
        self.versions: dict[int, Version] = {}
        self._bits: dict[int, str] = {}
        self._rounds = 0

    def begin(self, *, honest: bool) -> None:
        """Recovers, checks what it has found, and goes on: with it, or from a learner's copy."""
        with within(self.surroundings):
            self._begin(honest=honest)

    def _begin(self, *, honest: bool) -> None:
        found = self.disk.recover()
        check(found, self.tensors, self.known, honest=honest)
        for fragment in FRAGMENTS:
            durable, told = found.get(fragment), self.known.told.get(fragment)
            newest = max((v for v in (durable and durable.version, told) if v), default=None)
            if durable is None or durable.version != newest:
                self.tensors.install(fragment, self._random(fragment))
            self._rename(fragment, 0 if newest is None else newest.counter)
        try:
            self.disk.installed(self.versions)
        except StorageError:
            return  # nothing is told, and nothing merged until it can
        self.tell()

    def _rename(self, fragment: int, counter: int) -> None:
        self.versions[fragment] = Version.read(f"{self.term}.{counter}")
        self._bits[fragment] = bits_of(self.tensors.fragments[fragment])
        self.known.tried(fragment, self.versions[fragment], self._bits[fragment])

    def merge(self, fragment: int) -> None:
        """A round in which one learner contributes something that no other round has."""
        self._rounds += 1
        plan = self.tensors.plan
        uplink = plan.codec_of(fragment, plan.uplink)
        body = uplink.encode(self._random(fragment))
        ask = Asking(self.term, self._rounds)
        self.tensors.verify(fragment, ask, body, body_digest(body, uplink))
        self.tensors.fold(fragment, ask, 1, 1)
        version = Version.read(f"{self.term}.{self.versions[fragment].counter + 1}")
        try:
            with within(self.surroundings):
                self.disk.merge(fragment, version)
        except StorageError:
            return
        finally:
            self.known.tried(fragment, version, self.tensors.prepared)
        self.tell()
        self.versions[fragment] = version
        self._bits[fragment] = bits_of(self.tensors.fragments[fragment])
        self.tell()

    def tell(self) -> None:
        """Says what the fragments are, as far as nobody was told yet."""
        for fragment, version in self.versions.items():
            if version != self.known.told.get(fragment):
                self.known.tell(fragment, version, self._bits[fragment])

    def _random(self, fragment: int) -> torch.Tensor:
        rng = torch.Generator("cpu").manual_seed(self.choices.integer(0, 2**40))
        return torch.randn(
            self.tensors.plan.fragments[fragment].numel,
            generator=rng,
            dtype=torch.float32,
            device="cpu",
        )


def bits_of(entry: FragmentTensors) -> str:
    """A digest of all of a fragment's state, momentum and all."""
    outer = [value.reshape(-1).float() for _, value in sorted(entry.outer.state_dict().items())]
    return digest(torch.cat([entry.master, entry.published, *outer]))


def check(found: dict[int, Durable], tensors: ShardTensors, known: Known, *, honest: bool) -> None:
    """Asserts that what was recovered is what was told, or newer; the bits are right in any case.

    Args:
        found: What recovery has found.
        tensors: What it has made of it.
        known: What there has been.
        honest: Whether the disk has kept all that it was waited for.
    """
    for fragment, told in known.told.items():
        durable = found.get(fragment)
        if honest:
            assert durable is not None, f"fragment {fragment} is lost: {told} was told"
            assert durable.version >= told, f"fragment {fragment}: {durable.version}, {told} told"
    for fragment, durable in found.items():
        entry, place = tensors.fragments[fragment], (fragment, durable.version)
        assert durable.digest == values_digest(entry.published), f"{place} has another digest"
        assert place in known.bits, f"{place} was never made"
        assert bits_of(entry) in known.bits[place], f"{place} has other bits"


def story(seed: int, root: Path) -> int:
    """Some lives on one disk; the number of operations that it has seen.

    Raises:
        AssertionError: something that was told is lost, or has other bits.
    """
    choices = Choices(seed)
    lies = choices.pick([0.0, 0.0, 0.1, 0.5])
    full = choices.pick([0.0, 0.0, 0.05, 0.3])
    rarely = choices.pick([0.0, 0.1, 0.5])
    known, operations, content = Known(), 0, Content()
    for term in range(1, choices.integer(2, 5) + 1):
        folder = root / f"life-{term}"
        write_folder(folder, content)
        disk = SimulatedDisk(
            folder,
            crash_at=int(choices.log_uniform(1, 250)),
            full=lambda _: choices.chance(full),
        )
        life = Life(folder, disk, term, known, choices.fork(f"life-{term}"))
        try:
            life.begin(honest=lies == 0.0)
            while True:
                if choices.chance(rarely):
                    checkpoint(life)
                life.merge(choices.pick(FRAGMENTS))
        except CrashError:
            disk.close()
        operations += len(disk.log)
        loss = _loss(choices, lies)
        content = remains(disk.before, disk.log, loss)
    return operations


@dataclass(frozen=True)
class History:
    """What a life that nothing befell has done to the disk, and what was told when.

    Attributes:
        disk: With its log.
        known: What was made in all.
        told: After so many operations, what had been told: ascending.
    """

    disk: SimulatedDisk
    known: Known
    told: tuple[tuple[int, dict[int, Version]], ...]

    def told_after(self, operations: int) -> dict[int, Version]:
        """What had been told before the crash."""
        return [told for done, told in self.told if done <= operations][-1]


def record(root: Path, steps: str) -> History:
    """The history of a first life.

    Args:
        root: An empty folder that is there.
        steps: What it does after it has begun: a digit is a merge of that fragment, ``c`` a
            checkpoint.
    """
    disk, known = SimulatedDisk(root), Known()
    life = Life(root, disk, 1, known, Choices("history"))
    told: list[tuple[int, dict[int, Version]]] = [(0, {})]
    life.begin(honest=True)
    for step in steps:
        told.append((len(disk.log), dict(known.told)))
        if step == "c":
            checkpoint(life)
        else:
            life.merge(int(step))
    told.append((len(disk.log), dict(known.told)))
    disk.close()
    return History(disk, known, tuple(told))


def crash(history: History, operations: int, loss: Loss, root: Path) -> ShardDisk:
    """Recovers from a crash after so many operations of a history, and checks what is found.

    Args:
        history: What was done.
        operations: After how many of its operations the crash comes.
        loss: What it costs.
        root: A folder that is not there yet.
    """
    write_folder(root, remains(history.disk.before, history.disk.log[:operations], loss))
    tensors = Tensors(_plan(), FRAGMENTS)
    disk = ShardDisk(root / FOLDER, IDENTITY, tensors)
    known = Known(history.told_after(operations), history.known.bits)
    check(disk.recover(), tensors, known, honest=loss.lies == 0.0)
    return disk


def checkpoint(life: Life) -> None:
    """A checkpoint, if the disk has room for it."""
    try:
        with within(life.surroundings):
            life.disk.checkpoint()
    except StorageError:
        return
    life.tell()


def _loss(choices: Choices, lies: float) -> Loss:
    often = choices.pick([0.0, 0.5, 1.0])
    return Loss(
        choices,
        names=choices.pick([0.0, 0.5, 1.0]),
        writes=often,
        torn=choices.pick([0.0, 0.5]),
        zeros=choices.pick([0.0, 0.5]),
        lies=lies,
    )


def _plan() -> MergePlan:
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    return MergePlan.make(
        layout_of(model),
        fragments=len(FRAGMENTS),
        strategy="balanced",
        uplink="bf16",
        downlink="bf16",
        method="rda",
        weighting="tokens",
        outer=make_outer("nesterov", 0.7, 0.5),
    )


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, help="repeat one story")
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    arguments = parser.parse_args()
    alone = arguments.seed is not None
    seeds = [arguments.seed] if alone else range(arguments.first, arguments.first + arguments.runs)
    failed = operations = 0
    for seed in seeds:
        with tempfile.TemporaryDirectory() as folder:
            try:
                operations += story(seed, Path(folder))
            except Exception as error:
                if alone:
                    raise
                failed += 1
                print(f"{COMMAND.format(seed=seed)}\n    {type(error).__name__}: {error}")
    print(f"{len(seeds)} stories, {operations} operations, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
