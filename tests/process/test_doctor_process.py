"""`ddiloco doctor` as a process, against real syncers on loopback, and without a syncer."""

from __future__ import annotations

import json
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest

from free_ports import free_ports
from process.process_runs import (
    STEP_SECONDS_MAX,
    command,
    config_file,
    config_of,
    health,
    local_run,
    pause,
    records,
    stopped_at_exit,
    until,
    wait,
    when,
)
from replay_check import assert_replays

SECONDS_MAX = 60.0
"""The doctor's own limit of 15 seconds, and the start of Python and torch on a busy machine."""

Findings = dict[str, dict[str, str]]


def start(*arguments: str) -> subprocess.Popen[str]:
    return command("doctor", "--json", *arguments)


def result(process: subprocess.Popen[str]) -> tuple[int, Findings]:
    """Return the exit code, and the findings by check."""
    output, _ = process.communicate(timeout=SECONDS_MAX)
    assert "Traceback" not in output
    found = {each["check"]: each for each in json.loads(output)}
    assert all(bool(each["advice"]) == (each["level"] != "ok") for each in found.values())
    return process.returncode, found


def examined(*arguments: str) -> tuple[int, Findings]:
    with stopped_at_exit(start(*arguments)) as process:
        return result(process)


def errors(found: Findings) -> set[str]:
    return {check for check, each in found.items() if each["level"] == "error"}


@dataclass
class Syncer:
    """Two shards that listen and wait for learners."""

    file: Path
    address: str
    token_file: Path


@contextmanager
def serving(file: Path, *ports: int) -> Iterator[None]:
    """Run `ddiloco syncer` and its shards until the block ends."""
    with stopped_at_exit(command("syncer", str(file))) as process:
        for port in ports:
            until(lambda port=port: health(f"http://127.0.0.1:{port}"), "it listens")
        yield
        process.terminate()
        process.communicate(timeout=240)


@pytest.fixture(scope="module")
def syncer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Syncer]:
    folder = tmp_path_factory.mktemp("doctor") / "run"
    secret = folder.parent / "secret"
    secret.write_text("hunter2\n")
    port = _two_ports()
    file = config_file(folder, syncer={"shards": 2, "port": port, "token_file": secret})
    with serving(file, port, port + 1):
        yield Syncer(file, f"http://127.0.0.1:{port}", secret)


def _two_ports() -> int:
    """Return the first of two consecutive free ports."""
    while True:
        (port,) = free_ports(1)
        with ExitStack() as stack:
            try:
                for each in (port, port + 1):
                    stack.enter_context(socket.create_server(("127.0.0.1", each)))
            except OSError:
                continue
            return port


@pytest.mark.smoke
def test_a_syncer_that_waits_for_learners_is_fine(syncer: Syncer) -> None:
    code, found = examined(str(syncer.file), "--syncer", syncer.address)
    assert (code, errors(found)) == (0, set()), found
    assert "shard 0 of 'small' is empty" in found["health"]["text"]
    assert found["token"]["text"] == "accepted: it is the run's shared secret"
    assert found["control"]["level"] == found["bandwidth"]["level"] == "ok"
    assert "hidden behind steps" in found["bandwidth"]["text"]
    assert found["shards"]["text"] == "all 2 can be reached"
    assert found["settings"]["level"] == "ok"
    assert "has none yet" in found["layout"]["text"]
    assert health(syncer.address)["learners"] == []


