"""Real processes over TLS: certificates of the command line, renewed while a learner is away."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import encrypted
from decoupled_diloco.errors import AccessError, ConfigError
from decoupled_diloco.launch.local import LocalRun
from decoupled_diloco.transport.fetch import fetch
from decoupled_diloco.transport.tls import TLSConfig
from free_ports import free_ports
from process.process_runs import (
    command,
    config_file,
    config_of,
    local_run,
    logs,
    records,
    stopped_at_exit,
    until,
    wait,
)
from replay_check import assert_replays


def ddiloco(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    return subprocess.run(
        [sys.executable, "-m", "decoupled_diloco.cli", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=240,
    )


def certificates(folder: Path, *arguments: str) -> str:
    what, *more = arguments
    done = ddiloco("certs", what, str(folder), *more)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "tls"
    certificates(path, "create-ca", "--valid-days", "3")
    certificates(path, "add", "learner-0", "learner-1", "evaluator", "--valid-days", "3")
    return path


def options(folder: Path, name: str) -> list[str]:
    return [
        *("--ca-cert", f"{folder}/authority.pem"),
        *("--cert", f"{folder}/{name}.pem", "--key", f"{folder}/{name}.key"),
    ]


def steps(run: LocalRun) -> int:
    run.followed.poll()
    return run.followed.run.global_step


def log(run: LocalRun, name: str) -> str:
    return (run.path / "logs" / f"{name}.log").read_text()


@pytest.mark.smoke
def test_a_learner_returns_and_certificates_are_renewed(folder: Path, tmp_path: Path) -> None:
    """Mutual TLS without an auth token: killed, back, cut off, renewed, to the budget's end."""
    config = config_of(
        tmp_path / "run",
        run={"max_steps": 400},
        syncer={"shards": 2},
        tls=encrypted.tables(folder),
    )

    def script(run: LocalRun) -> Iterator[None]:
        while run.global_step < 20:
            yield
        assert all(address.startswith("https://") for address in run.addresses)
        assert run.secret_file is None
        assert not (run.path / "token").exists()
        for name, file in (("shard-0", "syncer"), ("shard-1", "syncer"), ("learner-0",) * 2):
            assert f"{folder}/{file}.pem expires in 72 hours: renew it" in log(run, name)
        certificates(folder, "renew", "--valid-days", "90")
        for name in (
            "learner-0",
            "shard-1",
        ):  # The shard connects to the coordinator, and learners connect to the shard.
            child, process = (children := run.supervisor.children)[name], children[name].process
            run.supervisor.kill(name, restart=True)
            while child.process in (None, process):
                yield
        back = run.global_step + 20
        while run.global_step < back:
            yield
        tls = TLSConfig(*options(folder, "learner-0")[1::2])
        for address in run.addresses:
            assert b"shards" in fetch(address, "/tape", {}, None, tls).body

    with local_run(config) as run:
        run.start()
        outcome = wait(run, script(run))
        assert outcome.finished, (outcome.reason, logs(run.path))
        assert "new certificates" in log(run, "shard-0")
        assert log(run, "learner-0").count(".pem expires in") == 1, (
            "the renewed one does not expire soon"
        )
    assert_replays(run.path)


ENDLESS = {"max_steps": 100_000}


def test_commands_connect_with_a_certificate_and_report_what_is_missing(
    folder: Path, tmp_path: Path
) -> None:
    config = config_of(tmp_path / "run", run=ENDLESS, tls=encrypted.tables(folder))
    with local_run(config) as run:
        run.start()
        until(lambda: steps(run) > 2, "a few steps")
        _readers(run.addresses[0], folder)
        done = ddiloco(
            "checkpoint", str(run.path)
        )  # it presents the certificate that the run's settings name
        assert done.returncode == 0, (done.stdout, done.stderr)
        assert "checkpoint 2 of the whole run" in done.stdout


def test_a_supervised_learner_finds_an_encrypted_run_by_its_folder(
    folder: Path, tmp_path: Path
) -> None:
    """Its files are given by hand, also to the restarted process."""
    tls = encrypted.tables(folder)
    config = config_of(
        tmp_path / "run", run={"max_steps": 400, "learners": 1}, sync={"quorum": 1}, tls=tls
    )
    own = config_file(tmp_path / "own", run={"max_steps": 400, "learners": 1})
    with local_run(config) as run:
        run.start()
        run.wait_for_shards()
        run.supervisor.take_down("learner-0")
        where = ["--index", "0", "--syncer", str(run.path), "--supervised"]
        with stopped_at_exit(command("learner", str(own), *where, *options(folder, "learner-0"))):
            own_log = tmp_path / "own/logs/learner-0.log"
            until(
                lambda: own_log.exists() and "learner-0 joined" in own_log.read_text(),
                "it joins",
                60,
            )
            (number,) = [
                record.data["pid"]
                for record in records(tmp_path / "own", "launcher.learner-0")
                if record.type == "ProcessStarted"
            ]
            before = steps(run)
            os.kill(number, signal.SIGKILL)
            until(lambda: own_log.read_text().count("learner-0 joined") == 2, "it is back", 60)
            until(lambda: steps(run) > before + 10, "the run goes on", 60)


