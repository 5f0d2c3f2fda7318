"""Slurm: one job for the syncer, and one a learner, those of equal learners as an array.

What fails begins again inside its job (`launch/supervised`). Ranks on several machines are tasks of
one step (`launch/rank_processes`), and begin again together. A job that is told to go, before its
time limit or by a preemption, hands in what it has, and is queued again; so is one that fails for
good, since its machine may be the reason. All jobs share the run folder, where the syncer writes
down where it listens. The learners' jobs may start once the syncer's has.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path

from decoupled_diloco.config import RunConfig
from decoupled_diloco.config.where import RoleResources, WhereSettings
from decoupled_diloco.engines.base import SETTINGS, Job, JobState
from decoupled_diloco.errors import ConfigError
from decoupled_diloco.launch.folder import RunFolder
from decoupled_diloco.runtime import now
from decoupled_diloco.units import MIB

SYNCER, EVALUATOR = "syncer", "evaluator"
REQUEUES_MAX = 50
"""Times that a job which fails, and was not told to go, is queued again."""

MEETING_PORT = 29_500
"""Ranks on several machines meet at this port, or one of the thousand after it."""

STARTS_MAX = 6
"""Times that ranks on several machines fail in a row in one job."""

ANSWER_SECONDS = 60
"""How long a command of Slurm may take."""

DRAIN_SECONDS = 120.0
"""How long the learners' jobs may take to end before the syncer's is cancelled."""

_AGAIN = f"""\
# 0: the run is over. 2: the settings are wrong. 130: told to go, by a time limit or a preemption.
if [ $code = 130 ] ||
   {{ [ $code != 0 ] && [ $code != 2 ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt {REQUEUES_MAX} ]; }}
then
    scontrol requeue "$SLURM_JOB_ID"   # refused, and rightly, where the job was cancelled
fi
exit $code
"""

LASTS_SECONDS = 60
"""Ranks that have lived for longer do not fail in a row."""

_TASK = (
    'trap : TERM; "$@"; code=$?; case $code in 0|130) ;; *) echo $code >> "$0";; esac; exit $code'
)
"""One rank, which hears SIGTERM itself; exit codes of failures are written down as they come."""

_TOGETHER = f"""\
export MASTER_ADDR="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
failed={{failed}}
in_a_row=0
while
    export MASTER_PORT=$(({MEETING_PORT} + (SLURM_JOB_ID + SECONDS) % 1000))
    begun=$SECONDS
    rm -f "$failed"
    srun --kill-on-bad-exit=1 --distribution=block --cpus-per-task="$SLURM_CPUS_PER_TASK" \\
        bash -c '{_TASK}' "$failed" \\
        {{command}}
    code=$?
    # Those that are ended because one has failed say that they were told to go.
    if [ -s "$failed" ]; then code=$(head -n 1 "$failed"); fi
    if [ $((SECONDS - begun)) -gt {LASTS_SECONDS} ]; then in_a_row=0; fi
    in_a_row=$((in_a_row + 1))
    [ $code != 0 ] && [ $code != 2 ] && [ $code != 130 ] && [ $in_a_row -lt {STARTS_MAX} ]
do
    echo "a rank has failed (exit code $code): all begin again"
