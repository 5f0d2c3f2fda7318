"""The findings that the doctor derives from facts, and its output on a terminal."""

from __future__ import annotations

import io
import json
import threading
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement
from torch import nn

from decoupled_diloco.cli import doctor as command
from decoupled_diloco.config import RunConfig
from decoupled_diloco.errors import StorageError
from decoupled_diloco.launch.doctor import machine, machine_facts, syncer_findings
from decoupled_diloco.launch.doctor.examine import check_all, limited
from decoupled_diloco.launch.doctor.machine import Finding
from decoupled_diloco.launch.doctor.machine_facts import (
    ClockFacts,
    DiskFacts,
    ModelFacts,
    TorchFacts,
)
from decoupled_diloco.merge import layout_of
from decoupled_diloco.show.console import SteadyConsole
from decoupled_diloco.transport.http_server import HttpServer
from decoupled_diloco.transport.reachability import LookTrouble, Seen
from decoupled_diloco.units import GIB, MIB
from decoupled_diloco.workloads import workload_of

PROJECT = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]


def config_of(**tables: Any) -> RunConfig:
    run = {"max_steps": 10, **tables.pop("run", {})}
    return RunConfig(run=run, **tables)


def model_of(width: int = 4) -> ModelFacts:
    return ModelFacts(
        layout=layout_of(nn.Linear(width, 3)),
        model_bytes=1000,
        gradient_bytes=1000,
        optimizer_bytes=2000,
        fragment_bytes=100,
        fragment_numel=50,
    )


def test_the_oldest_accepted_torch_is_the_required_one() -> None:
    wanted = next(r for r in map(Requirement, PROJECT["dependencies"]) if r.name == "torch")
    assert str(wanted.specifier) == ">=" + ".".join(map(str, machine.TORCH_MIN))


@pytest.mark.parametrize(
    ("facts", "level", "text"),
    [
        (TorchFacts("2.6.0+cpu", None, (), False), "ok", "a CPU build; no GPU"),
        (TorchFacts("2.13.0", "13.0", ("H200",), True), "ok", "built for CUDA 13.0: H200"),
        (TorchFacts("2.13.0", None, (), True), "warning", "this machine has an NVIDIA device"),
        (TorchFacts("2.13.0", "13.0", (), True), "warning", "torch can use no device"),
        (TorchFacts("2.5.1", None, (), False), "error", "2.5.1"),
    ],
)
def test_torch_is_judged_with_the_devices_of_the_machine(
    facts: TorchFacts, level: str, text: str
) -> None:
    finding = machine.judge_torch(facts)
    assert finding.level == level
    assert text in finding.text
    assert bool(finding.advice) == (level != "ok")


def test_learners_that_share_cores_cause_a_warning() -> None:
    assert machine.judge_cores(2.0, 2, 2, 1).level == "ok"
    shared = machine.judge_cores(2.0, 4, 4, 2)
    assert shared.level == "warning"
    assert "2 for 4 learners × 2 threads" in shared.text
    assert "about 4 times as long" in shared.text


def test_more_threads_than_cores_cause_a_warning() -> None:
    assert machine.judge_threads(None, 8, 8.0).level == "ok"
    assert machine.judge_threads("16", 16, 1.5).level == "warning"


def test_the_memory_need_is_the_sum_over_the_processes() -> None:
    model, config = model_of(), config_of(run={"learners": 3}, syncer={"shards": 2})
    numel = model.layout.numel
    need = machine.need_of(model, config, process_bytes=MIB, learners=3, everything=True)
    in_flight = 3 * (100 + 8 * 50)  # two open rounds (τ·P/H), and one more
    checkpoint = 1000 + 2000
    assert need.learner_bytes == MIB + 4000 + 4 * numel + checkpoint + in_flight
    assert need.syncer_bytes == 2 * MIB + 26 * numel + 3 * 3 * 100
    assert need.evaluator_bytes == MIB + 1000 + 4 * numel
    assert need.fork_server_bytes == MIB
    alone = machine.need_of(model, config, process_bytes=MIB, learners=1, everything=False)
    assert alone.total == need.learner_bytes


