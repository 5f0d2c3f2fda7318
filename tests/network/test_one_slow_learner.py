"""One learner of four has a slow link or stalls: the others do not wait, and it is merged.

All four step at the same rate. Three share the syncer's end of a link. The fourth, at the other
end, has an uplink on which one upload takes a given number of steps. The results are read from the
tapes.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from decoupled_diloco.config import RunConfig, dump_config
from decoupled_diloco.tape.records import Record
from decoupled_diloco.workloads import load_workload
from network.network_runs import finish, records, step_times
from network.network_spaces import FAR, FAR_ADDRESS, NEAR, Link, link, unavailable
from replay_check import assert_replays

pytestmark = [
    pytest.mark.long,  # `tests/simulation/test_slow_links.py` shows the same in virtual time
    pytest.mark.network,
    pytest.mark.skipif(bool(unavailable()), reason=unavailable() or "namespaces are available"),
]

FRAGMENTS = PERIOD = 6
STEP_SECONDS = 0.15
SLOW, SHARDS = "learner-3", ("shard-0", "shard-1")
FAST = ("learner-0", "learner-1", "learner-2")
NARROW_SECONDS = 20.0
OVERHEAD = 1.05
"""Headers, and the learner's other messages."""


LADDER = ["bf16", "int4", "int2"]


def configure(
    folder: Path,
    steps: int,
    name: str = "paced",
    codecs: Any = "bf16",
    adapt: Any = None,
    **options: Any,
) -> RunConfig:
    (folder / "token").write_text("a secret")
    small = {"layers": 2, "width": 96, "batch_size": 1, "context": 16}
    small |= {"corpus_bytes_max": 200_000, "warmup_steps": 0, "step_seconds": STEP_SECONDS}
    return RunConfig(
        run={"folder": folder / "run", "learners": 4, "max_steps": steps, "evaluator": False},
        sync={
            "fragments": FRAGMENTS,
            "sync_every": PERIOD,
            "overlap_steps": 2,
            "codec": {"uplink": codecs},
            **({"adapt": adapt} if adapt else {}),
        },
        syncer={
            "shards": len(SHARDS),
            "host": FAR_ADDRESS,
            "port": 7070,
            "token_file": folder / "token",
        },
        workload={"name": name, "options": small | options},
    )


def start(made: Link, config: RunConfig, folder: Path) -> None:
    """Start the shards and the learners, with the slow one at the near end, and wait for steps."""
    path = folder / "run.toml"
    path.write_text(dump_config(config))
    for shard in range(len(SHARDS)):
        made.start(FAR, "syncer", str(path), "--shard", str(shard))
    for index in range(4):
        made.start(NEAR if index == 3 else FAR, "learner", str(path), "--index", str(index))
    deadline = time.monotonic() + 400
    while not all(_stepped(folder, name) for name in (*FAST, SLOW)):
        assert time.monotonic() < deadline, made.logs()
        time.sleep(0.2)


def trained_over(
    mbit: float, config: RunConfig, folder: Path, *, both_ways: bool = False
) -> tuple[float, float]:
    """Run to the end with a link that is narrow for a while; return when it was narrow."""
    with link(folder, mbit=None) as made:
        start(made, config, folder)
        made.narrow(mbit, both_ways=both_ways)
        begin = time.monotonic()
        time.sleep(NARROW_SECONDS)
        end = time.monotonic()
        made.widen(both_ways=both_ways)
        finish(made, seconds=60)
    times = step_times(folder, FAST[0])
    typical = median(b - a for a, b in pairwise(times))
    if typical > 1.25 * STEP_SECONDS:
        pytest.skip(f"the machine is too busy for the pace: a step took {typical:.2f} s")
    return begin, end


def _stepped(folder: Path, name: str) -> bool:
    path = folder / "run" / "tape" / f"{name}.jsonl"
    return path.exists() and len(step_times(folder, name)) > 2 * PERIOD


def upload_bytes(config: RunConfig) -> float:
    """Return the mean size of a contribution's payload in bf16."""
    model = load_workload(config.workload.name, config.workload_options()).model()
    return 2 * sum(p.numel() for p in model.parameters()) / FRAGMENTS