done
"""
"""Runs the ranks on all hosts, and again when one has failed, as the supervisor does on one."""


class Slurm:
    """See `base.PlacingEngine`."""

    def require(self, config: RunConfig) -> None:
        """Asks Slurm to look at each job without submitting it."""
        if shutil.which("sbatch") is None:
            raise ConfigError(
                "sbatch is not here: run this on a login node of a Slurm cluster, or choose "
                "another engine in [where]"
            )
        for name, script in self.files(config, Path("/nowhere.launch")).items():
            _sbatch(script, "--test-only", "--output=/dev/null", what=name)

    def files(self, config: RunConfig, folder: Path) -> Mapping[str, str]:
        files = {f"{SYNCER}.sbatch": _syncer(config, folder)}
        groups = groupby(range(config.run.learners), key=config.learner.ranks_of)
        for ranks, group in groups:
            indices = list(group)
            name = "learners" if len(indices) == config.run.learners else f"learners-{indices[0]}"
            files[f"{name}.sbatch"] = _learners(config, folder, ranks, indices)
        if config.run.evaluator:
            files[f"{EVALUATOR}.sbatch"] = _evaluator(config, folder)
        return files

    def copies(self, config: RunConfig) -> Mapping[str, Path]:
        """None: the jobs read the files where they are, since they share the file system."""
        return {}

    def logs(self, config: RunConfig, folder: Path) -> str:
        return f"{folder}/logs"

    def submit(self, config: RunConfig, folder: Path, *, resume: bool = False) -> list[Job]:
        """Submits the syncer's job, and the others to start once it has."""
        if resume:
            raise ConfigError(
                "a run on Slurm is not launched again to go on: ddiloco train --resume "
                f"{config.run.folder} goes on with it on one machine, or leave --resume out"
            )
        # As any command that begins a run: an earlier one in its folder is moved aside, now.
        with RunFolder(config.run.folder):
            pass
        (folder / "logs").mkdir(exist_ok=True)
        syncer = Job(SYNCER, _submitted(folder / f"{SYNCER}.sbatch"))
        others = [path for path in sorted(folder.glob("*.sbatch")) if path.stem != SYNCER]
        after = f"--dependency=after:{syncer.id}"
        return [syncer, *(Job(path.stem, _submitted(path, after)) for path in others)]

    def states(self, jobs: Sequence[Job]) -> list[JobState]:
        if not jobs:
            return []
        # Not by number: Slurm forgets a job some minutes after its end, and refuses such a list.
        told = _run(["squeue", "--all", "--array", "--noheader", "--format=%F %K %T %R", "--me"])
        wanted = {job.id: job.name for job in jobs}
        found = []
        for line in told.splitlines():
            number, element, state, where = (*line.split(maxsplit=3), "")[:4]
            if number in wanted:
                name = f"learner-{element}" if element.isdigit() else wanted[number]
                found.append(JobState(name, number, state, where.strip("()")))
        return found

    def stop(self, jobs: Sequence[Job]) -> None:
        """Cancels the jobs, the syncer's last, so that it takes what the learners hand in.

        Slurm gives each its `KillWait` (30 s by default) between SIGTERM and SIGKILL.
        """
        first = [job for job in jobs if job.name != SYNCER]
        deadline = now() + DRAIN_SECONDS
        if first:
            _run(["scancel", *(job.id for job in first)])
        while self.states(first) and now() < deadline:
            time.sleep(1.0)
        _run(["scancel", *(job.id for job in jobs)])


def _syncer(config: RunConfig, folder: Path) -> str:
    run, processes = shlex.quote(str(config.run.folder)), config.syncer.shards
    processes *= 1 + config.syncer.standbys
    command, slurm = _command(config.where), config.where.slurm
    settings = shlex.quote(str(folder / SETTINGS))
    return _script(
        f"The shards of {config.run.name}, each started again here when it fails.",
        [
            *_asked(config, folder, SYNCER, config.where.syncer, times=processes),
            *_given("--partition", slurm.syncer_partition or slurm.partition),
        ],
        [
            *_prelude(config.where),
            f'if [ "${{SLURM_RESTART_COUNT:-0}}" -gt 0 ] && [ -e {run}/run.toml ]; then',
            f"    srun --ntasks=1 {command} syncer {run} --resume",
            "else",
            f"    srun --ntasks=1 {command} syncer {settings}",
            "fi",
            "code=$?",
        ],
    )


