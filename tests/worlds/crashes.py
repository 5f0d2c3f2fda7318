"""Crash a shard's process and machine repeatedly, and check what its disk still has.

    PYTHONPATH=tests python -m worlds.crashes --seed 17         # repeat one story
    PYTHONPATH=tests python -m worlds.crashes --runs 200        # seeds 0, 1, 2, …

A story is a sequence of incarnations of one small shard, with the real `ShardDisk` on a
`SimulatedDisk`. Each incarnation merges, writes checkpoints, sometimes finds the disk full, and is
killed at some operation. The next one recovers from what a `Loss` has left.

After each crash, the disk must have every published version or a newer one of its fragment. Master,
published copy and momentum must be equal bit for bit. If syncs may have no effect, an older version
or none may be found, but never other bits, and nothing may stop the recovery.
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
from decoupled_diloco.protocol.messages import Asking, Version
from decoupled_diloco.runtime import Runtime, within
from decoupled_diloco.syncer.durable import Durable, ShardDisk
from decoupled_diloco.syncer.shard_tensors import Factors, FragmentTensors, OuterStep, ShardTensors
from decoupled_diloco_lab.simulate.choices import Choices
from decoupled_diloco_lab.simulate.virtual_disk import (
    Content,
    CrashError,
    Loss,
    SimulatedDisk,
    remains,
    write_folder,
)

COMMAND = "PYTHONPATH=tests python -m worlds.crashes --seed {seed}"

FRAGMENTS = (0, 1)
FOLDER = Path("durable/shard-0")
IDENTITY = "a story's"


@dataclass
class Known:
    """The digests of a story's versions, and which versions were published.

    Attributes:
        published: The newest published version of each fragment.
        bits: By fragment and version: the possible digests of its state; only one once it is
            published.
    """

    published: dict[int, Version] = field(default_factory=dict)
    bits: dict[tuple[int, Version], set[str]] = field(default_factory=dict)

    def tried(self, fragment: int, version: Version, bits: str) -> None:
        """Note a version that may be on the disk from now on but is not published."""
        if self.published.get(fragment) is None or version > self.published[fragment]:
            self.bits.setdefault((fragment, version), set()).add(bits)

    def publish(self, fragment: int, version: Version, bits: str) -> None:
        """Note a version that learners may hold from now on."""
        before = self.published.get(fragment)
        assert before is None or version > before, f"fragment {fragment}: {version} after {before}"
        self.published[fragment] = version
        self.bits[fragment, version] = {bits}


class Tensors(ShardTensors):
    """The shard's tensors, which also note the result of a prepared merge.

    Attributes:
        prepared: Digest of the state after the outer step that was last prepared.
    """

    prepared = ""

    def prepare(self, fragment: int, factors: Factors = ()) -> OuterStep:
        """See `ShardTensors`."""
        step = super().prepare(fragment, factors)
        self.prepared = bits_of(step.after)
        return step


class Life:
    """One incarnation of the shard.

    Args:
        root: The run folder.
        disk: The disk for its files.
        term: The term of its versions.
        known: The versions of earlier incarnations.
        choices: The random stream of its contributions.
    """

    def __init__(
        self, root: Path, disk: SimulatedDisk, term: int, known: Known, choices: Choices
    ) -> None:
        self.term, self.known, self.choices = term, known, choices
        self.tensors = Tensors(_plan(), FRAGMENTS)
        self.disk = ShardDisk(root / FOLDER, IDENTITY, self.tensors)
        self.runtime = Runtime(disk)
        self.versions: dict[int, Version] = {}
        self._bits: dict[int, str] = {}
        self._rounds = 0

    def begin(self, *, honest: bool) -> None:
        """Recover, check the result, and continue from it or from a learner's copy."""
        with within(self.runtime):
            self._begin(honest=honest)

    def _begin(self, *, honest: bool) -> None:
        found = self.disk.recover()
        check(found, self.tensors, self.known, honest=honest)
        for fragment in FRAGMENTS:
            durable, published = found.get(fragment), self.known.published.get(fragment)
            newest = max((v for v in (durable and durable.version, published) if v), default=None)
            if durable is None or durable.version != newest:
                self.tensors.install(fragment, self._random(fragment))
            self._rename(fragment, 0 if newest is None else newest.counter)
        try:
            self.disk.installed(self.versions)
        except StorageError:
            return  # nothing is published or merged until the disk has room
        self.publish()

    def _rename(self, fragment: int, counter: int) -> None:
        self.versions[fragment] = Version.read(f"{self.term}.{counter}")
        self._bits[fragment] = bits_of(self.tensors.fragments[fragment])
        self.known.tried(fragment, self.versions[fragment], self._bits[fragment])

    def merge(self, fragment: int) -> None:
        """Run a round with one learner and a random contribution."""
        self._rounds += 1
        plan = self.tensors.plan
        uplink = plan.codec_of(fragment, plan.uplink)
        body = uplink.encode(self._random(fragment))
        ask = Asking(self.term, self._rounds)
        self.tensors.verify(fragment, ask, body, body_digest(body, uplink))
        self.tensors.fold(fragment, ask, 1, 1)
        version = Version.read(f"{self.term}.{self.versions[fragment].counter + 1}")
        try:
            with within(self.runtime):
                self.disk.merge(fragment, version)
        except StorageError:
            return
        finally:
            self.known.tried(fragment, version, self.tensors.prepared)
        self.publish()
        self.versions[fragment] = version
        self._bits[fragment] = bits_of(self.tensors.fragments[fragment])
        self.publish()

    def publish(self) -> None:
        """Publish the versions of all fragments that are not published yet."""
        for fragment, version in self.versions.items():
            if version != self.known.published.get(fragment):
                self.known.publish(fragment, version, self._bits[fragment])

    def _random(self, fragment: int) -> torch.Tensor:
        rng = torch.Generator("cpu").manual_seed(self.choices.integer(0, 2**40))
        return torch.randn(
            self.tensors.plan.fragments[fragment].numel,
            generator=rng,
            dtype=torch.float32,
            device="cpu",
        )


