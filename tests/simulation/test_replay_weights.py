"""Replay weights from tape and payloads: every version bit for bit, or a note why not."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from decoupled_diloco.cli.main import app
from decoupled_diloco.config import RunConfig
from decoupled_diloco.config.method import plan_of, read_settings
from decoupled_diloco.config.sync import ROBUST_RULES
from decoupled_diloco.errors import ConfigError, StorageError
from decoupled_diloco.merge import Contribution, publish
from decoupled_diloco.merge.plan import values_of
from decoupled_diloco.protocol.messages import Done, Expect, Fold, Merge, RoundOpened
from decoupled_diloco.storage.weight_files import load_weights, save_weights
from decoupled_diloco.syncer.payload_archive import PAYLOADS, read_body, read_layout
from decoupled_diloco.syncer.result import by_name
from decoupled_diloco.tape import TapeReader
from decoupled_diloco.tape.samples import PayloadsEnded
from decoupled_diloco_lab.simulate.protocol_run import ProtocolRun
from decoupled_diloco_lab.simulate.scenario import load_scenario
from decoupled_diloco_lab.simulate.simulation import Simulation
from decoupled_diloco_lab.simulate.spec import LearnerSpec
from decoupled_diloco_lab.simulate.system import System
from decoupled_diloco_lab.simulate.weights_replay import (
    WeightsReplay,
    Without,
    replay_weights,
    weights_without,
)

RUN = """
[run]
max_steps = 40
evaluator = false

[sync]
fragments = 4
sync_every = 8
overlap_steps = 2
quorum = 2

[outer]
average = 0.5

[syncer]
shards = 2
record_payloads = true

[workload]
name = "paced"

[workload.options]
layers = 1
width = 32
heads = 2
context = 16
batch_size = 2
corpus_bytes_max = 200_000
warmup_steps = 0

[[learners]]
name = "near"
count = 2
variance = 0.1

[[learners]]
name = "far"
step_seconds = 1.5
variance = 0.1

[[events]]
at_seconds = 12.0
kind = "kill"
target = "shard-1"
for_seconds = 3.0