def test_chaos_injects_faults_into_an_encrypted_run(folder: Path, tmp_path: Path) -> None:
    file = config_file(
        tmp_path / "run",
        run={"max_steps": 200},
        sync={"quorum": 1},
        tls=encrypted.tables(folder),
    )
    story = tmp_path / "story.toml"
    event = '[[events]]\nkind = "kill"\ntarget = "{}"\nat_seconds = {}\nfor_seconds = 0.5\n'
    story.write_text(event.format("learner-1", 1.0) + event.format("shard-0", 2.0))
    least = ("--accepted-min=0", "--participation-min=0", "--set", f"run.folder={tmp_path}/run")
    done = ddiloco("chaos", str(file), str(story), *least)
    assert "2 × kill" in done.stdout, (done.stdout, done.stderr)
    assert (tmp_path / "run" / "weights.safetensors").exists()
    assert_replays(tmp_path / "run")


def test_the_page_reads_encrypted_shards_elsewhere(folder: Path, tmp_path: Path) -> None:
    """Each shard has a separate folder: shard 0's page requests the other shards' tapes."""
    ports = free_ports(2)
    told = ",".join(f"https://127.0.0.1:{port}" for port in ports)
    tables: dict[str, Any] = {"run": ENDLESS, "tls": encrypted.tables(folder)}
    tables["syncer"] = {"shards": 2}
    context = TLSConfig(*options(folder, "learner-1")[1::2]).new_context()
    with ExitStack() as stack:
        for shard, port in enumerate(ports):
            file = config_file(tmp_path / f"shard-{shard}", **tables)
            where = ["--shard", str(shard), "--port", str(port), "--addresses", told]
            stack.enter_context(stopped_at_exit(command("syncer", str(file), *where)))
        file = config_file(tmp_path / "learners", **tables)
        for index in (0, 1):
            dialled = ["--index", str(index), "--syncer", told]
            stack.enter_context(stopped_at_exit(command("learner", str(file), *dialled)))
        until(lambda: Path(tmp_path / "shard-0/tape/shard-0.jsonl").exists(), "it begins")
        until(lambda: merged(ports[0], context) == {"shard-0", "shard-1"}, "both are told", 60)


def merged(port: int, context: ssl.SSLContext) -> set[str]:
    """Return the shards whose rounds are in the page's first state."""
    connection = http.client.HTTPSConnection("127.0.0.1", port, context=context, timeout=10)
    with contextlib.suppress(OSError, http.client.HTTPException), contextlib.closing(connection):
        connection.request("GET", "/page/events")
        for line in connection.getresponse():
            if line.startswith(b"data: "):
                return {each["shard"] for each in json.loads(line[6:])["recent"]}
    return set()


def _readers(address: str, folder: Path) -> None:
    for name in ("status", "checkpoint", "doctor"):
        where = ["--syncer", address] if name == "doctor" else [address]
        done = ddiloco(name, *where, *options(folder, "learner-1"))
        assert done.returncode == 0, (done.stdout, done.stderr)
        if name == "doctor":
            assert "expires in 3.0 days" in done.stdout
            assert "it is the token of learner-1" in done.stdout
    trusting = ["--ca-cert", f"{folder}/authority.pem"]
    for given, code, words in (
        ([address, *trusting], 5, "requires a certificate"),
        ([address], 5, "not signed by a CA that is trusted here"),
        ([address.replace("https", "http")], 5, "uses TLS: write https://"),
        ([address.replace("https", "http"), *trusting], 2, "would be ignored"),
    ):
        done = ddiloco("status", *given)
        assert (done.returncode, words in done.stderr) == (code, True), done.stderr


def test_a_learner_that_trusts_another_ca_ends_with_an_error(folder: Path, tmp_path: Path) -> None:
    """It would be rejected forever, so it does not try forever."""
    other = encrypted.made(tmp_path / "other")
    file = config_file(tmp_path / "run", tls=encrypted.tables(folder))
    config = config_of(tmp_path / "run", run=ENDLESS, tls=encrypted.tables(folder))
    with local_run(config) as run:
        run.start()
        for arguments, words in (
            (["--ca-cert", f"{other}/authority.pem"], "not signed by a CA that is trusted here"),
            (
                [f"--cert={other}/learner-0.pem", f"--key={other}/learner-0.key"],
                "rejects this process's certificate",
            ),
        ):
            address = ["--syncer", run.addresses[0]]
            process = command("learner", str(file), "--index", "0", *address, *arguments)
            output, _ = process.communicate(timeout=240)
            assert (process.returncode, words in output) == (AccessError.exit_code, True), output


def test_missing_files_are_reported_before_anything_starts(folder: Path, tmp_path: Path) -> None:
    (folder / "learner-1.pem").unlink()
    with pytest.raises(ConfigError, match=r"has no learner-1\.pem: create it with ddiloco cert"):
        LocalRun(config_of(tmp_path / "run", tls=encrypted.tables(folder)))
    (folder / "syncer.key").unlink()
    with pytest.raises(ConfigError, match=r"syncer\.key' cannot be read"):
        LocalRun(config_of(tmp_path / "run", tls=encrypted.tables(folder)))
    assert not (tmp_path / "run").exists()


def test_a_syncer_with_a_separate_folder_prints_how_to_join(folder: Path, tmp_path: Path) -> None:
    """`ddiloco syncer` prints a command that works as soon as the files are filled in."""
    file = config_file(tmp_path / "run", tls=encrypted.tables(folder))
    process = command("syncer", str(file))
    assert process.stdout is not None
    try:
        lines = []
        for line in process.stdout:
            lines.append(line)
            if "ddiloco learner" in line:
                break
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=240)
    told = "".join(lines)
    assert "--ca-cert AUTHORITY.pem --cert ITS_OWN.pem --key ITS_OWN.key" in told, told
    assert "--auth-token-file" not in told
    assert "tls=dd.TLSConfig(ca_cert=…, cert=…, key=…)" in told