@dataclass(frozen=True)
class Seen:
    """Facts from the tapes about the seconds from `begin` to `end`."""

    folder: Path
    begin: float
    end: float

    @cached_property
    def shards(self) -> list[list[Record]]:
        return [records(self.folder, name) for name in SHARDS]

    def within(self, tape: list[Record], type: str) -> Iterator[Record]:
        return (r for r in tape if r.type == type and self.begin < r.at <= self.end)

    def merged_share(self) -> float:
        """Merged rounds divided by those that the ticks make due: P / H of these each."""
        ticks, rounds = 0.0, 0
        for tape in self.shards:
            clock = [r.data["clock"] for r in self.within(tape, "ClockAdvanced")]
            ticks += (clock[-1] - clock[0]) / len(self.shards)
            finished = self.within(tape, "RoundFinished")
            rounds += sum(r.data["verdict"] == "merged" for r in finished)
        return rounds / (ticks * FRAGMENTS / PERIOD)

    def heard(self) -> Counter[int]:
        """How often each fragment received the slow learner."""
        folds = [r.data for tape in self.shards for r in self.within(tape, "Fold")]
        return Counter(f["fragment"] for f in folds if f["learner"] == SLOW)

    def link_busy(self) -> float:
        """Share of the time in which a payload of the slow learner is in transfer."""
        sent = {key(r.data): r.at for r in records(self.folder, SLOW) if r.type == "SendBody"}
        arrived = {
            key(r.data): r.at
            for tape in self.shards
            for r in tape
            if r.type == "BodyArrived" and r.data["learner"] == SLOW
        }
        busy, until = 0.0, self.begin
        for name, at in sorted(sent.items(), key=lambda item: item[1]):
            over = min(self.end, arrived.get(name, self.end))
            busy += max(0.0, over - max(at, until))
            until = max(until, over)
        return busy / (self.end - self.begin)

    def assert_folded_once(self) -> None:
        """Check, over the whole run, that each contribution of the slow learner is in exactly one
        version.
        """
        for tape in self.shards:
            arrived = Counter(
                key(r.data) for r in tape if r.type == "BodyArrived" and r.data["learner"] == SLOW
            )
            folded = Counter(
                key(r.data) for r in tape if r.type == "Fold" and r.data["learner"] == SLOW
            )
            merged = Counter(
                (r.data["fragment"], name_of(p["ask"]))
                for r in tape
                if r.type == "RoundFinished" and r.data["verdict"] == "merged"
                for p in r.data["participants"]
                if p["learner"] == SLOW and p["state"] == "folded"
            )
            assert arrived == folded == merged
            assert set(arrived.values()) == {1}

    def assert_nobody_waits(self) -> None:
        """Check that the other learners never hold and never stall, except on a busy machine."""
        for name in FAST:
            assert not any(r.type == "Hold" for r in records(self.folder, name))
            gaps = self.gaps(name)
            assert median(gaps) < 2 * STEP_SECONDS
            assert max(gaps) < 1.5, "half of the protocol's shortest interval"
            assert len(gaps) > 0.85 * (self.end - self.begin) / median(gaps)

    def gaps(self, name: str) -> list[float]:
        """Return the durations of a learner's steps."""
        times = [r.at for r in self.within(records(self.folder, name), "StepFinished")]
        return [b - a for a, b in pairwise(times)]


def key(data: dict[str, Any]) -> tuple[int, str]:
    return data["fragment"], name_of(data["ask"])


def name_of(ask: dict[str, Any]) -> str:
    return f"{ask['term']}.{ask['number']}"


@pytest.mark.parametrize("steps", [0.5, 8])
def test_an_upload_may_take_any_time(tmp_path: Path, steps: float) -> None:
    config = configure(tmp_path, steps=200)
    mbit = OVERHEAD * 8e-6 * upload_bytes(config) / (steps * STEP_SECONDS)
    begin, end = trained_over(mbit, config, tmp_path)
    seen = Seen(tmp_path, begin + 2.0, end)
    print(f"{steps=} {seen.merged_share()=} {seen.link_busy()=} {seen.heard()=}")
    assert seen.merged_share() >= 0.95
    assert set(seen.heard()) == set(range(FRAGMENTS))
    if steps > 1:
        assert seen.link_busy() >= 0.85, "more is due than the link can carry"
    seen.assert_folded_once()
    seen.assert_nobody_waits()
    assert_replays(tmp_path / "run")