[[events]]
at_step = 22
kind = "kill"
target = "learner-0"
for_seconds = 6.0
"""


def simulated(folder: Path, text: str = RUN, harmful: str = "") -> Simulation:
    """Simulate a scenario to its end in this process, possibly with a harmful learner."""
    folder.mkdir()
    (folder / "story.toml").write_text(text)
    simulation = Simulation(load_scenario(folder / "story.toml"), folder)

    def harm(host: Any, order: Any, capture: Any) -> None:
        if host.name == harmful:
            object.__setattr__(capture, "plan", Tenfold(capture.plan))  # it is frozen

    simulation.system.on_capture = harm
    while simulation.advance():
        pass
    assert simulation.finished, simulation.reason
    simulation.finish()
    simulation.close()
    return simulation


class Tenfold:
    """A merge plan that encodes ten times the contribution, with the wrong sign."""

    def __init__(self, plan: Any) -> None:
        self._plan = plan

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plan, name)

    def encode(self, d: Tensor, *others: Any) -> Any:
        return self._plan.encode(-10 * d, *others)


class Answer(NamedTuple):
    code: int
    text: str


def ddiloco(*arguments: str | Path) -> Answer:
    """Run the command in this process."""
    done = CliRunner().invoke(app, list(map(str, arguments)))
    return Answer(done.exit_code, done.output)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "kept"
    simulated(folder)
    return folder


@pytest.fixture
def copied(run: Path, tmp_path: Path) -> Path:
    """A copy of the run that a test may corrupt."""
    shutil.copytree(run, tmp_path / "copy")
    return tmp_path / "copy"


def published(folder: Path) -> int:
    """Count the published versions on the tape."""
    versions = set()
    for record in TapeReader(folder):
        message = record.data.get("message", {})
        if record.kind == "effect" and message.get("type") == "Published":
            versions.add((message["fragment"], *message["version"].values()))
    return len(versions)


def test_every_published_version_and_the_final_weights_are_the_same(run: Path) -> None:
    """A shard dies during the run and recovers from its disk."""
    results = replay_weights(run)
    assert [result.process for result in results] == ["shard-0", "shard-1"]
    for result in results:
        assert result.final == "the same"
        assert (result.unknown, result.differences, result.notes) == (0, [], [])
        assert result.merges >= 8
    assert sum(result.versions for result in results) == published(run) > 20
    lives = [r for r in TapeReader(run) if r.process == "shard-1" and r.kind == "start"]
    assert len(lives) == 2


@pytest.mark.parametrize("rule", ROBUST_RULES)
def test_the_weights_of_a_robust_rule_are_the_same(rule: str, tmp_path: Path) -> None:
    text = RUN.replace("[syncer]", f'[sync.merge]\nrule = "{rule}"\n\n[syncer]')
    simulated(tmp_path / "robust", text.replace("max_steps = 40", "max_steps = 24"))
    for result in replay_weights(tmp_path / "robust"):
        assert result.merges >= 4
        assert (result.final, result.unknown, result.differences) == ("the same", 0, [])


def test_the_command_reports_the_same_bits(run: Path) -> None:
    done = ddiloco("replay", run)
    assert done.code == 0, done.text
    assert done.text.count("the same bits") == 2
    assert "the same bits" not in ddiloco("replay", run, "--no-weights").text


def test_until_computes_the_beginning(run: Path) -> None:
    some, every = replay_weights(run, 15.0), replay_weights(run)
    assert 0 < some[0].versions < every[0].versions
    assert some[0].final == "none"
    assert not some[0].differences


def test_a_payload_with_another_bit_is_found(copied: Path) -> None:
    body = sorted((copied / "payloads/shard-0/up").glob("1/0/learner-0/*/*"))[1]
    content = bytearray(body.read_bytes())
    content[5] ^= 1
    body.write_bytes(content)
    result = replay_weights(copied)[0]
    assert result.unknown > 0
    assert "was announced" in result.notes[0]
    assert ddiloco("replay", copied).code == 1


def assert_found(results: list[WeightsReplay], why: str) -> None:
    assert results[0].differences, why
    assert "version 1." in results[0].differences[0]
    assert not results[1].differences


def test_different_final_weights_are_found(copied: Path) -> None:
    path = copied / "checkpoints" / "shard-1.safetensors"
    state = load_weights(path)
    state["fragment.1"][0] += 1e-3
    save_weights(path, state)
    results = replay_weights(copied)
    assert [result.final for result in results] == ["the same", "others"]
    assert ddiloco("replay", copied).code == 1


def test_a_missing_payload_is_named_and_its_versions_are_unknown(copied: Path) -> None:
    body = sorted((copied / "payloads/shard-0/up").glob("1/0/learner-0/*/*"))[1]
    body.unlink()
    result = replay_weights(copied)[0]
    assert result.unknown > 0
    assert not result.differences
    assert result.final == "others"
    assert "/up/1/0/learner-0/" in result.notes[0]
    assert "was not recorded" in result.notes[0]


def test_without_payloads_the_error_names_the_setting(copied: Path) -> None:
    shutil.rmtree(copied / "payloads")
    with pytest.raises(StorageError, match=r"syncer\.record_payloads = true"):
        replay_weights(copied)
    done = ddiloco("replay", copied)
    assert done.code == 0
    assert "same bits" not in done.text


def test_a_full_disk_ends_the_recording_but_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = iter(range(10**9))

    def usage(path: Path) -> shutil._ntuple_diskusage:
        return shutil._ntuple_diskusage(10**12, 0, 10**12 if next(free) < 25 else 10**6)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    simulated(tmp_path / "full")
    ends = [r.value() for r in TapeReader(tmp_path / "full") if r.type == "PayloadsEnded"]
    assert len(ends) == 2
    assert isinstance(ends[0], PayloadsEnded)
    assert "the journal may need" in ends[0].problem
    for result in replay_weights(tmp_path / "full"):
        assert result.unknown > 0
        assert any(note.startswith("recording ended: ") for note in result.notes)
        assert not result.differences


def test_recording_payloads_without_tensors_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "story.toml").write_text(RUN)
    with pytest.raises(ConfigError, match=r"syncer\.record_payloads=true would be ignored"):
        ProtocolRun(load_scenario(tmp_path / "story.toml"))


HARMFUL = "learner-2"


@pytest.fixture(scope="module")
def harmed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "harmed"
    simulated(folder, harmful=HARMFUL)
    return folder


def by_hand(run: Path, without: str, from_step: int = 0) -> tuple[dict[str, Tensor], int]:
    """Merge the recorded contributions of the other learners, in the order of the tape.

    Returns:
        The weights, and the number of merges without any other contribution.
    """
    copies: dict[int, Tensor] = {}
    alone = 0
    for shard in (0, 1):
        folder, records = run / PAYLOADS / f"shard-{shard}", list(TapeReader(run))
        records = [each for each in records if each.process == f"shard-{shard}"]
        config = read_settings(records[0].data["header"]["settings"])
        plan = plan_of(read_layout(folder), config)
        masters, outers, folded = {}, {}, {}
        for fragment in range(shard, len(plan.fragments), 2):
            (file,) = folder.glob(f"copy/*/{fragment}/*/*")
            numel = plan.fragments[fragment].numel
            copies[fragment] = values_of(bytearray(file.read_bytes()), numel).clone()
            masters[fragment] = copies[fragment].clone()
            outers[fragment] = plan.outer_of(fragment)
        paths: dict[Any, Expect] = {}
        clock = 0
        for record in records:
            match record.value() if record.kind in ("event", "effect") else None:
                case RoundOpened(tick=tick):
                    clock = max(clock, tick)
                case Expect() as expect:
                    paths[expect.learner, expect.fragment, expect.ask] = expect
                case Fold() as fold if fold.learner != without or clock < from_step:
                    p, expect = fold.fragment, paths[fold.learner, fold.fragment, fold.ask]
                    body = read_body(folder, expect.path)
                    assert body is not None
                    content = torch.frombuffer(body, dtype=torch.uint8)
                    numel = plan.fragments[p].numel
                    contribution = Contribution(numel, plan.segments(p))
                    contribution.add(0, plan.uplink_of(p, expect.codec).decode(content, numel))
                    if fold.scale != 1.0:
                        contribution.scale(fold.scale)
                    weight = fold.discount * plan.weight(fold.tokens, fold.steps)
                    merge = folded.setdefault(p, plan.accumulator(p))
                    merge.add_contribution(contribution, weight)
                case Done(Merge(fragment=p)):
                    if p not in folded:
                        alone += 1
                        continue
                    outers[p].step(masters[p], -folded.pop(p).result())
                    publish(masters[p], copies[p], plan.downlink_of(p))
    return by_name(plan, copies), alone


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    """Whether two files of weights have the same bits."""
    return left.keys() == right.keys() and all(
        torch.equal(left[name].view(torch.uint8), right[name].view(torch.uint8)) for name in left
    )


def test_the_weights_without_a_harmful_learner_are_those_of_the_other_contributions(
    harmed: Path,
) -> None:
    """A shard dies during the run, and recovers weights with the learner from its disk."""
    done = ddiloco("replay", harmed, "--without", HARMFUL)
    assert done.code == 0, done.text
    assert "contributions are left out" in done.text
    file = harmed / f"weights-without-{HARMFUL}.safetensors"
    found, (expected, alone) = load_weights(file), by_hand(harmed, HARMFUL)
    assert same(found, expected)
    assert not same(found, load_weights(harmed / "weights.safetensors"))
    assert ("merges had no other contribution" in done.text) == (alone > 0)
    every, _ = by_hand(harmed, "none of them")
    assert same(every, load_weights(harmed / "weights.safetensors")), "the calculation is right"
    assert ddiloco("replay", harmed).text.count("the same bits") == 2


def test_contributions_before_a_step_remain(harmed: Path, tmp_path: Path) -> None:
    file = tmp_path / "later.safetensors"
    done = ddiloco("replay", harmed, "--without", HARMFUL, "--from", "24", "--output", file)
    assert done.code == 0, done.text
    assert "from step 24 on" in done.text
    later = load_weights(file)
    assert same(later, by_hand(harmed, HARMFUL, from_step=24)[0])
    assert not same(later, by_hand(harmed, HARMFUL)[0])


def test_merges_with_only_that_learner_change_nothing(tmp_path: Path) -> None:
    """One learner is away for most of the run, so the other one merges alone."""
    text = RUN.replace("quorum = 2", "quorum = 1").replace("count = 2", "count = 1")
    text = text.replace("at_step = 22", "at_step = 10")
    text = text.replace("for_seconds = 6.0", "for_seconds = 12.0")
    simulated(tmp_path / "alone", text)
    expected, alone = by_hand(tmp_path / "alone", "learner-1")
    assert alone > 0
    done = ddiloco("replay", tmp_path / "alone", "--without", "learner-1")
    assert f"{alone} merges had no other contribution" in done.text, done.text
    assert same(load_weights(tmp_path / "alone/weights-without-learner-1.safetensors"), expected)


def test_weights_without_a_learner_need_its_name_and_every_payload(copied: Path) -> None:
    with pytest.raises(ConfigError, match=r"choose one of learner-0, learner-1, learner-2"):
        weights_without(copied, Without("learner-7"), copied / "some.safetensors")
    assert "no effect without --without" in ddiloco("replay", copied, "--from", "3").text
    own = next(iter((copied / "payloads/shard-0/up").glob("1/*/learner-1/*/*")))
    own.unlink()
    file = copied / "some.safetensors"
    weights_without(copied, Without("learner-1"), file)
    with pytest.raises(StorageError, match=r"was not recorded"):
        weights_without(copied, Without("learner-0"), file)
    shutil.rmtree(copied / "payloads")
    with pytest.raises(StorageError, match=r"syncer\.record_payloads = true, or with scores"):
        weights_without(copied, Without("learner-1"), file)


def test_weights_without_a_learner_need_single_contributions(tmp_path: Path) -> None:
    merge = {"rule": "mean", "weighting": "uniform", "norm_gate": 0, "buffers": "local"}
    dp = {"clip": 0.5, "noise_multiplier": 2.0, "epsilon_max": 50.0, "delta": 1e-3}
    config = RunConfig(
        run={"name": "r", "learners": 3, "max_steps": 8, "evaluator": False},
        sync={"fragments": 2, "sync_every": 4, "merge": merge},
        data={"elastic": False},
        privacy={"dp": dp},
        workload={},
    )
    system = System(
        config, [LearnerSpec(name) for name in config.learner_ids], tmp_path, tapes=tmp_path
    )
    system.run(until=8.0)
    system.close()
    with pytest.raises(ConfigError, match=r"because \[privacy\.dp\] hides what each one contrib"):
        weights_without(tmp_path, Without("learner-0"), tmp_path / "some.safetensors")
    text = RUN.split("[[events]]")[0] + '[[sites]]\nname = "a"\nlearners = [0, 1]\n'
    simulated(tmp_path / "sites", text.replace("max_steps = 40", "max_steps = 16"))
    with pytest.raises(ConfigError, match=r"because relays send sums of contributions"):
        weights_without(tmp_path / "sites", Without("learner-2"), tmp_path / "some.safetensors")
