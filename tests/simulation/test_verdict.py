"""Verdicts pass for a good run and fail for each promise that a tape shows to be broken."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from decoupled_diloco.errors import ProtocolError
from decoupled_diloco.run_model import read_run
from decoupled_diloco.tape.segments import lines_of, tapes_in
from decoupled_diloco_lab.chaos.reference import accepted_share_of, fault_free_share, with_variance
from decoupled_diloco_lab.chaos.verdict import Verdict, judge, save_verdict
from decoupled_diloco_lab.simulate.protocol_run import ProtocolRun
from decoupled_diloco_lab.simulate.scenario import Scenario, load_scenario

STORY = """
run = { max_steps = 150 }
sync.fragments = 4
sync.sync_every = 4
sync.overlap_steps = 2
sync.apply = { alignment = "carry", missed = "rebase" }
syncer = { shards = 2 }
parameters = 1000

[[learners]]
count = 3

[[events]]
kind = "kill"
target = "learner-1"
at_seconds = 30
for_seconds = 5

[[events]]
kind = "kill"
target = "shard-0"
at_seconds = 60
for_seconds = 3

[[events]]
kind = "pause"
target = "learner-2"
at_seconds = 80
for_seconds = 15

[[events]]
kind = "cut"
target = "learner-0"
at_seconds = 105
for_seconds = 4
"""

Records = list[dict[str, Any]]


@pytest.fixture(scope="module")
def scenario(tmp_path_factory: pytest.TempPathFactory) -> Scenario:
    path = tmp_path_factory.mktemp("scenario") / "story.toml"
    path.write_text(STORY)
    return with_variance(load_scenario(path))


@pytest.fixture(scope="module")
def finished(scenario: Scenario, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with the tape of the scenario."""
    folder = tmp_path_factory.mktemp("run")
    run = ProtocolRun(scenario, folder)
    while run.advance():
        pass
    assert run.finished
    run.close()
    return folder


@pytest.fixture(scope="module")
def share(scenario: Scenario) -> float:
    return fault_free_share(scenario)


@pytest.fixture
def folder(finished: Path, tmp_path: Path) -> Path:
    """A copy of the run folder that a test may change."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


def verdict(folder: Path, share: float) -> Verdict:
    return judge(folder, accepted_share=share, finished=True)


def broken(folder: Path, share: float) -> set[str]:
    return {check.name for check in verdict(folder, share).checks if not check.kept}


def rewrite(
    folder: Path, process: str, change: Callable[[Records], Iterator[dict[str, Any]]]
) -> None:
    path = folder / "tape" / f"{process}.jsonl"
    records = [json.loads(line.text) for line in lines_of(path, [])]
    shutil.rmtree(path.with_suffix(".segments"), ignore_errors=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in change(records)))


def is_merge(record: dict[str, Any]) -> bool:
    return record["type"] == "RoundFinished" and record["data"]["verdict"] == "merged"


def test_tokens_of_a_learner_that_crashes_by_itself_are_a_loss(folder: Path, share: float) -> None:
    died = verdict(folder, share).numbers["died_tokens"]

    def unprovoked(records: Records) -> Iterator[dict[str, Any]]:
        for record in records:
            if record["type"] != "FaultInjected" or record["data"]["target"] != "learner-1":
                yield record

    for path in tapes_in(folder / "tape"):
        rewrite(folder, path.stem, unprovoked)
    numbers = verdict(folder, share).numbers
    assert (died > 0, numbers["died_tokens"]) == (True, 0)
    assert numbers["accepted_ratio_of_the_living"] == numbers["accepted_ratio"]


def test_the_summary_counts_the_same_lost_steps_as_the_verdict(folder: Path, share: float) -> None:
    """The pause of learner-2 is a fault of its own, so it loses no steps to another's fault."""
    assert set(verdict(folder, share).numbers["lost_steps"].values()) == {0}
    history = read_run(folder)
    learner = history.learners["learner-2"]
    assert learner.gap_seconds_longest is not None
    assert learner.gap_seconds_longest > 10.0
    assert learner.lost_steps(0.0, history.duration) == 0