def test_the_settings_determine_memory_and_disk_space_of_a_learner() -> None:
    model = model_of()
    numel = model.layout.numel
    coarse = config_of(
        sync={"codec": {"uplink": "int4"}}, learner={"checkpoint_interval_seconds": 0.0}
    )
    need = machine.need_of(model, coarse, process_bytes=MIB, learners=1, everything=False)
    plain = machine.need_of(model, config_of(), process_bytes=MIB, learners=1, everything=False)
    assert need.total == plain.total - 3000 + 4 * numel, "a residual, and no checkpoint"
    assert machine.disk_need_of(model, coarse, learners=2, everything=True) == (8 + 24) * numel
    assert machine.disk_need_of(model, config_of(), learners=2, everything=False) == 2 * 2 * 3000
    short = config_of(syncer={"persist": False})
    assert machine.disk_need_of(model, short, learners=0, everything=True) == 8 * numel


@pytest.mark.parametrize(("free", "level"), [(2.0, "ok"), (1.1, "warning"), (0.9, "error")])
def test_short_memory_is_reported(free: float, level: str) -> None:
    need = machine.need_of(model_of(), config_of(), process_bytes=MIB, learners=4, everything=True)
    finding = machine.judge_memory(int(free * need.total), need)
    assert finding.level == level
    assert "4 learners" in finding.text
    assert machine.judge_memory(GIB, None) == Finding("memory", "ok", "1.0 GiB free")


DISK = DiskFacts(Path("/runs"), 100 * GIB, 500.0 * MIB, 0.004)


