"""Leased data of real processes: learners are killed and join, the coordinator is killed."""

from __future__ import annotations

import signal
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from decoupled_diloco.launch.local import LocalRun
from decoupled_diloco.protocol.learner_machine import LearnerMachine
from decoupled_diloco.run_model.data_usage import DataAccount, read_data
from decoupled_diloco.storage.data_ledger import FILE
from decoupled_diloco.tape.replay import machine_of
from process.process_runs import command, config_of, local_run, logs, records, send, wait, when


def trained_on(folder: Path, process: str) -> dict[tuple[int, int, int], int]:
    """Return the batches that each incarnation trained according to its tape, by epoch and
    partition.
    """
    trained: dict[tuple[int, int, int], int] = defaultdict(int)
    machine: LearnerMachine | None = None
    for record in records(folder, process):
        if record.kind == "start":
            made = machine_of(record.data["header"])
            assert isinstance(made, LearnerMachine)
            machine = made
        elif record.kind == "event" and machine is not None:
            data = machine.state.data
            before = {} if data is None else {n: p.trained for n, p in data.leases.items()}
            machine.handle(record.at, record.value())  # type: ignore[arg-type]
            if record.type == "StepFinished" and data is not None:
                for number, part in data.leases.items():
                    more = part.trained - before.get(number, part.trained)
                    trained[machine.epoch, part.lease.turn, part.lease.part] += more
    return trained


def check_against_tapes(account: DataAccount, folder: Path, killed: set[tuple[str, int]]) -> None:
    """Check that each learner trained what the ledger records, and reported it unless it was
    killed.
    """
    tapes = {path.stem for path in (folder / "tape").glob("learner-*.jsonl")}
    trained = {process: trained_on(folder, process) for process in tapes}
    for turn, parts in account.turns.items():
        for part in parts.values():
            for span in part.spans:
                done = (span.end or span.first) - span.first
                known = trained[span.learner][span.epoch, turn, part.part]
                if (span.learner, span.epoch) not in killed:
                    assert known >= done, f"{span} of part {part.part}, but its tape says {known}"


def has_settled(folder: Path, learner: str) -> bool:
    if not (folder / FILE).exists():
        return False
    account = read_data(folder)
    return any(account.shares(turn).get(learner) for turn in account.turns)


def test_every_partition_is_trained_through_deaths_and_joins(tmp_path: Path) -> None:
    """learner-1 is killed for good, learner-2 joins, the coordinator's process is killed."""
    folder = tmp_path / "run"
    config = config_of(
        folder,
        run={"max_steps": 800},
        syncer={"shards": 2},
        data={"partitions": 32},
        workload={"corpus_bytes_max": 20_000},
    )
    joined = []

    def script(run: LocalRun) -> Iterator[None]:
        yield from when(lambda: has_settled(folder, "learner-1"))
        run.supervisor.kill("learner-1", restart=False)
        arguments = ["--index", "2", "--syncer", run.addresses[0]]
        token = ["--auth-token-file", str(run.secret_file)]
        joined.append(command("learner", str(folder / "run.toml"), *arguments, *token))
        yield from when(lambda: has_settled(folder, "learner-2"))
        send(run, "shard-0", signal.SIGKILL)

    with local_run(config) as run:
        run.start()
        outcome = wait(run, script(run), seconds=200)
        for process in joined:
            said, _ = process.communicate(timeout=240)
            assert process.returncode == 0, said
    assert outcome.finished, outcome.reason
    account = read_data(folder)
    assert not account.problems, account.problems
    learners = {name for turn in account.turns for name in account.shares(turn)}
    assert learners == {"learner-0", "learner-1", "learner-2"}, logs(folder)
    handed_on = [
        [span.learner for span in part.spans]
        for part in account.turns[0].values()
        if part.spans[0].learner == "learner-1" and len(part.spans) > 1
    ]
    assert handed_on, "the dead learner has no leases"
    assert account.count(0, "durable") == 32, "the first epoch is complete"
    assert all(repeat.end > repeat.first for repeat in account.repeats)
    check_against_tapes(account, folder, {("learner-1", 1)})
    assert len({r.life for r in records(folder, "coordinator")}) == 2