def test_a_run_that_kept_its_promises_passes_every_check(folder: Path, share: float) -> None:
    found = verdict(folder, share)
    assert found.kept, [check for check in found.checks if not check.kept]
    assert found.faults == {"cut": 1, "kill": 2, "pause": 1}
    assert found.numbers["uptime"] == 1.0
    assert 0.97 <= found.numbers["accepted_ratio"] <= 1.02
    assert found.numbers["accepted_ratio"] < found.numbers["accepted_ratio_of_the_living"] <= 1.02
    assert found.numbers["died_tokens"] > 0
    (accepted,) = (check for check in found.checks if check.name == "accepted tokens")
    assert re.search(r"shards came back after a median of [\d.]+ s", accepted.details[-1])
    assert set(found.numbers["lost_steps"].values()) == {0}
    assert min(found.numbers["participation"].values()) >= 0.95
    document = json.loads(save_verdict(folder, found).read_text())
    assert document["kept"] is True
    assert len(document["checks"]) == 7


def test_alive_time_excludes_downtime_and_pauses(folder: Path, share: float) -> None:
    alive = verdict(folder, share).numbers["alive_seconds"]
    assert alive["learner-0"] == pytest.approx(150.0, abs=4.0)
    assert alive["learner-1"] == pytest.approx(145.0, abs=5.0), "five seconds away, and a join"
    assert alive["learner-2"] == pytest.approx(135.0, abs=5.0), "fifteen seconds of SIGSTOP"


def test_the_fault_free_share_depends_on_the_recipe(scenario: Scenario, share: float) -> None:
    assert share > 0.98, "carry and rebase discard nothing"
    sync = scenario.config.sync
    apply = sync.apply.model_copy(update={"alignment": "overwrite", "missed": "overwrite"})
    paper = sync.model_copy(update={"apply": apply})
    config = scenario.config.model_copy(update={"sync": paper})
    overwritten = fault_free_share(Scenario(**{**vars(scenario), "config": config}))
    assert 0.5 < overwritten < 0.9, "steps trained in flight are overwritten"


def test_the_reference_may_be_a_run_folder(folder: Path) -> None:
    assert 0.9 < accepted_share_of(folder) < 1.0


def test_a_version_issued_twice_breaks_a_rule(folder: Path, share: float) -> None:
    def twice(records: Records) -> Iterator[dict[str, Any]]:
        merges = 0
        for record in records:
            yield record
            merges += is_merge(record)
            if is_merge(record) and merges == 20:
                yield {**record, "seq": record["seq"]}

    rewrite(folder, "shard-1", twice)
    assert "versions and merges" in broken(folder, share)


def test_a_version_that_goes_back_breaks_a_rule(folder: Path, share: float) -> None:
    def back(records: Records) -> Iterator[dict[str, Any]]:
        merges = 0
        for record in records:
            merges += is_merge(record)
            if is_merge(record) and merges == 20:
                record["data"]["version"]["counter"] = 1
            yield record

    rewrite(folder, "shard-1", back)
    assert {"versions and merges", "tapes replay exactly"} <= broken(folder, share)


def test_a_restart_before_a_merged_version_breaks_a_rule(folder: Path, share: float) -> None:
    def back(records: Records) -> Iterator[dict[str, Any]]:
        lives = 0
        for record in records:
            lives += record["kind"] == "start"
            if lives == 2 and record["type"] == "Install":
                record["data"]["version"]["counter"] -= 3
            yield record

    rewrite(folder, "shard-0", back)
    (check,) = [c for c in verdict(folder, share).checks if c.name == "versions and merges"]
    assert not check.kept
    assert "was merged" in check.details[0]


@pytest.mark.parametrize(
    ("field", "value", "words"), [("epoch", 0, "the old epoch"), ("base", None, "was trained from")]
)
def test_a_contribution_of_another_epoch_or_base_breaks_a_rule(
    folder: Path, share: float, field: str, value: int | None, words: str
) -> None:
    def corrupt(records: Records) -> Iterator[dict[str, Any]]:
        bodies = 0
        for record in records:
            bodies += record["type"] == "BodyArrived"
            if record["type"] == "BodyArrived" and bodies == 30:
                if field == "epoch":
                    record["data"]["epoch"] = value
                else:
                    record["data"]["base"]["counter"] -= 1
            yield record

    rewrite(folder, "shard-1", corrupt)
    (check,) = [c for c in verdict(folder, share).checks if c.name == "versions and merges"]
    assert any(words in detail for detail in check.details)


