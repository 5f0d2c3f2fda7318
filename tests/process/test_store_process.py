"""A run is mirrored to an object store over HTTP, and continues from there on an empty folder."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from decoupled_diloco.launch.processes import MIRROR
from decoupled_diloco.storage.mirror import (
    StoredPart,
    newest_state,
    required_state,
    restore,
)
from decoupled_diloco.storage.object_store import Objects
from decoupled_diloco.tape.replay import replay_run
from free_ports import free_ports
from object_server import BUCKET, ObjectServer, object_server
from process.process_runs import (
    PATIENCE,
    STEP_SECONDS_MAX,
    command,
    config_file,
    ddiloco,
    kill_everything,
    longest_step,
    output_of,
    records,
    stopped_at_exit,
    until,
)

FLUSH_SECONDS = 2.0
"""A tape has everything that is older than this, also on a busy machine."""

SETTINGS = {
    "learner": {"checkpoint_interval_seconds": 1.0},
    "syncer": {"shards": 2},
}


@pytest.fixture
def server(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ObjectServer]:
    with object_server(getattr(request, "param", "s3")) as found:
        for name, value in found.environment.items():
            monkeypatch.setenv(name, value)
        yield found


def stored(folder: Path) -> int:
    """Return the newest state that the mirror of a run has reported."""
    if not (folder / "tape" / f"{MIRROR}.jsonl").exists():
        return 0
    return max((r.data["state"] for r in records(folder, MIRROR) if "state" in r.data), default=0)


def clock_of(folder: Path, shard: int = 0, before: float = math.inf) -> int:
    """Return the newest global step of a shard before an instant, in seconds since the epoch."""
    clocks = (r for r in records(folder, f"shard-{shard}") if r.type == "ClockAdvanced")
    return max((r.data["clock"] for r in clocks if r.wall < before), default=0)


def sixty_more(folder: Path, step: int) -> list[str]:
    """Return the arguments that let a resumed run end in this folder, 60 steps after a step."""
    return ["--set", f"run.folder={folder}", "--set", f"run.max_steps={step + 60}"]


def kill_the_machine(folder: Path, process: object) -> None:
    """End every process of a run at once, as a machine that is lost, and delete its disk."""
    started = [r for r in records(folder, "launcher") if r.type == "ProcessStarted"]
    mirror = [r.data["pid"] for r in started if r.data["name"] == MIRROR][-1]
    os.kill(mirror, signal.SIGKILL)
    kill_everything(folder, process)  # type: ignore[arg-type]
    shutil.rmtree(folder)


def on_two_machines(place: Path, run: dict[str, object]) -> list[list[str]]:
    """Return the commands of shard 0 and a learner in one folder, and of the others in another."""
    ports = free_ports(3)
    addresses = [f"http://127.0.0.1:{port}" for port in ports]
    token = place / "token"
    token.write_text("a secret of this run\n")
    syncer = {"shards": 3, "addresses": addresses, "token_file": token}
    checkpoints = {"checkpoint_interval_seconds": 1.0}
    files = {
        name: str(config_file(place / name, run=run, syncer=syncer, learner=checkpoints))
        for name in ("a", "b")
    }
    secret = ["--syncer", ",".join(addresses), "--auth-token-file", str(token)]
    return [
        *(
            ["syncer", files[name], "--shard", str(shard), "--port", str(port)]
            for shard, (name, port) in enumerate(zip("abb", ports, strict=True))
        ),
        *(
            ["learner", files[name], "--index", str(index), *secret]
            for index, name in enumerate("ab")
        ),
    ]


def started(
    stack: contextlib.ExitStack, commands: Sequence[Sequence[str]]
) -> list[subprocess.Popen[str]]:
    """Start processes, which end with the stack."""
    return [stack.enter_context(stopped_at_exit(command(*each))) for each in commands]


def kill_with_mirrors(processes: Sequence[subprocess.Popen[str]]) -> None:
    """End processes and the mirrors that they have started, as machines that are lost."""
    for each in processes:
        each.send_signal(signal.SIGSTOP)
        for child in Path(f"/proc/{each.pid}/task/{each.pid}/children").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(child), signal.SIGKILL)
        each.kill()
        each.wait()


@pytest.mark.parametrize(
    "server",
    [
        pytest.param("s3", marks=pytest.mark.smoke),
        pytest.param("gs", marks=pytest.mark.long),
        pytest.param("az", marks=pytest.mark.long),
    ],
    indirect=True,
)
def test_a_run_continues_on_an_empty_folder_from_the_store_alone(
    tmp_path: Path, server: ObjectServer
) -> None:
    folder, address = tmp_path / "run", server.address("runs/x")
    run = {"max_steps": 100_000, "store": address, "store_interval_seconds": 1.0}
    file = config_file(folder, run=run, **SETTINGS)

    def due() -> int:
        """Return a global step that the newest state has."""
        state = newest_state(Objects(address))
        return 0 if state is None else clock_of(folder, before=state.wall - FLUSH_SECONDS)

    with stopped_at_exit(command("train", str(file))) as process:
        until(lambda: stored(folder) >= 4 and due() >= 20, "four states", 60, every=0.2)
        kept, reached = due(), clock_of(folder)
        kill_the_machine(folder, process)
    file.unlink()

    shown = output_of("status", address)
    assert f"store {address} has state" in shown
    other = tmp_path / "other"
    done = ddiloco("train", "--resume", address, *sixty_more(other, reached))
    assert done.returncode == 0, done.stdout + done.stderr
    assert f": {other}" in done.stdout
    assert (other / "weights.safetensors").is_file()
    lives = [r for r in records(other, "shard-0") if r.kind == "start"]
    assert len(lives) == 2, "the tape continues"
    began = [r for r in records(other, "learner-0") if r.kind == "start"]
    assert len(began) == 2
    # It continues near where it was, and not at its start.
    second = [r for r in records(other, "shard-0") if r.life == 1 and r.type == "ClockAdvanced"]
    assert second[0].data["clock"] >= kept
    results, _ = replay_run(other)
    assert {r.process: r.differences for r in results if r.differences} == {}

    state = newest_state(Objects(address))
    assert state is not None
    assert "weights.safetensors" in state.files
    report, export = tmp_path / "report.html", tmp_path / "export"
    output_of("report", address, "--out", str(report))
    output_of("export", address, "--out", str(export))
    assert report.stat().st_size > 10_000
    assert (export / "model.safetensors").stat().st_size > 10_000


@pytest.mark.parametrize("scheme", ["s3", "file"])
def test_shards_on_two_machines_continue_on_one_from_the_store_alone(
    tmp_path: Path, server: ObjectServer, scheme: str
) -> None:
    """Shard 0 has one folder, and shards 1 and 2 have another one."""
    interval = 2.0
    address = server.address("runs/parts") if scheme == "s3" else f"file://{tmp_path}/store"
    run = {"max_steps": 100_000, "store": address, "store_interval_seconds": interval}
    commands = on_two_machines(tmp_path, run)
    with contextlib.ExitStack() as stack:
        running = started(stack, commands)

        def has_both() -> bool:
            state = newest_state(Objects(address))
            return state is not None and "shard-1" in state.parts and state.number >= 6

        until(has_both, "states with the part", 90, every=0.2)
        until(lambda: clock_of(tmp_path / "a") >= 60, "sixty steps", 60)
        killed = time.time()
        kill_with_mirrors(running)
    state = newest_state(Objects(address))
    assert state is not None
    taken = {0: state.wall, 1: state.parts["shard-1"].wall, 2: state.parts["shard-1"].wall}
    # About one interval is lost. A busy machine needs longer for a state.
    assert max(killed - wall for wall in taken.values()) < PATIENCE * interval
    folders = {0: tmp_path / "a", 1: tmp_path / "b", 2: tmp_path / "b"}
    due = {each: clock_of(folders[each], each, taken[each] - FLUSH_SECONDS) for each in folders}
    short = f"run.max_steps={clock_of(tmp_path / 'a') + 20}"
    shutil.rmtree(tmp_path / "a")
    shutil.rmtree(tmp_path / "b")
    shown = output_of("status", address)
    assert "part shard-1" in shown
    other = tmp_path / "other"
    here = ["--set", f"run.folder={other}", "--set", "syncer.addresses=[]", "--set", short]
    done = ddiloco("train", "--resume", address, *here)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (other / "weights.safetensors").is_file()
    for shard, clock in due.items():
        found = records(other, f"shard-{shard}")
        assert sum(r.kind == "start" for r in found) == 2, "the tape continues"
        second = next(r.wall for r in found if r.life == 1)
        assert clock_of(other, shard, second) >= clock, "the state is whole"
    results, _ = replay_run(other)
    assert {r.process: r.differences for r in results if r.differences} == {}


@pytest.mark.long
def test_shards_of_a_lost_machine_continue_their_part_on_another_one(
    tmp_path: Path, server: ObjectServer
) -> None:
    address = server.address("runs/replaced")
    run = {"max_steps": 10_000, "store": address, "store_interval_seconds": 2.0}
    commands = on_two_machines(tmp_path, run)
    shutil.copy(tmp_path / "b.toml", tmp_path / "c.toml")
    of_c = [
        [each.replace(f"{tmp_path}/b.toml", f"{tmp_path}/c.toml") for each in command_line]
        for command_line in commands[1:3]
    ]

    def part_of_newest() -> StoredPart | None:
        state = newest_state(Objects(address))
        return None if state is None else state.parts.get("shard-1")

    with contextlib.ExitStack() as stack:
        running = started(stack, commands)
        until(part_of_newest, "a state with the part", 90, every=0.2)
        kill_with_mirrors(running[1:3])
        lost = part_of_newest()
        assert lost is not None
        warning = "has files of part shard-1 from"
        until(lambda: warning in output_of("status", str(tmp_path / "a")), "the warning", 60)
        folder = f"run.folder={tmp_path / 'c'}"
        running[1:3] = started(stack, [[*each, "--set", folder] for each in of_c])

        def continues() -> bool:
            part = part_of_newest()
            return part is not None and part.number >= lost.number + 3

        until(continues, "newer states of the part", 90, every=0.2)
        shown = output_of("status", str(tmp_path / "a"))
        kill_with_mirrors(running)
    assert warning not in shown
    other = tmp_path / "other"
    restore(Objects(address), other, required_state(Objects(address)))
    of_shard = (other / "tape/shard-2.jsonl").read_bytes()
    assert of_shard
    assert (tmp_path / "c/tape/shard-2.jsonl").read_bytes().startswith(of_shard)


@pytest.mark.long
def test_the_last_state_of_shards_on_two_machines_has_all_results(
    tmp_path: Path, server: ObjectServer
) -> None:
    address = server.address("runs/ended")
    run = {"max_steps": 60, "store": address, "store_interval_seconds": 2.0}
    with contextlib.ExitStack() as stack:
        running = started(stack, on_two_machines(tmp_path, run))
        for each in running:
            text, _ = each.communicate(timeout=240)
            assert each.returncode == 0, text
    state = newest_state(Objects(address))
    assert state is not None
    results = {f"checkpoints/shard-{shard}.safetensors" for shard in range(3)}
    assert results <= state.files.keys()
    assert len(list(Objects(address).listed("manifests"))) == 2
    shutil.rmtree(tmp_path / "a")
    shutil.rmtree(tmp_path / "b")
    here = ["--set", f"run.folder={tmp_path / 'other'}", "--set", "syncer.addresses=[]"]
    done = ddiloco("train", "--resume", address, *here, "--set", "run.max_steps=80")
    assert done.returncode == 0, done.stdout + done.stderr
    assert clock_of(tmp_path / "other", 2) >= 80


@pytest.mark.long
def test_a_learner_of_several_ranks_continues_from_the_store_alone(
    tmp_path: Path, server: ObjectServer
) -> None:
    folder, address = tmp_path / "run", server.address("runs/ranks")
    run = {"max_steps": 100_000, "store": address, "store_interval_seconds": 1.0}
    ranks = {"ranks": [2, 1], "parallelism": ["fsdp", "plain"], **SETTINGS["learner"]}
    tables = {**SETTINGS, "learner": ranks, "data": {"elastic": False}}
    file = config_file(folder, run=run, **tables)
    with stopped_at_exit(command("train", str(file))) as process:

        def has_checkpoints() -> bool:
            state = newest_state(Objects(address))
            files = () if state is None else state.files
            return any(path.startswith("learners/learner-0/00000003.ranks/") for path in files)

        until(has_checkpoints, "three checkpoints of all ranks in the store", 60, every=0.5)
        reached = clock_of(folder)
        kill_the_machine(folder, process)
    other = tmp_path / "other"
    done = ddiloco("train", "--resume", address, *sixty_more(other, reached))
    assert done.returncode == 0, done.stdout + done.stderr
    began = [r for r in records(other, "learner-0") if r.kind == "start"]
    assert len(began) == 2, "it did not fail and start again"
    assert " from checkpoint: its progress" in (other / "logs/learner-0.log").read_text()


@pytest.mark.long
def test_a_run_goes_back_to_a_checkpoint_that_only_the_store_has(
    tmp_path: Path, server: ObjectServer
) -> None:
    folder, address = tmp_path / "run", f"s3://{BUCKET}/runs/back"
    run = {"max_steps": 100_000, "checkpoint_interval_seconds": 2.0}
    run |= {"store": address, "store_interval_seconds": 1.0}
    file = config_file(folder, run=run, **SETTINGS)
    with stopped_at_exit(command("train", str(file))) as process:

        def has_checkpoints() -> bool:
            state = newest_state(Objects(address))
            files = () if state is None else state.files
            return sum(path.endswith("/manifest.json") for path in files) >= 2

        until(has_checkpoints, "two checkpoints in the store", 60, every=0.5)
        reached = clock_of(folder)
        kill_the_machine(folder, process)
    state = newest_state(Objects(address))
    assert state is not None
    numbers = sorted(p.split("/")[1] for p in state.files if p.endswith("/manifest.json"))
    here = sixty_more(tmp_path / "other", reached)
    done = ddiloco("train", "--resume", address, "--checkpoint", "last", *here)
    assert done.returncode == 0, done.stdout + done.stderr
    back = [r for r in records(tmp_path / "other", "launcher") if r.type == "WentBack"]
    assert f"back to checkpoint {int(numbers[-1])};" in back[0].data["told"]
    assert not list((tmp_path / "other").glob("**/*.part"))


@pytest.mark.long
def test_training_continues_while_the_store_is_away_and_the_backlog_drains(
    tmp_path: Path, server: ObjectServer
) -> None:
    folder, address = tmp_path / "run", f"s3://{BUCKET}/runs/away"
    run = {"max_steps": 100_000, "store": address, "store_interval_seconds": 1.0}
    file = config_file(folder, run=run, **SETTINGS)
    with stopped_at_exit(command("train", str(file))) as process:
        until(lambda: stored(folder) >= 2, "two states", 60)
        server.go_away()
        began = clock_of(folder)
        until(lambda: "backlog" in output_of("status", str(folder)), "the backlog", 60, every=0.5)
        syncer = (folder / "addresses").read_text().split()[0]
        secret = ["--auth-token-file", str(folder / "token")]
        for shown in (output_of("status", str(folder)), output_of("status", syncer, *secret)):
            assert f"store={address!r} is unreachable" in "".join(shown.split("\n"))
        until(lambda: clock_of(folder) >= began + 40, "forty more steps", 60)
        before = stored(folder)
        server.come_back()
        until(lambda: stored(folder) >= before + 2, "two more states", 60)
        output_of("stop", syncer, *secret)
        text, _ = process.communicate(timeout=240)
        assert process.returncode == 0, text
    assert longest_step(folder, "learner-0") < STEP_SECONDS_MAX
    log = (folder / "logs" / f"{MIRROR}.log").read_text()
    assert "training continues; backlog" in log
    assert "the problem is over; state" in log
    state = newest_state(Objects(address))
    assert state is not None
    assert "weights.safetensors" in state.files


@pytest.mark.long
def test_a_run_whose_store_refuses_does_not_start_and_nothing_is_lost(
    tmp_path: Path, server: ObjectServer
) -> None:
    folder = tmp_path / "run"
    run = {"max_steps": 20, "store": "s3://no-such-bucket/x", "store_interval_seconds": 1.0}
    file = config_file(folder, run=run, **SETTINGS)
    done = ddiloco("train", str(file))
    assert done.returncode == 2
    assert done.stderr == (
        "error: store='s3://no-such-bucket/x' does not exist: create the bucket, or correct the "
        "address\n"
    )
    assert not folder.exists()
    address = f"s3://{BUCKET}/runs/used"
    own = ["--set", f"run.store={address}"]
    assert ddiloco("train", str(file), *own).returncode == 0
    again = ddiloco("train", str(file), *own)
    assert again.returncode == 2
    assert f"store={address!r} already has a run, 'small' from" in again.stderr
    assert not list(tmp_path.glob("run.1")), "the run in the folder stays where it is"
    # A bucket that was emptied, or another one, receives the whole run.
    moved = ddiloco("mirror", str(folder), "--set", f"run.store=s3://{BUCKET}/runs/moved")
    assert moved.returncode == 0, moved.stderr
    assert "state 1 of small is in s3://" in moved.stdout


@pytest.mark.long
def test_a_standby_without_a_shared_disk_takes_over(tmp_path: Path, server: ObjectServer) -> None:
    """Two machines: each has its own folder, and they share the store."""
    first, second = free_ports(2)
    token = tmp_path / "token"
    token.write_text("a secret of this run\n")
    settings = {
        "run": {
            "max_steps": 200,
            "learners": 1,
            "store": f"s3://{BUCKET}/runs/two",
            "store_interval_seconds": 1.0,
        },
        "syncer": {
            "standby": True,
            "lease_seconds": 2.0,
            "lease_store": f"s3://{BUCKET}/leases/two",
            "addresses": [f"http://127.0.0.1:{first}|http://127.0.0.1:{second}"],
            "token_file": token,
        },
    }
    files = {name: config_file(tmp_path / name, **settings) for name in ("a", "b", "learner")}
    serve = ["syncer", str(files["a"]), "--shard", "0", "--port", str(first)]
    wait = ["syncer", str(files["b"]), "--shard", "0", "--port", str(second), "--standby"]
    with (
        stopped_at_exit(command(*serve)) as active,
        stopped_at_exit(command(*wait)) as standby,
        stopped_at_exit(
            command(
                "learner",
                str(files["learner"]),
                "--index",
                "0",
                "--auth-token-file",
                str(token),
                "--syncer",
                settings["syncer"]["addresses"][0],
            )
        ) as learner,
    ):
        until(lambda: stored(tmp_path / "a") >= 3 and clock_of(tmp_path / "a") >= 40, "states", 60)
        os.killpg(active.pid, signal.SIGKILL)
        text, _ = standby.communicate(timeout=240)
        assert standby.returncode == 0, text
        assert learner.wait(timeout=60) == 0, learner.communicate()[0]
    folder = tmp_path / "b"
    assert "copying state" in text
    clocks = [
        r.data["clock"] for r in records(folder, "shard-0-standby") if r.type == "ClockAdvanced"
    ]
    assert clocks[0] > 1, "the standby continues the run"
    assert clocks[-1] >= 200
    taken = [r for r in records(folder, "shard-0-standby") if r.type == "TookOver"]
    assert [r.data["claim"] for r in taken] == [2]
