"""Syncer and learners that are started one by one, as on several machines; and a full disk."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
import torch
from torch import Tensor

from decoupled_diloco.errors import AccessError, ConfigError
from decoupled_diloco.launch.local import LocalRun
from decoupled_diloco.run_model import read_run
from decoupled_diloco.storage.weight_files import load_weights
from decoupled_diloco.transport.http_client import HttpClient
from free_ports import free_ports
from process.process_runs import (
    PATIENCE,
    command,
    config_file,
    config_of,
    health,
    local_run,
    orphans,
    records,
    stopped_at_exit,
    until,
    wait,
    when,
)
from replay_check import assert_replays

EXAMPLE = Path(__file__).parents[2] / "examples" / "train.py"


def ended(process: subprocess.Popen[str], seconds: float = 60.0) -> str:
    """Return the output of a process that must end successfully within this time."""
    output, _ = process.communicate(timeout=PATIENCE * seconds)
    assert process.returncode == 0, output
    return output


def example(address: str, token_file: str, name: str) -> subprocess.Popen[str]:
    """Start the example as a process."""
    return subprocess.Popen(
        [
            *(sys.executable, str(EXAMPLE), "--syncer", address),
            *("--auth-token-file", token_file, "--name", name),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def test_the_example_trains_against_a_syncer(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    # A quorum of both: one alone would reach the budget before the other one has joined.
    sync = {"quorum": 2}
    file = config_file(folder, run={"max_steps": 120}, syncer={"shards": 2}, sync=sync)
    with ExitStack() as stack:
        syncer = stack.enter_context(stopped_at_exit(command("syncer", str(file))))
        assert syncer.stdout is not None
        addresses = syncer.stdout.readline().split(": ")[1].strip().split(", ")
        token_file = syncer.stdout.readline().split(": ")[1].strip()
        assert Path(token_file) == folder / "token"
        assert Path(token_file).stat().st_mode & 0o077 == 0, "no other user may read the secret"
        learners = [
            stack.enter_context(stopped_at_exit(example(addresses[1], token_file, name)))
            for name in ("a", "b")
        ]
        outputs = [ended(learner) for learner in learners]
        output = ended(syncer, 30.0)
    for name, text in zip("ab", outputs, strict=True):
        assert f"{name}: " in text
        assert "the model holds the run's final weights" in text
    for name in ("a", "b"):
        assert output.count(f"{name} joined") == output.count(f"{name} is done") == 1, output
    assert re.search(r"step \d+/120, ", output), "the learner's progress is shown"
    assert f"the budget is spent; {folder / 'weights.safetensors'}" in output
    assert re.search(r"tokens +[\d.]+M, [\d.]+[kM]/s", output), (
        "both learners print the same summary"
    )
    assert re.search(r"^a +\d\d+ +[\d.]+M +\d\.\d\d\d +\d", output, re.MULTILINE), output
    page = (folder / "report.html").read_text()
    assert "2 learners, 2 syncer shards" in page
    assert "The tapes of a and b are on other machines" in page
    weights = load_weights(folder / "weights.safetensors")
    assert weights["0.weight"].shape == (256, 16)
    assert_replays(folder)


@pytest.mark.parametrize(
    "mistake",
    ["address", "no file", "wrong token", "no syncer"],
)
def test_the_example_reports_a_mistake_in_one_line(tmp_path: Path, mistake: str) -> None:
    folder, secret = tmp_path / "run", tmp_path / "secret"
    secret.write_text("guessed\n")
    with ExitStack() as stack:
        address = f"http://127.0.0.1:{free_ports(1)[0]}"
        if mistake == "wrong token":
            file = str(config_file(folder))
            syncer = stack.enter_context(stopped_at_exit(command("syncer", file)))
            assert syncer.stdout is not None
            address = syncer.stdout.readline().split(": ")[1].strip()
        if mistake == "address":
            address = address.removeprefix("http://")
        file = str(tmp_path / "none" if mistake == "no file" else secret)
        learner = stack.enter_context(stopped_at_exit(example(address, file, "a")))
        if mistake == "no syncer":
            assert learner.stdout is not None
            line = learner.stdout.readline()
            assert f"cannot reach {address}: Connection refused" in line
            learner.send_signal(signal.SIGINT)
        output, _ = learner.communicate(timeout=240)
        if mistake == "wrong token":
            os.killpg(syncer.pid, signal.SIGINT)
            syncer.communicate(timeout=240)
    assert "Traceback" not in output
    assert learner.returncode == (130 if mistake == "no syncer" else 1), output
    if mistake != "no syncer":
        sentence = {
            "address": "is not a URL: write it as",
            "no file": "No such file",
            "wrong token": "the token does not belong to this run: a syncer that started a new",
        }[mistake]
        assert output.startswith("error: "), output
        assert sentence in output


def test_a_learner_that_is_stopped_does_not_hold_the_shards(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    file = config_file(folder, run={"max_steps": 100_000}, syncer={"shards": 2})
    with ExitStack() as stack:
        syncer = stack.enter_context(stopped_at_exit(command("syncer", str(file))))
        assert syncer.stdout is not None
        address = syncer.stdout.readline().split(": ")[1].strip().split(", ")[0]
        learner = example(address, str(folder / "token"), "a")
        stack.enter_context(stopped_at_exit(learner))
        until(lambda: health(address).get("clock", 0) > 20, "the run is under way")
        learner.send_signal(signal.SIGSTOP)
        os.killpg(syncer.pid, signal.SIGINT)
        output, _ = syncer.communicate(timeout=240)
    assert syncer.returncode == 130, output
    assert "killing it" not in output
    assert f"ddiloco export {folder} writes the current weights" in output
    assert f"to continue the run: ddiloco syncer --resume {folder}" in output
    assert "1 learner, 2 syncer shards" in (folder / "report.html").read_text()
    ends = [r for r in records(folder, "launcher") if r.type == "ProcessEnded"]
    assert [r.data["signal"] for r in ends] == [None, None], "no shard was killed"


def exported(folder: Path, out: Path) -> dict[str, Tensor]:
    """Return the weights that ``ddiloco export`` finds in a run folder."""
    told = ended(command("export", str(folder), "--out", str(out)))
    assert f"load_file('{out}/model.safetensors')" in told
    return load_weights(out / "model.safetensors")


def test_a_run_continues_with_a_syncer_that_is_restarted_after_a_kill(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    file = str(config_file(folder, run={"max_steps": 100_000}))
    with ExitStack() as stack:
        syncer = stack.enter_context(stopped_at_exit(command("syncer", file)))
        assert syncer.stdout is not None
        address = syncer.stdout.readline().split(": ")[1].strip()
        secret = (folder / "token").read_text()
        stack.enter_context(stopped_at_exit(example(address, str(folder / "token"), "a")))
        until(lambda: health(address).get("clock", 0) > 5, "the run is under way")
        now = exported(folder, tmp_path / "now")
        syncer.kill()
        until(lambda: not orphans(folder), "its shards have ended")
        later = exported(folder, tmp_path / "later")
        assert later["0.weight"].shape == (256, 16)
        assert not torch.equal(now["0.weight"], later["0.weight"])
        again = stack.enter_context(stopped_at_exit(command("syncer", file)))
        output, _ = again.communicate(timeout=240)
        assert again.returncode == 2, output
        assert f"has not ended: resume it with ddiloco syncer --resume {folder}" in output
        assert "move it aside with --new and start a new run" in output
        assert (folder / "token").read_text() == secret
        assert not folder.with_name("run.1").exists()
        new = stack.enter_context(stopped_at_exit(command("syncer", file, "--new")))
        assert new.stdout is not None
        assert new.stdout.readline().startswith("syncer of small: ")
        assert (folder / "token").read_text() != secret
        assert (folder.with_name("run.1") / "token").read_text() == secret
        os.killpg(new.pid, signal.SIGINT)
        new.communicate(timeout=240)


def test_the_options_of_a_syncer_apply_to_all_its_shards(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("hunter2\n")
    port = free_ports(1)[0]
    file = str(config_file(tmp_path / "run", run={"learners": 1, "max_steps": 5}))
    told = f"http://localhost:{port}"
    options = ["--port", str(port), "--addresses", told, "--auth-token-file", str(secret)]
    with ExitStack() as stack:
        syncer = stack.enter_context(stopped_at_exit(command("syncer", file, *options)))
        assert syncer.stdout is not None
        assert syncer.stdout.readline().strip() == f"syncer of small: {told}"
        assert syncer.stdout.readline().strip() == f"auth token: {secret}"
        until(lambda: health(f"http://127.0.0.1:{port}"), "it listens on the port that was given")
        arguments = [
            "learner",
            file,
            "--index",
            "0",
            "--syncer",
            told,
            "--auth-token-file",
            str(secret),
        ]
        ended(stack.enter_context(stopped_at_exit(command(*arguments))))
        ended(syncer)


@pytest.mark.smoke
def test_every_name_has_a_separate_secret(tmp_path: Path) -> None:
    folder, principals = tmp_path / "run", tmp_path / "principals"
    names = ["learner-0", "learner-1", "shard-1", "evaluator"]
    principals.write_text("".join(f'{name} = "of {name}"\n' for name in names))
    tables = {"run": {"evaluator": True}, "syncer": {"shards": 2, "principals_file": principals}}
    told: list[str] = []

    async def knock(address: str, name: str, secret: str) -> None:
        client = HttpClient(token=secret)
        try:
            await client.connect(address, "learner", name)
        finally:
            await client.close()

    def script(run: LocalRun) -> Iterator[None]:
        yield from when(lambda: health(run.addresses[0]).get("phase") == "running")
        for name, secret in (("learner-1", "of learner-0"), ("learner-0", "guessed")):
            with pytest.raises(AccessError) as caught:
                asyncio.run(knock(run.addresses[0], name, secret))
            told.append(str(caught.value))

    with local_run(config_of(folder, **tables)) as run:
        assert not (folder / "token").exists()
        run.start()
        outcome = wait(run, script(run))
    assert outcome.finished, outcome.reason
    assert "this token belongs to 'learner-0', not to 'learner-1': use your own token" in told[0]
    assert "the token is unknown to this run" in told[1]
    tables["run"]["learners"] = 3
    with pytest.raises(ConfigError, match="has no secret for 'learner-2': add a line"):
        LocalRun(config_of(tmp_path / "other", **tables))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["syncer", "--addresses", "http://a:1,http://b:2"], "has 2 entries, but shards=1"),
        (["syncer", "--shard", "0"], "port=0 picks a free port, so no learner would find this"),
        (["syncer", "--shard", "1", "--port", "9"], "--shard 1 is out of range: 0 to 0"),
        (
            ["syncer", "--shard", "0", "--port", "9", "--set", "syncer.shards=2"],
            "so processes would not find it: give the addresses of all shards with --addresses",
        ),
        (
            ["learner", "--index", "0"],
            "no process knows where the shards are: pass their addresses",
        ),
    ],
)
def test_invalid_combinations_of_options_are_rejected(
    tmp_path: Path, arguments: list[str], sentence: str
) -> None:
    file = str(config_file(tmp_path / "run"))
    process = command(arguments[0], file, *arguments[1:])
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 2, output
    assert sentence in output


def test_every_process_can_be_started_by_hand(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    ports = free_ports(2)
    addresses = [f"http://127.0.0.1:{port}" for port in ports]
    file = str(config_file(folder, run={"max_steps": 60}, syncer={"shards": 2}))
    joined = ["--addresses", ",".join(addresses)]
    with ExitStack() as stack:

        def start(*arguments: str) -> subprocess.Popen[str]:
            return stack.enter_context(stopped_at_exit(command(*arguments)))

        def shard(number: int, *more: str) -> subprocess.Popen[str]:
            where = ["--shard", str(number), "--port", str(ports[number])]
            return start("syncer", file, *where, *joined, *more)

        def refused(process: subprocess.Popen[str], code: int, text: str) -> None:
            output, _ = process.communicate(timeout=240)
            assert process.returncode == code, output
            assert text in output

        other = ["--set", "sync.sync_every=8", "--set", f"run.folder={tmp_path / 'other'}"]
        # The shard that does not host the coordinator starts first.
        shards = [shard(1)]
        until(lambda: health(addresses[1]), "shard 1 listens")
        refused(shard(1, *other), 4, f"cannot listen on 127.0.0.1:{ports[1]}")
        fixed = [
            "--set",
            "data.elastic=false",
            "--set",
            "data.partitions=",
            "--set",
            "data.prefetch=",
        ]
        wrong = start("learner", file, "--index", "7", "--syncer", addresses[1], *fixed)
        refused(wrong, 2, "index=7 is not a learner of this run: use 0 to 1")
        shards.append(shard(0))
        until(lambda: health(addresses[1]).get("phase") == "empty", "the shards have met")
        ports[1] = free_ports(1)[0]
        refused(
            shard(1, *other), 2, "other settings than shard 0: sync.sync_every is 4 here and 8 th"
        )
        first = start("learner", file, "--index", "0", "--syncer", addresses[1])
        second = start("learner", file, "--index", "1", "--syncer", addresses[0])
        for process in (first, second, *shards):
            ended(process)
    assert (folder / "checkpoints" / "shard-0.safetensors").exists()
    assert (folder / "checkpoints" / "shard-1.safetensors").exists()
    assert_replays(folder)


@pytest.mark.smoke
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a file system of 64 KiB")
def test_training_continues_when_the_disk_of_the_tape_is_full(tmp_path: Path) -> None:
    """One learner is behind a relay, whose tape fills, too."""
    folder = tmp_path / "run"
    sites = [{"name": "site-a", "learners": [1]}]
    config = config_of(folder, run={"max_steps": 120}, sites=sites)
    tape = str(folder / "tape")
    mounted = False
    with ExitStack() as stack, local_run(config) as run:
        mounted = not subprocess.call(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", tape])
        if not mounted:
            pytest.skip("this machine does not let root mount a tmpfs")
        stack.callback(subprocess.check_call, ["umount", "-l", tape])
        run.start()

        def script() -> Iterator[None]:
            yield from when(lambda: os.statvfs(tape).f_bavail == 0)

        outcome = wait(run, script())
        assert outcome.finished, outcome.reason
        assert os.statvfs(tape).f_bavail == 0, "the test did not fill the disk"
    assert outcome.weights is not None
    assert load_weights(outcome.weights)
    said = {path.stem: path.read_text() for path in (folder / "logs").glob("*.log")}
    assert "No space left on device: its records wait in memory" in said["learner-0"]
    for name in ("learner-0", "learner-1", "shard-0", "relay-site-a"):
        assert "Traceback" not in said[name]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a file system of 64 KiB")
def test_a_disk_that_was_full_for_a_moment_costs_no_record(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    config = config_of(folder, run={"max_steps": 120})
    tape = str(folder / "tape")
    with ExitStack() as stack, local_run(config) as run:
        if subprocess.call(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", tape]):
            pytest.skip("this machine does not let root mount a tmpfs")
        stack.callback(subprocess.check_call, ["umount", "-l", tape])
        run.start()
        filler = Path(tape) / "filler"

        def script() -> Iterator[None]:
            yield from when(lambda: (run.followed.poll(), run.followed.run.global_step > 20)[1])
            with suppress(OSError), filler.open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(4096))
            waits = "No space left on device: its records wait in memory"
            log = folder / "logs" / "learner-0.log"
            yield from when(lambda: waits in log.read_text())
            filler.unlink()

        outcome = wait(run, script())
        assert outcome.finished, outcome.reason
        model = read_run(folder)
        assert not model.problems
        assert model.global_step >= 120
        assert all(log.left for log in model.learners.values()), (
            "the last records are on the tape too"
        )