def test_a_removed_merge_is_a_replay_difference(folder: Path, share: float) -> None:
    def without(records: Records) -> Iterator[dict[str, Any]]:
        number = next(r["seq"] for r in records[300:] if r["type"] == "Done")
        yield from (r for r in records if number not in (r["seq"], r.get("cause")))

    rewrite(folder, "shard-1", without)
    assert "tapes replay exactly" in broken(folder, share)


def test_a_survivor_that_stalls_loses_steps(folder: Path, share: float) -> None:
    def still(records: Records) -> Iterator[dict[str, Any]]:
        for record in records:
            if not (record["type"] == "StepFinished" and 40 < record["at"] < 50):
                yield record

    rewrite(folder, "learner-0", still)
    (check,) = [c for c in verdict(folder, share).checks if c.name == "survivors lose no step"]
    assert not check.kept
    assert "learner-0: " in check.details[0]


def test_a_survivor_that_stalls_to_the_end_loses_steps(folder: Path, share: float) -> None:
    def ends(records: Records) -> Iterator[dict[str, Any]]:
        yield from (r for r in records if r["at"] < 120)

    rewrite(folder, "learner-0", ends)
    assert "survivors lose no step" in broken(folder, share)


def test_a_time_in_which_no_learner_steps_is_found(folder: Path, share: float) -> None:
    def still(records: Records) -> Iterator[dict[str, Any]]:
        for record in records:
            if not (record["type"] == "StepFinished" and 40 < record["at"] < 50):
                yield record

    for learner in range(3):
        rewrite(folder, f"learner-{learner}", still)
    assert {"some learner always steps", "survivors lose no step"} <= broken(folder, share)


def test_a_learner_left_out_of_rounds_is_found(folder: Path, share: float) -> None:
    def late(records: Records) -> Iterator[dict[str, Any]]:
        for record in records:
            if is_merge(record):
                for participant in record["data"]["participants"]:
                    if participant["learner"] == "learner-0" and record["at"] < 60:
                        participant["state"] = "late"
            yield record

    for shard in range(2):
        rewrite(folder, f"shard-{shard}", late)
    found = broken(folder, share)
    assert "every live learner takes part" in found


def test_discarded_tokens_lower_the_accepted_ratio(folder: Path, share: float) -> None:
    def discard(records: Records) -> Iterator[dict[str, Any]]:
        for record in records:
            if record["type"] == "Apply" and record["at"] < 60:
                record["data"]["discarded_tokens"] = 4
                record["data"]["mode"] = "overwrite"
                record["data"]["why"] = "it had no part in it"
            yield record

    rewrite(folder, "learner-0", discard)
    assert "accepted tokens" in broken(folder, share)


def test_a_tape_of_another_version_is_rejected(folder: Path, share: float) -> None:
    def renamed(records: Records) -> Iterator[dict[str, Any]]:
        for record in records:
            if is_merge(record):
                record["data"]["outcome"] = record["data"].pop("verdict")
            yield record

    rewrite(folder, "shard-0", renamed)
    with pytest.raises(ProtocolError, match=r"cannot judge the tape of .*: shard-0: RoundFinished"):
        judge(folder, accepted_share=share, finished=True)


def test_an_unfinished_run_fails_the_last_check(folder: Path, share: float) -> None:
    found = judge(folder, accepted_share=share, finished=False, reason="shard-1 does not run")
    assert [check.name for check in found.checks if not check.kept] == [
        "the run ends with all fragments"
    ]


def test_a_learner_asked_to_stop_loses_no_steps(folder: Path, share: float) -> None:
    def ends(records: Records) -> Iterator[dict[str, Any]]:
        yield from (r for r in records if r["at"] < 120)

    def with_request(records: Records) -> Iterator[dict[str, Any]]:
        for record in records:
            if record["type"] == "ProcessEnded" and record["data"]["name"] == "learner-0":
                request = {**record, "type": "EndRequested", "at": 119.99}
                yield {**request, "data": {"names": ["learner-0"]}}
            yield record

    rewrite(folder, "learner-0", ends)
    assert "survivors lose no step" in broken(folder, share)
    rewrite(folder, "launcher", with_request)
    assert "survivors lose no step" not in broken(folder, share)