def test_a_learner_sends_in_the_codec_that_its_link_supports(tmp_path: Path) -> None:
    """A bf16 payload takes four steps, but only one step is available.

    With int2 it takes half a step. Later the link is not limited any more. The learner's whole
    share is merged, and every change has its reason.
    """
    config = configure(tmp_path, steps=300, codecs=LADDER)
    mbit = OVERHEAD * 8e-6 * upload_bytes(config) / (4 * STEP_SECONDS)
    begin, end = trained_over(mbit, config, tmp_path)
    seen = Seen(tmp_path, begin + 6.0, end)
    codecs = [r.data["codec"] for r in seen.within(records(tmp_path, SLOW), "SendBody")]
    rounds = len([r for tape in seen.shards for r in seen.within(tape, "RoundFinished")])
    print(f"{codecs=} {rounds=} {seen.heard()=}")
    assert codecs.count("int2") > 0.8 * len(codecs)
    assert sum(seen.heard().values()) > 0.8 * rounds
    after = [r.data["codec"] for r in records(tmp_path, SLOW) if r.type == "SendBody"]
    assert after[-1] == "bf16"
    for tape in seen.shards:
        notes = [r.data for r in Seen(tmp_path, begin, end).within(tape, "Note")]
        changes = [n for n in notes if n["text"].startswith(f"{SLOW} now sends in ")]
        assert 1 <= len(changes) <= 3, "it does not flap"
        assert all(change["why"] for change in changes)
    seen.assert_folded_once()
    seen.assert_nobody_waits()
    assert_replays(tmp_path / "run")


def test_the_period_follows_the_link(tmp_path: Path) -> None:
    """A payload takes three steps, but only one is available: the period becomes four times as
    long.

    Later the link is not limited any more.
    """
    limits = {"sync_every": [PERIOD, 4 * PERIOD], "overlap_steps": [2, 8], "learner_share": 1.0}
    config = configure(tmp_path, steps=320, adapt=limits)
    mbit = OVERHEAD * 8e-6 * upload_bytes(config) / (3 * STEP_SECONDS)
    begin, end = trained_over(mbit, config, tmp_path)
    seen = Seen(tmp_path, begin, end)
    made = [r for r in records(tmp_path, "coordinator") if r.type == "Note"]
    made = [r for r in made if r.data["text"].startswith("revision ")]
    print([(r.at - begin, r.data["text"], r.data["why"]) for r in made])
    assert any(f"H = {4 * PERIOD}," in r.data["text"] for r in made if begin < r.at < end)
    assert f"H = {PERIOD}," in made[-1].data["text"].partition(";")[0]
    assert made[-1].at > end
    assert len(made) <= 6, "it does not flap"
    for name in (*FAST, SLOW):
        heard = [r for r in records(tmp_path, name) if r.type == "Received"]
        numbers = [r.data["message"]["number"] for r in heard if _is_revision(r)]
        assert set(numbers) >= {int(r.data["text"].split()[1].rstrip(":")) for r in made}
    seen.assert_folded_once()
    seen.assert_nobody_waits()
    assert_replays(tmp_path / "run")


def _is_revision(record: Record) -> bool:
    return record.data["message"]["type"] == "Revision"


def test_copies_may_take_any_time(tmp_path: Path) -> None:
    """Both ways: the learner never holds the newest version of most fragments; all receive it."""
    config = configure(tmp_path, steps=200)
    mbit = OVERHEAD * 8e-6 * upload_bytes(config) / (3 * STEP_SECONDS)
    begin, end = trained_over(mbit, config, tmp_path, both_ways=True)
    seen = Seen(tmp_path, begin + 2.0, end)
    print(f"{seen.merged_share()=} {seen.heard()=}")
    assert seen.merged_share() >= 0.95
    assert set(seen.heard()) == set(range(FRAGMENTS))
    seen.assert_folded_once()
    seen.assert_nobody_waits()
    assert_replays(tmp_path / "run")


def test_a_stalled_loop_delays_no_learner(tmp_path: Path) -> None:
    """The loop stalls for 60 steps; its process lives and sends heartbeats."""
    stands = {"learner": 3, "step": 30, "seconds": 60 * STEP_SECONDS}
    config = configure(tmp_path, steps=150, name="standing:standing", **stands)
    with link(tmp_path, mbit=None) as made:
        start(made, config, tmp_path)
        finish(made, seconds=100)
    gap, begin = max((b - a, a) for a, b in pairwise(step_times(tmp_path, SLOW)))
    assert gap > 60 * STEP_SECONDS
    seen = Seen(tmp_path, begin, begin + gap)
    print(f"{seen.merged_share()=} {seen.heard()=}")
    assert seen.merged_share() >= 0.95
    seen.assert_folded_once()
    seen.assert_nobody_waits()
    after = Seen(tmp_path, begin + gap, step_times(tmp_path, SLOW)[-1])
    assert set(after.heard()) == set(range(FRAGMENTS)), "then it is merged again"
    assert_replays(tmp_path / "run")