def bits_of(entry: FragmentTensors) -> str:
    """Return a digest of a fragment's whole state, including the momentum."""
    outer = [value.reshape(-1).float() for _, value in sorted(entry.outer.state_dict().items())]
    return digest(torch.cat([entry.master, entry.published, *outer]))


def check(found: dict[int, Durable], tensors: ShardTensors, known: Known, *, honest: bool) -> None:
    """Check that recovered versions are as new as the published ones, and their bits correct.

    Args:
        found: The recovered versions.
        tensors: The recovered tensors.
        known: All versions and their digests.
        honest: Whether the disk kept everything that was synced.
    """
    for fragment, newest in known.published.items():
        durable = found.get(fragment)
        if honest:
            assert durable is not None, f"fragment {fragment} is lost: {newest} was published"
            text = f"fragment {fragment}: recovered {durable.version}, published {newest}"
            assert durable.version >= newest, text
    for fragment, durable in found.items():
        entry, place = tensors.fragments[fragment], (fragment, durable.version)
        assert durable.digest == values_digest(entry.published), f"{place} has another digest"
        assert place in known.bits, f"{place} was never created"
        assert bits_of(entry) in known.bits[place], f"{place} has other bits"


def story(seed: int, root: Path) -> int:
    """Run some incarnations on one disk and return the number of its operations.

    Raises:
        AssertionError: A published version is lost or has other bits.
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
    """The disk operations of an undisturbed incarnation, and what was published when.

    Attributes:
        disk: The disk with its log.
        known: All versions that were created.
        published: Pairs of a number of operations and the versions published by then, ascending.
    """

    disk: SimulatedDisk
    known: Known
    published: tuple[tuple[int, dict[int, Version]], ...]

    def published_after(self, operations: int) -> dict[int, Version]:
        """Return the versions that were published before a crash."""
        return [versions for done, versions in self.published if done <= operations][-1]


def record(root: Path, steps: str) -> History:
    """Record the history of a first incarnation.

    Args:
        root: An empty folder, which exists.
        steps: Its actions after the start: a digit merges that fragment, ``c`` writes a checkpoint.
    """
    disk, known = SimulatedDisk(root), Known()
    life = Life(root, disk, 1, known, Choices("history"))
    published: list[tuple[int, dict[int, Version]]] = [(0, {})]
    life.begin(honest=True)
    for step in steps:
        published.append((len(disk.log), dict(known.published)))
        if step == "c":
            checkpoint(life)
        else:
            life.merge(int(step))
    published.append((len(disk.log), dict(known.published)))
    disk.close()
    return History(disk, known, tuple(published))


def crash(history: History, operations: int, loss: Loss, root: Path) -> ShardDisk:
    """Recover from a crash within a history, and check the result.

    Args:
        history: The operations of the incarnation that crashes.
        operations: Number of operations before the crash.
        loss: Which unsynced data the crash loses.
        root: A folder that does not exist yet.
    """
    write_folder(root, remains(history.disk.before, history.disk.log[:operations], loss))
    tensors = Tensors(_plan(), FRAGMENTS)
    disk = ShardDisk(root / FOLDER, IDENTITY, tensors)
    known = Known(history.published_after(operations), history.known.bits)
    check(disk.recover(), tensors, known, honest=loss.lies == 0.0)
    return disk


def checkpoint(life: Life) -> None:
    """Write a checkpoint if the disk has room for it."""
    try:
        with within(life.runtime):
            life.disk.checkpoint()
    except StorageError:
        return
    life.publish()


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
    """Run the command line."""
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