@pytest.mark.smoke
def test_a_wrong_auth_token_is_reported(syncer: Syncer, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("wrong")
    token = ("--auth-token-file", str(tmp_path / "token"))
    code, found = examined("--syncer", syncer.address, *token)
    assert (code, errors(found)) == (1, {"token"})
    assert "the token does not belong to this run" in found["token"]["text"]
    assert "--auth-token-file" in found["token"]["advice"]
    assert found["reach"]["level"] == "ok"
    assert "bandwidth" not in found


@pytest.mark.smoke
def test_the_ports_of_a_running_syncer_are_in_use(syncer: Syncer) -> None:
    code, found = examined(str(syncer.file))
    assert (code, errors(found)) == (1, {"ports"})
    assert "Address already in use" in found["ports"]["text"]


def test_a_server_that_does_not_answer_is_reported(tmp_path: Path) -> None:
    """Nothing listens; a server accepts and sends nothing; another program answers."""
    with ExitStack() as stack:
        hung = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        other = ["-m", "http.server", "--bind", "127.0.0.1", "--directory", str(tmp_path)]
        (port,) = free_ports(1)
        server = subprocess.Popen(
            ["python3", *other, str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        stack.callback(server.wait)
        stack.callback(server.kill)
        until(lambda: _listens(port), "the other server listens")
        (empty,) = free_ports(1)
        ports = {"refused": empty, "silent": hung.getsockname()[1], "stranger": port}
        processes = {
            name: stack.enter_context(
                stopped_at_exit(start("--syncer", f"http://127.0.0.1:{number}"))
            )
            for name, number in ports.items()
        }
        tls = stack.enter_context(stopped_at_exit(start("--syncer", f"https://127.0.0.1:{port}")))
        found = {}
        for name, process in processes.items():
            code, found[name] = result(process)
            assert code == 1
        _, found["tls"] = result(tls)
    assert errors(found["refused"]) == {"reach"}
    assert f"nothing listens on 127.0.0.1:{empty}" in found["refused"]["reach"]["text"]
    assert "start the syncer there" in found["refused"]["reach"]["advice"]
    assert errors(found["silent"]) == {"health"}
    assert "no answer within 3 s" in found["silent"]["health"]["text"]
    assert errors(found["stranger"]) == {"health"}
    assert "status 404" in found["stranger"]["health"]["text"]
    assert errors(found["tls"]) == {"health"}
    assert "write http:// for a syncer without TLS" in found["tls"]["health"]["advice"]


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


def test_the_doctor_does_not_disturb_training(tmp_path: Path) -> None:
    """One with the run's file and one with a wider model; learners notice neither."""
    folder = tmp_path / "run"
    wider = config_file(tmp_path / "wider", workload={"width": 48, "step_seconds": 0.1})
    config = config_of(folder, run={"max_steps": 2000}, workload={"step_seconds": 0.1})
    results: dict[str, tuple[int, Findings]] = {}
    times: dict[str, float] = {}

    def script() -> Iterator[None]:
        yield from when(lambda: run.used_budget() > 0.02)
        times["begin"] = time.time()
        for name, file in (("same", folder / "run.toml"), ("wider", wider)):
            arguments = ("--syncer", run.addresses[0], "--auth-token-file", str(folder / "token"))
            for _ in range(3):
                with stopped_at_exit(start(str(file), *arguments)) as process:
                    yield from when(lambda process=process: process.poll() is not None)
                    results[name] = result(process)
                # On a busy machine, the doctor skips a model that takes seconds to build.
                if "layout" in results[name][1]:
                    break
        times["end"] = time.time()
        yield from pause(1.0)
        raise Enough

    with local_run(config) as run:
        run.start()
        with pytest.raises(Enough):
            wait(run, script())
    code, found = results["same"]
    assert (code, errors(found)) == (0, set()), found
    assert "learners: 2" in found["health"]["text"]
    assert "the model is the same as the run's" in found["layout"]["text"]
    code, found = results["wider"]
    assert (code, errors(found)) == (1, {"settings", "layout"}), found
    assert "'embedding.weight'" in found["layout"]["text"]
    for name in ("learner-0", "learner-1"):
        own = records(folder, name)
        assert [r.data["header"]["epoch"] for r in own if r.kind == "start"] == [1]
        steps = [r for r in own if r.type == "StepFinished"]
        during = [b.at - a.at for a, b in pairwise(steps) if times["begin"] < a.wall < times["end"]]
        assert len(during) > 20
        assert max(during) < STEP_SECONDS_MAX
    shard = records(folder, "shard-0")
    assert not [r for r in shard if r.type in ("Evict", "Lost") and r.wall < times["end"]]
    admitted = [r for r in records(folder, "coordinator") if r.type == "Connected"]
    assert {r.data["peer"] for r in admitted if r.data["greeting"]["type"] == "Joining"} == {
        "learner-0",
        "learner-1",
    }
    assert_replays(folder)


def test_a_separate_secret_is_enough(tmp_path: Path) -> None:
    """With a secret per name, the doctor finds the name of its own, and is not taken for that
    learner.
    """
    folder, own = tmp_path / "run", tmp_path / "own"
    own.write_text("two")
    principals = tmp_path / "principals.toml"
    principals.write_text('learner-0 = "one"\nlearner-1 = "two"\n')
    (port,) = free_ports(1)
    file = config_file(folder, syncer={"port": port, "principals_file": principals})
    address = f"http://127.0.0.1:{port}"
    with serving(file, port):
        code, found = examined("--syncer", address, "--auth-token-file", str(own))
    assert (code, errors(found)) == (0, set()), found
    assert found["token"]["text"] == "accepted: it is the token of learner-1"
    assert found["bandwidth"]["level"] == "ok"


class Enough(Exception):
    """The test has its result; the run need not end."""


ENDLESS = """
import torch

class Endless:
    def __init__(self, options): ...
    def model(self):
        while True:
            torch.nn.Linear(1000, 1000)
    def optimizer(self, model): ...
    def batches(self, part, parts, start=0): ...
    def loss(self, model, batch): ...
    def tokens(self, batch): ...
    def schedule(self, step): return 1.0
    def evaluate(self, model): return {}
    def sample(self, model, prompt="", length=0): ...
    def describe(self): return {}
"""


def test_the_doctor_does_not_wait_for_a_model_that_is_never_built(tmp_path: Path) -> None:
    (tmp_path / "endless_model_of_a_test.py").write_text(ENDLESS)
    run = tmp_path / "run.toml"
    run.write_text(
        "[run]\nmax_steps = 8\n[syncer]\nport = 0\n"
        '[workload]\nname = "endless_model_of_a_test:Endless"\n'
    )
    with stopped_at_exit(command("doctor", "--json", str(run), cwd=tmp_path)) as process:
        code, found = result(process)
    assert (code, errors(found)) == (0, set()), found
    assert found["model"]["text"] == "endless_model_of_a_test:Endless is not built within 6 s"
