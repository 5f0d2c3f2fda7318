"""In random worlds with faults, accounts add up, and learners and shards agree."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from cases import long_after
from decoupled_diloco.protocol.messages import RoundFinished
from decoupled_diloco.run_model import RunModel, read_run
from decoupled_diloco.run_model.accounts import TIME_PARTS, TOKEN_PARTS, RunAccount, account_for
from decoupled_diloco_lab.simulate.hosts import Host
from worlds.scene import Scene, draw

SEEDS = range(160)
"""Among these are rare cases:

* An incarnation that is killed and the next one send the same number of tokens to one version.
* A copy is renamed between its arrival and its boundary.
* A checkpoint brings tokens of an earlier incarnation.
* A shard's disk has lost a synced merge, so that its contributions are open again.
"""

BATCHES = 4

INEXACT: set[int] = set()
"""Worlds in which learners and shards disagree for a known reason."""


def recorded(seed: int, folder: Path) -> tuple[RunModel, RunAccount, Scene]:
    """Run a random world to the end of its faults and read its tape."""
    scene = draw(seed, folder / "files", tapes=folder)
    try:
        scene.system.run(until=scene.calm_at, stop=lambda: scene.system.finished)
    finally:
        scene.system.close()
    history = read_run(folder)
    return history, account_for(history), scene


@pytest.mark.parametrize("batch", long_after(1, range(BATCHES)))
@pytest.mark.parametrize(
    "whole", long_after(1, [False, True]), ids=["tapes of the killed", "whole tapes"]
)
def test_accounts_add_up(
    batch: int, whole: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A killed process loses the end of its tape, but accounts of the rest still add up.

    If no tape loses anything, learners and shards agree.
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
                continue  # by its own clock, an incarnation ends after the next one has begun
            for before, after in zip(one.spans, one.spans[1:], strict=False):
                assert before.end == after.begin, f"seed {seed}"
        some_merged += compare_with_shards(seed, history, account, scene) if whole else 1
        restarted += any(host.life > 1 for host in scene.system.shard_processes)
    assert len(INEXACT) <= len(SEEDS) // 20
    assert some_merged >= 10
    assert restarted >= 5


def compare_with_shards(seed: int, history: RunModel, account: RunAccount, scene: Scene) -> bool:
    """Check that learners count as merged what shards have folded.

    A shard may die after a merge is on disk and before it publishes the version. Its tape lacks the
    end of that round, but its next incarnation publishes the version. If machines lose their power,
    a version that a learner has taken may be lost, or the record of one.

    Returns:
        Whether anything was folded.
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
    """Return the merged rounds by fragment and version."""
    found: dict[int, dict[tuple[int, int], RoundFinished]] = defaultdict(dict)
    for shard in history.shards.values():
        for result in (r.result for r in shard.rounds):
            if result.verdict == "merged":
                found[result.fragment][result.version.term, result.version.counter] = result
    return found


def lineage(merged: dict[tuple[int, int], RoundFinished]) -> Iterator[RoundFinished]:
    """Yield the rounds from the newest version back. A restarted shard keeps the counter."""
    version: tuple[int, int] | None = max(merged, default=None)
    while version is not None:
        result = merged[version]
        yield result
        older = [v for v in merged if v[1] == result.base.counter and v[0] <= result.base.term]
        version = max(older, default=None)