@pytest.mark.parametrize(
    ("changes", "level"),
    [
        ({}, "ok"),
        ({"free_bytes": 60}, "error"),
        ({"free_bytes": GIB // 2}, "warning"),
        ({"bytes_per_second": 1.0 * MIB}, "warning"),
        ({"sync_seconds": 0.5}, "warning"),
    ],
)
def test_a_disk_needs_free_space_and_speed(changes: dict[str, Any], level: str) -> None:
    finding = machine.judge_disk(replace(DISK, **changes), 120)
    assert finding.level == level
    assert "/runs" in finding.text


def test_a_wall_clock_that_is_not_set_or_jumps_is_reported() -> None:
    assert machine.judge_clock(ClockFacts(0.2001, 0.2, 2026)).level == "ok"
    assert machine.judge_clock(ClockFacts(0.2, 0.2, 1970)).level == "warning"
    assert "+900 %" in machine.judge_clock(ClockFacts(2.0, 0.2, 2026)).text


def test_taken_ports_are_named() -> None:
    assert machine.judge_ports("::", {}).level == "ok"
    assert machine.judge_ports("::", {7070: "", 7071: ""}).level == "ok"
    taken = machine.judge_ports("127.0.0.1", {7070: "", 7071: "Address already in use"})
    assert (taken.level, taken.text) == ("error", "127.0.0.1:7071: Address already in use")


def trouble(step: str, cause: Any) -> Finding:
    return syncer_findings.judge_trouble(LookTrouble(step, cause, "words"), "http://a:1")


def test_each_failure_is_reported_with_a_fix() -> None:
    for cause in ("name", "refused", "unreachable", "timeout"):
        finding = trouble("connect", cause)
        assert (finding.check, finding.level) == ("reach", "error")
        assert finding.advice == syncer_findings.ADVICE[cause]
    assert trouble("run", "token").check == "token"
    assert trouble("health", "silent").check == "health"
    assert trouble("up", "broken").check == "bandwidth"
    assert trouble("run", "older").level == "warning"
    busy = trouble("up", "busy")
    assert (busy.check, busy.level) == ("bandwidth", "warning")
    assert "firewall" not in busy.advice
    assert len({*syncer_findings.ADVICE.values()}) == len(syncer_findings.ADVICE)


def test_the_health_of_a_shard_is_judged() -> None:
    health = {"shard": 0, "run": "x", "phase": "running", "clock": 7, "learners": ["a", "b"]}
    same = syncer_findings.judge_health({**health, "version": "1"}, "1")
    assert same.level == "ok"
    assert same.text == "shard 0 of 'x' is running at step 7, learners: 2; version 1"
    assert syncer_findings.judge_health({**health, "version": "2"}, "1").level == "warning"
    over = syncer_findings.judge_health({**health, "version": "1", "phase": "finished"}, "1")
    assert "start a new one" in over.advice
    assert syncer_findings.judge_health({"shard": 0, "learners": 5}, "1").level == "warning", (
        "trusts nothing"
    )


def test_a_wall_clock_offset_is_reported() -> None:
    assert syncer_findings.judge_offset(-1.2).level == "ok"
    assert "90 s" not in syncer_findings.judge_offset(90.0).text
    assert "1 min 30 s ahead of" in syncer_findings.judge_offset(90.0).text
    assert "5 s behind" in syncer_findings.judge_offset(-5.0).text


def test_uneven_round_trips_are_reported() -> None:
    assert syncer_findings.judge_round_trips((0.05, 0.051, 0.09)).level == "ok"
    assert syncer_findings.judge_round_trips((0.01, 0.011, 0.09)).level == "warning"


def test_the_transfer_of_a_fragment_is_hidden_behind_steps() -> None:
    seen = Seen("http://a:1", round_trips=(0.01, 0.02))
    assert not [*syncer_findings.judge_rates(seen, model_of(), 2)]
    seen.up_bytes_per_second, seen.down_bytes_per_second = 1000.0, 2000.0
    (finding,) = syncer_findings.judge_rates(seen, model_of(), 2)
    assert "up 0.008 Mbit/s, down 0.016 Mbit/s" in finding.text
    # 100 bytes up and down, and two round trips: 0.1 + 0.05 + 0.02 s; overlap: 2 steps.
    hidden = "hidden behind steps of 85 ms or longer"
    assert f"takes 170 ms to the syncer and back, {hidden}" in finding.text
    (bare,) = syncer_findings.judge_rates(seen, None, 0)
    assert bare.text == "up 0.008 Mbit/s, down 0.016 Mbit/s"


def test_a_shard_that_cannot_be_reached_is_named() -> None:
    assert (
        syncer_findings.judge_shards("http://a:1", {"http://a:1": None}).text == "the run has one"
    )
    gone = {"http://a:1": None, "http://a:2": LookTrouble("connect", "refused", "nothing listens")}
    finding = syncer_findings.judge_shards("http://a:1", gone)
    assert finding.level == "error"
    assert "1 of 2" in finding.text
    assert "http://a:2: nothing listens" in finding.text


@pytest.mark.parametrize("named", [None, 5, {"a": 1}, "http://a:1", ["http://[::1", 7]])
async def test_a_foreign_server_may_report_anything_as_addresses(named: object) -> None:
    async def nothing(channel: object) -> None:
        """No learner connects."""

    server = HttpServer(
        on_channel=nothing, health=lambda: {"shard": 0}, about=lambda: {"addresses": named}
    )
    await server.start()
    try:
        seen, shards = await check_all((server.address,), None, 5.0)
    finally:
        await server.stop()
    assert seen.trouble is None
    assert shards.pop(server.address) is None
    assert all(trouble.cause == "name" for trouble in shards.values() if trouble is not None)
    assert len(shards) == (2 if isinstance(named, list) else 0)


def answer_of(config: RunConfig, model: ModelFacts | None) -> dict[str, Any]:
    """Return the answer of a syncer of this run."""
    layout = None if model is None else model.layout.to_json()
    return json.loads(json.dumps({"settings": config.public(), "layout": layout}))


def judged(run: dict[str, Any], config: RunConfig, model: ModelFacts) -> dict[str, Finding]:
    return {finding.check: finding for finding in syncer_findings.judge_run(run, config, model)}


def test_the_same_file_and_model_are_accepted() -> None:
    config, model = config_of(), model_of()
    assert {f.level for f in judged(answer_of(config, model), config, model).values()} == {"ok"}
    assert "has none yet" in judged(answer_of(config, None), config, model)["layout"].text
    other = judged(answer_of(config_of(sync={"sync_every": 48}), model), config, model)
    assert other["settings"].level == "ok", "the syncer tells its learners how to synchronise"


def test_another_model_is_named_by_its_first_differing_tensor() -> None:
    found = judged(answer_of(config_of(), model_of(5)), config_of(), model_of(4))
    assert found["layout"].level == "error"
    assert "'weight'" in found["layout"].text
    assert "(3, 5)" in found["layout"].text


def test_another_workload_is_named() -> None:
    theirs = config_of(run={"learners": 7})
    found = judged(answer_of(theirs, model_of()), config_of(), model_of())
    assert found["settings"].level == "error"
    assert "learners is 4 here and 7 there" in found["settings"].text


@pytest.mark.parametrize("run", [{}, {"settings": 3}, {"settings": {"sync": {}}}])
def test_an_invalid_answer_is_reported(run: dict[str, Any]) -> None:
    (finding,) = syncer_findings.judge_run(run, config_of(), model_of())
    assert (finding.check, finding.level) == ("settings", "error")


def test_an_invalid_layout_is_reported() -> None:
    assert syncer_findings.judge_layout(model_of().layout, {"tensors": 5}).level == "error"


def test_the_model_of_a_file_is_described() -> None:
    options = {"layers": 1, "width": 32, "heads": 2, "context": 16}
    config = config_of(sync={"fragments": 4}, workload={"name": "gpt", "options": options})
    model = machine_facts.model_facts(config, workload_of(config))
    assert model.model_bytes == model.gradient_bytes == 4 * model.layout.numel
    assert model.optimizer_bytes == 2 * model.model_bytes, "AdamW"
    assert model.fragment_bytes == 2 * model.fragment_numel, "bf16"
    assert model.layout.numel / 4 <= model.fragment_numel < model.layout.numel
    options["optimizer"] = "sgd"
    plain = config_of(sync={"fragments": 4}, workload={"name": "gpt", "options": options})
    assert machine_facts.model_facts(plain, workload_of(plain)).optimizer_bytes == 0


def test_this_machine_has_cores_memory_and_a_disk(tmp_path: Path) -> None:
    assert machine_facts.cores() > 0
    assert machine_facts.process_bytes() > 10 * MIB
    assert machine_facts.memory_available() > 0
    disk = machine_facts.disk_facts(tmp_path / "not" / "yet")
    assert disk.folder == tmp_path
    assert disk.bytes_per_second > 0
    assert not [*tmp_path.iterdir()], "nothing is left behind"
    assert machine_facts.torch_facts().version == torch.__version__


def test_a_folder_that_cannot_be_written_is_reported() -> None:
    with pytest.raises(StorageError, match="/proc cannot be written"):
        machine_facts.disk_facts(Path("/proc/run"))


def test_a_hanging_check_is_abandoned_and_a_failed_one_is_reported() -> None:
    hang = threading.Event()
    with pytest.raises(TimeoutError):
        limited(0.05, hang.wait)
    hang.set()
    with pytest.raises(ZeroDivisionError):
        limited(1.0, lambda: 1 // 0)
    assert limited(1.0, lambda: None) is None


FINDINGS = [
    Finding("python", "ok", "3.12"),
    Finding("wall clock", "warning", "far " * 40, "set it"),
    Finding("reach", "error", "http://a-very-long-name.example/" + "x" * 90, "correct it"),
]


def test_lines_fit_80_columns_without_broken_words() -> None:
    text = io.StringIO()
    assert command._print(FINDINGS, SteadyConsole(file=text, width=80)) == 1
    lines = text.getvalue().splitlines()
    assert all(len(line) <= 80 for line in lines if "xxx" not in line)
    assert "x" * 90 in text.getvalue()
    assert "→ set it" in text.getvalue()
    assert lines[-1] == "1 error, 1 warning"
    assert not any(line != line.rstrip() for line in lines)


def test_a_warning_is_not_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    assert command._print(FINDINGS[:2], SteadyConsole(file=io.StringIO(), width=80)) == 0
    assert command._print_json(FINDINGS[:2]) == 0
    assert command._print_json(FINDINGS) == 1
    first = json.loads(capsys.readouterr().out.partition("]\n")[0] + "]")[0]
    assert first == {"check": "python", "level": "ok", "text": "3.12", "advice": ""}