def _learners(config: RunConfig, folder: Path, ranks: int, indices: Sequence[int]) -> str:
    where, first, last = config.where, indices[0], indices[-1]
    hosts = where.learner.hosts
    tasks = ranks // hosts if hosts > 1 else 1  # on one host the ranks are one task's children
    asked = _asked(config, folder, "learner", where.learner, hosts=hosts, tasks=tasks)
    asked += [f"--array={first}-{last}", f"--nodes={hosts}", f"--ntasks-per-node={tasks}"]
    asked += _given("--gpus-per-node", str(where.learner.gpus // hosts or ""))
    asked += _given("--partition", where.slurm.partition)
    dialled = _dialled(config, folder, '--index "$SLURM_ARRAY_TASK_ID"')
    told = f"{_command(where)} {dialled}"
    command = f"srun {told} --supervised\ncode=$?"
    if hosts > 1:
        failed = f"{shlex.quote(f'{folder}/logs')}/learner-$SLURM_ARRAY_TASK_ID.failed"
        command = _TOGETHER.format(failed=failed, command=told).rstrip()
    title = f"Learners {first} to {last}" if last > first else f"Learner {first}"
    return _script(
        f"{title} of {config.run.name}: one job each.", asked, [*_prelude(where), command]
    )


def _evaluator(config: RunConfig, folder: Path) -> str:
    partition = config.where.slurm.syncer_partition or config.where.slurm.partition
    told = _dialled(config, folder).replace("learner", EVALUATOR, 1)
    return _script(
        f"Evaluates the weights of {config.run.name} while it trains.",
        [
            *_asked(config, folder, EVALUATOR, config.where.syncer),
            *_given("--partition", partition),
        ],
        [*_prelude(config.where), f"srun {_command(config.where)} {told} --supervised", "code=$?"],
    )


def _dialled(config: RunConfig, folder: Path, *options: str) -> str:
    """The command of a process that finds the shards by what they write into the run folder."""
    told = ["learner", shlex.quote(str(folder / SETTINGS)), *options]
    told += ["--syncer", shlex.quote(str(config.run.folder))]
    secret = config.syncer.token_file
    if config.syncer.principals_file is None and secret is not None:
        told += ["--token-file", shlex.quote(str(secret))]
    return " ".join(told)


def _script(title: str, asked: Iterable[str], lines: Iterable[str]) -> str:
    directives = [f"#SBATCH {option}" for option in asked]
    return "\n".join(["#!/bin/bash", f"# {title}", *directives, "", *lines, _AGAIN])


def _asked(
    config: RunConfig,
    folder: Path,
    role: str,
    gets: RoleResources,
    *,
    times: int = 1,
    hosts: int = 1,
    tasks: int = 1,
) -> list[str]:
    """What sbatch is asked for.

    Args:
        times: So many processes of the role get this each.
        hosts: So many machines get it together.
        tasks: So many tasks share it on each of them.
    """
    slurm = config.where.slurm
    log = "learner-%a" if role == "learner" else role
    each = times * (gets.memory_bytes or 0) // hosts
    return [
        f"--job-name={config.run.name}-{role}",
        f"--output={folder}/logs/{log}.log",
        "--open-mode=append",
        "--requeue",
        f"--signal=TERM@{slurm.notice_seconds}",
        f"--cpus-per-task={max(1, times * gets.cpus // (hosts * tasks))}",
        *([f"--mem={-(-each // MIB)}M"] if each else []),
        *_given("--account", slurm.account),
        *_given("--qos", slurm.qos),
        *_given("--time", slurm.time),
        *slurm.directives,
    ]


def _given(option: str, value: str) -> list[str]:
    return [f"{option}={value}"] if value else []


def _prelude(where: WhereSettings) -> list[str]:
    return [f"cd {shlex.quote(str(where.workdir))}", *where.setup]


def _command(where: WhereSettings) -> str:
    """``ddiloco``, of the environment that `setup` makes, or else of this one."""
    return "ddiloco" if where.setup else f"{shlex.quote(sys.executable)} -m decoupled_diloco.cli"


def _submitted(path: Path, *options: str) -> str:
    told = _sbatch(path.read_text(), "--parsable", *options, what=path.name)
    return told.strip().partition(";")[0]


def _sbatch(script: str, *options: str, what: str) -> str:
    return _run(["sbatch", *options], script, f"{what}: ")


def _run(command: list[str], script: str | None = None, what: str = "") -> str:
    """The output of one of Slurm's commands.

    Raises:
        ConfigError: it refuses, or Slurm does not answer.
    """
    try:
        ended = subprocess.run(
            command, input=script, capture_output=True, text=True, timeout=ANSWER_SECONDS
        )
    except FileNotFoundError:
        raise ConfigError(
            f"{command[0]} is not here: run this on a login node of the Slurm cluster"
        ) from None
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{command[0]} gives no answer within {ANSWER_SECONDS} s") from None
    if ended.returncode != 0:
        lines = [line.split("error: ")[-1] for line in ended.stderr.strip().splitlines()]
        raise ConfigError(f"{what}Slurm refuses: {'; '.join(lines) or 'it does not say why'}")
    return ended.stdout
