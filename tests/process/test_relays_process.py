"""Two sites, each behind a relay: real processes on loopback, and relays that fail."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import encrypted
from decoupled_diloco.errors import ConfigError
from decoupled_diloco.launch.certificates import CertificateFolder
from decoupled_diloco.launch.local import LocalRun
from decoupled_diloco.learner.connections import NEARER_SECONDS
from decoupled_diloco.run_model import read_run
from decoupled_diloco.show.status import RunStatus, status_of
from decoupled_diloco.tape.records import Record
from decoupled_diloco.tape.replay import replay_run
from free_ports import free_ports
from process.process_runs import (
    STEP_SECONDS_MAX,
    command,
    config_of,
    ddiloco,
    local_run,
    logs,
    longest_step,
    output_of,
    pause,
    play,
    records,
    send,
    stop,
    stopped_at_exit,
    wait,
    when,
)

SITES = [{"name": "site-a", "learners": [0, 1]}, {"name": "site-b", "learners": [2, 3]}]
SETTINGS: dict[str, Any] = {"sync": {"quorum": 1}, "syncer": {"shards": 2}, "sites": SITES}
AWAY_SECONDS_MAX = 5.0
"""Longest time from the loss of a relay until its learners are in the run on another way."""


def connections(folder: Path, learner: str, shard: int = 0) -> list[tuple[float, str]]:
    """Return when a learner has connected to a shard, and through which relay."""
    own = [r for r in records(folder, f"shard-{shard}") if r.type == "Connected"]
    return [(r.at, r.data.get("relay", "")) for r in own if r.data["peer"] == learner]


def status(folder: Path) -> RunStatus:
    model = read_run(folder, "now")
    return status_of(model, model.latest)


def ways(folder: Path) -> list[str]:
    return [learner.via for learner in status(folder).learners]


def sums(folder: Path) -> list[Record]:
    """Return the arrivals of sums at both shards."""
    tapes = [records(folder, f"shard-{shard}") for shard in range(2)]
    return [r for tape in tapes for r in tape if r.type == "SumArrived"]


def has_sums(folder: Path, relay: str, least: int) -> bool:
    return sum(r.data["relay"] == relay for r in sums(folder)) >= least


def must_replay(folder: Path) -> None:
    results, _ = replay_run(folder)
    assert {r.process: r.differences for r in results if r.differences} == {}


@pytest.mark.smoke
def test_each_site_sends_one_sum_of_its_contributions(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    # All learners are in each round, and its sums have time to wait for them, on any machine.
    settings = SETTINGS | {"sync": {"quorum": 4, "sync_every": 16, "overlap_steps": 12}}
    with local_run(config_of(folder, run={"learners": 4, "max_steps": 80}, **settings)) as run:
        run.start()
        outcome = wait(run)
    assert outcome.finished, logs(folder)
    arrived = sums(folder)
    assert {r.data["relay"] for r in arrived} == {"site-a", "site-b"}
    several = Counter(len(r.data["asks"]) for r in arrived)
    assert several[2] > several[1], "most sums hold both contributions of their site"
    for number in range(4):
        site = "site-a" if number < 2 else "site-b"
        assert connections(folder, f"learner-{number}")[-1][1] == site
    must_replay(folder)
    shown = output_of("status", str(folder))
    for site in ("site-a", "site-b"):
        name, state, behind, of, all_of, *_ = shown[shown.index(f"\n{site} ") :].split()
        assert (name, state, behind, of, all_of) == (site, "ended", "2", "of", "2")
    explained = " ".join(output_of("explain", "round", "3", str(folder), "--shard", "0").split())
    assert re.search(
        r"learner-0: requested .*?, delivered to site-a .*?, in its sum \d+ ", explained
    )
    assert re.search(r"- site-b: sum \d+ arrived", explained)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_learners_of_a_lost_relay_go_on_without_it(tmp_path: Path, number: Any) -> None:
    """And they return to it, once it carries their connections again."""
    folder, lost = tmp_path / "run", list[float]()
    settings = SETTINGS | {"sync": {"quorum": 1, "codec": {"uplink": "int4"}}}
    config = config_of(folder, run={"learners": 4, "max_steps": 1_000_000}, **settings)

    def script() -> Iterator[None]:
        yield from when(lambda: has_sums(folder, "site-a", 8))
        lost.append(records(folder, "shard-0")[-1].at)
        send(run, "relay-site-a", number)
        if number == signal.SIGSTOP:
            yield from when(lambda: ways(folder) == ["direct", "direct", "site-b", "site-b"])
            assert status(folder).sites[0].elsewhere == ("learner-0", "learner-1")
        yield from pause(6.0)
        if number == signal.SIGSTOP:
            send(run, "relay-site-a", signal.SIGCONT)
        yield from when(lambda: ways(folder) == ["site-a", "site-a", "site-b", "site-b"])
        stop(run)

    with local_run(config) as run:
        run.start()
        outcome = wait(run, script(), seconds=120.0)
    assert outcome.finished, logs(folder)
    for learner in ("learner-0", "learner-1"):
        later = [(at, relay) for at, relay in connections(folder, learner) if at > lost[0]]
        assert later[0][1] == "", "it dials its next address: the shards"
        assert later[0][0] - lost[0] < AWAY_SECONDS_MAX
        assert later[-1][1] == "site-a", "it has returned"
    for learner in ("learner-0", "learner-1", "learner-2", "learner-3"):
        assert longest_step(folder, learner) < STEP_SECONDS_MAX
    assert {relay for _, relay in connections(folder, "learner-2")} == {"site-b"}
    if number == signal.SIGKILL:
        log = (folder / "logs" / "learner-0.log").read_text()
        assert re.search(
            r"learner-0: the relay at http://\S+ no longer connects it to shard \d \(.*\); "
            r"training continues, and it dials the next address\n",
            log,
        )
        remarks = [remark.text for remark in read_run(folder).remarks]
        assert "the relay of site-a has lost its connection to the syncer" in remarks
        assert "the relay of site-a is connected again" in remarks
    assert any((folder / "relays" / "site-a").iterdir()), "the residuals of its sums"
    must_replay(folder)


def test_the_ranks_of_a_learner_send_their_parts_to_the_relay(tmp_path: Path) -> None:
    """And to the shards while the relay is gone."""
    folder = tmp_path / "run"
    learner = {"ranks": [1, 2, 2], "parallelism": ["plain", "fsdp", "tp"], "sync_ranks": "all"}
    settings = SETTINGS | {"sites": [{"name": "site-a", "learners": [0, 1, 2]}]}
    config = config_of(
        folder,
        run={"learners": 3, "max_steps": 300},
        learner=learner,
        data={"elastic": False},
        **settings,
    )

    def script() -> Iterator[None]:
        yield from when(lambda: has_sums(folder, "site-a", 8))
        send(run, "relay-site-a", signal.SIGKILL)

    with local_run(config) as run:
        run.start()
        outcome = wait(run, script(), seconds=200.0)
    assert outcome.finished, logs(folder)
    assert max(len(r.data["asks"]) for r in sums(folder)) == 3
    for learner_name in ("learner-1", "learner-2"):
        ways = [relay for _, relay in connections(folder, learner_name)]
        assert ways[:2] == ["site-a", ""], "it dials the shards while the relay is gone"
        assert ways[-1] == "site-a"
        assert longest_step(folder, learner_name) < STEP_SECONDS_MAX
    must_replay(folder)


def test_a_relay_represents_only_the_learners_that_its_certificate_names(tmp_path: Path) -> None:
    """It is at another address than the shards, which advertise none; then it is lost."""
    folder, tls, there = tmp_path / "run", tmp_path / "tls", "127.0.0.2"
    encrypted.made(tls, "learner-0", "learner-1")
    CertificateFolder(tls).add(["site-a"], 30, [there], ["learner-0"])
    config = config_of(
        folder, run={"max_steps": 1_000_000}, syncer={"shards": 2}, tls=encrypted.tables(tls)
    )
    (port,) = free_ports(1)
    run = LocalRun(config, learners=False, dial=lambda name, addresses: addresses)
    with contextlib.closing(run), contextlib.ExitStack() as others:
        run.start()

        def start(role: str, *options: str) -> subprocess.Popen[str]:
            return others.enter_context(
                stopped_at_exit(command(role, str(folder / "run.toml"), *options))
            )

        place = ["--set", f"syncer.host={there}", "--port", str(port)]
        relay = start("relay", "--name", "site-a", "--upstream", run.addresses[0], *place)
        addresses = ",".join([f"https://{there}:{port}", *run.addresses])
        for index in ("0", "1"):
            start("learner", "--index", index, "--syncer", addresses)

        def script() -> Iterator[None]:
            yield from when(lambda: len(connected("learner-0")) and len(connected("learner-1")))
            yield from when(lambda: len(sums(folder)) > 4)
            yield from pause(NEARER_SECONDS)
            assert set(connected("learner-0")) == {"site-a"}
            assert connected("learner-1") == [""], "the relay does not invite it again"
            relay.kill()
            yield from when(lambda: all(len(ways(shard)) > 1 for shard in range(2)))

        def ways(shard: int) -> list[str]:
            return [relay for _, relay in connections(folder, "learner-0", shard)]

        def connected(learner: str) -> list[str]:
            there = (folder / "tape" / "shard-1.jsonl").exists()
            return [relay for _, relay in connections(folder, learner, 1)] if there else []

        play(run, script())
        assert relay.stdout is not None
        output = relay.stdout.read()
    for shard in range(2):
        assert ways(shard) == ["site-a", ""], "it has dialed each shard once, at its own address"
    sentence = (
        "learner-1: the certificate of relay 'site-a' does not name 'learner-1': run ddiloco certs "
        "renew FOLDER site-a --represents learner-1, and restart the relay; it dials its next"
    )
    assert output.count(sentence) == 1, output


def test_a_relay_rejects_an_upstream_that_is_no_use(tmp_path: Path) -> None:
    """Each fault is one sentence, and the run is not affected."""
    folder = tmp_path / "run"
    config = config_of(folder, run={"learners": 2, "max_steps": 1_000_000}, sites=SITES[:1])
    other = tmp_path / "other.toml"
    with local_run(config) as run:
        run.start()
        run.wait_for_shards()

        def rejected(name: str, *options: str, site: str = "site-a") -> str:
            text = (folder / "run.toml").read_text().replace('"site-a"', f'"{site}"')
            other.write_text(text.replace(str(folder), str(tmp_path / "elsewhere")))
            secret = ["--auth-token-file", str(run.secret_file)]
            upstream = ["--upstream", run.addresses[0], "--port", "0"]
            done = ddiloco("relay", str(other), "--name", name, *upstream, *secret, *options)
            assert done.returncode != 0
            return done.stderr + done.stdout

        def script() -> Iterator[None]:
            yield from when(lambda: has_sums(folder, "site-a", 1))
            assert "--name site-x is not a site in" in rejected("site-x")
            assert "--upstream is not one: omit --host" in rejected("site-a", "--host", "here")
            assert "serves run" in rejected("site-x", "--set", "run.name=another", site="site-x")
            assert "is in use by a live relay" in rejected("site-a")
            stop(run)

        outcome = wait(run, script())
    assert outcome.finished, logs(folder)


def test_a_relay_with_another_file_ends_before_the_first_learner_joins(tmp_path: Path) -> None:
    config = config_of(tmp_path / "run", run={"learners": 2}, sites=SITES[:1])
    other = tmp_path / "other.toml"
    with local_run(config, learners=False) as run:
        run.start()
        run.wait_for_shards()
        run.invite()
        text = (tmp_path / "run" / "run.toml").read_text()
        text = text.replace(str(tmp_path / "run"), str(tmp_path / "elsewhere"))
        secret = ["--auth-token-file", str(run.secret_file)]
        for old, new, name, sentence in (
            ('name = "small"', 'name = "b"', "site-a", "of run 'b', but its upstream serves run"),
            ('"site-a"', '"site-x"', "site-x", "site 'site-x' is not in [[sites]] of run 'small'"),
            (
                "    0,\n    1,\n",
                "    0,\n",
                "site-a",
                "site 'site-a' has learners=[0] in this relay's file, but",
            ),
        ):
            assert old in text
            other.write_text(text.replace(old, new))
            upstream = ["--upstream", run.addresses[0], "--port", "0"]
            done = ddiloco("relay", str(other), "--name", name, *upstream, *secret)
            assert done.returncode == ConfigError.exit_code
            assert sentence in done.stderr + done.stdout
