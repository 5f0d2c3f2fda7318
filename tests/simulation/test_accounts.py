"""Random worlds with random faults: accounts leave nothing over, and both sides tell the same."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from decoupled_diloco.observe.accounts import TIME_PARTS, TOKEN_PARTS, RunAccount, account_for
from decoupled_diloco.observe.run_model import RunModel, read_run
from decoupled_diloco.protocol.effects import RoundFinished
from decoupled_diloco.simulate.hosts import Host
from decoupled_diloco.simulate.scene import Scene, draw

SEEDS = range(160)
"""Among so many are rare ones: a life that was killed and its next one send as many tokens to the
same version; a copy is renamed between its arrival and its boundary; a checkpoint brings an earlier
life's tokens; a shard's disk has lied and what was merged is open again."""

BATCHES = 4

INEXACT: set[int] = set()
"""Worlds in which both sides tell different numbers, for a known reason."""


def recorded(seed: int, folder: Path) -> tuple[RunModel, RunAccount, Scene]:
    """A random world's tape, read, up to the end of its faults."""
    scene = draw(seed, folder / "files", tapes=folder)
    try:
        scene.system.run(until=scene.calm_at, stop=lambda: scene.system.finished)
    finally:
        scene.system.close()
    history = read_run(folder)
    return history, account_for(history), scene


@pytest.mark.parametrize("batch", range(BATCHES))
@pytest.mark.parametrize("whole", [True, False], ids=["whole tapes", "tapes of the killed"])
def test_nothing_is_left_over(
    batch: int, whole: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A killed process loses what its tape has not yet written: what is there still adds up.

    Where nothing of them is lost, both sides tell the same.
    """
    if whole:
        monkeypatch.setattr(Host, "lose_tapes", Host.close_tapes)
    some_merged = restarted = 0
    for seed in SEEDS[batch::BATCHES]:
        history, account, scene = recorded(seed, tmp_path / str(seed))
        assert history.fragments == scene.options.fragments
        for part in (account, *account.learners.values()):
            time, tokens = part.time, part.tokens
            whole = sum(getattr(time, name) for name in TIME_PARTS)
            assert time.allocated == whole, f"seed {seed}"
            trained = sum(getattr(tokens, name) for name in TOKEN_PARTS)
            assert tokens.trained == trained, f"seed {seed}"
            assert min(dataclasses.astuple(time)) >= 0 <= min(dataclasses.astuple(tokens))
        for name, one in account.learners.items():
            if scene.system.learners[name].ahead_seconds:
                continue  # by its own clock a life ends after the next one has begun
            for before, after in zip(one.spans, one.spans[1:], strict=False):
                assert before.end == after.begin, f"seed {seed}"
        some_merged += compare_with_shards(seed, history, account, scene) if whole else 1
        restarted += any(host.life > 1 for host in scene.system.shard_processes)
    assert len(INEXACT) <= len(SEEDS) // 20
    assert some_merged >= 10
    assert restarted >= 5


def compare_with_shards(seed: int, history: RunModel, account: RunAccount, scene: Scene) -> bool:
    """What learners count as merged is what shards have folded, whoever died meanwhile.

    A shard that dies between a merge's way to the disk and the word of it has no end of that round
    on its tape, but its next life publishes the version. Where machines lose their power a version
    may be gone that a learner has taken, or the word of one.
    """
    folded = 0
    for merged in by_fragment(history).values():
        for result in lineage(merged):
            folded += sum(p.tokens for p in result.participants if p.state == "folded")
    lost = account.tokens.merged - folded
    died = any(host.life > 1 for host in scene.system.shard_processes)
    explained = (lost > 0 and died) or scene.system.power is not None
    assert lost == 0 or explained, f"seed {seed}: {lost}"
    INEXACT.update([seed] if lost else [])
    return folded > 0


def by_fragment(history: RunModel) -> dict[int, dict[tuple[int, int], RoundFinished]]:
    """What was merged, by its version."""
    found: dict[int, dict[tuple[int, int], RoundFinished]] = defaultdict(dict)
    for shard in history.shards.values():
        for result in (r.result for r in shard.rounds):
            if result.verdict == "merged":
                found[result.fragment][result.version.term, result.version.counter] = result
    return found


def lineage(merged: dict[tuple[int, int], RoundFinished]) -> Iterator[RoundFinished]:
    """From the newest version back to the first; a shard that starts again keeps the counter."""
    version: tuple[int, int] | None = max(merged, default=None)
    while version is not None:
        result = merged[version]
        yield result
        older = [v for v in merged if v[1] == result.base.counter and v[0] <= result.base.term]
        version = max(older, default=None)
