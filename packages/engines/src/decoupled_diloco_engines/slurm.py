"""Slurm engine: one job for the syncer, and one per relay and per learner.

Equal learners form a job array. A failed process restarts inside its job
(`launch/supervised_process`). Ranks on several machines are tasks of one step
(`launch/rank_processes`), and restart together. A job that receives SIGTERM, before its time limit
or by a preemption, flushes and is requeued. A job that fails repeatedly is requeued, too, because
its machine may be the reason. All jobs share the run folder, to which the syncer and each relay
write their addresses. The other jobs may start after the syncer's job has started.
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
from decoupled_diloco.config.launch import LaunchSettings, RoleResources
from decoupled_diloco.config.run import SiteSettings
from decoupled_diloco.errors import ConfigError
from decoupled_diloco.launch.engine import SETTINGS, Job, JobState
from decoupled_diloco.launch.processes import EVALUATOR, relay_process
from decoupled_diloco.launch.run_folder import RunFolder
from decoupled_diloco.launch.supervisor import Restarts
from decoupled_diloco.runtime import now
from decoupled_diloco.storage.shared_folder import RELAY
from decoupled_diloco.units import MIB

SYNCER = "syncer"
REQUEUES_MAX = 50
"""Maximum number of requeues of a job that fails without SIGTERM."""

MEETING_PORT = 29_500
"""First of the thousand rendezvous ports of ranks on several machines."""

ANSWER_SECONDS = 60
"""Time limit of a Slurm command."""

DRAIN_SECONDS = 120.0
"""Time for the learners' jobs to end before the syncer's job is cancelled."""

_AGAIN = f"""\
# 0: the run is over. 2: the settings are wrong. 130: SIGTERM before a time limit or a preemption.
if {{preempted}} ||
   {{{{ [ $code != 0 ] && [ $code != 2 ] && [ $code != 130 ] &&
      [ "${{{{SLURM_RESTART_COUNT:-0}}}}" -lt {REQUEUES_MAX} ]; }}}}
then
    scontrol requeue "$SLURM_JOB_ID"   # Slurm refuses this for a cancelled job, as intended
fi
exit $code
"""

LASTS_SECONDS = 60
"""Failures after a longer time than this are not consecutive."""

_TASK = (
    'trap : TERM; "$@"; code=$?; case $code in 0|130) ;; *) echo $code >> "$0";; esac; exit $code'
)
"""One rank, which receives SIGTERM itself; the exit codes of failures are recorded in order."""

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
    # Ranks that end because another one failed exit as after SIGTERM, so use the first failure.
    if [ -s "$failed" ]; then code=$(head -n 1 "$failed"); fi
    if [ $((SECONDS - begun)) -gt {LASTS_SECONDS} ]; then in_a_row=0; fi
    in_a_row=$((in_a_row + 1))
    [ $code != 0 ] && [ $code != 2 ] && [ $code != 130 ] && [ $in_a_row -le {{most}} ]
do
    echo "a rank failed (exit code $code): all ranks restart"
done
"""
"""Script that runs the ranks on all hosts, and restarts them after a failure like the supervisor.
"""


class Slurm:
    """Slurm engine; see `PlacingEngine`."""

    leaves = ("*.sbatch",)

    def require(self, config: RunConfig) -> None:
        """Let Slurm validate each job without submitting it."""
        if shutil.which("sbatch") is None:
            raise ConfigError(
                "sbatch is not installed: run this on a login node of a Slurm cluster, or choose "
                "another backend in [launch]"
            )
        for name, script in self.files(config, Path("/nowhere.launch")).items():
            _sbatch(script, "--test-only", "--output=/dev/null", what=name)

    def files(self, config: RunConfig, folder: Path) -> Mapping[str, str]:
        files = {f"{SYNCER}.sbatch": _syncer(config, folder)}
        for site in config.sites:
            files[f"{relay_process(site.name)}.sbatch"] = _relay(config, folder, site)
        others = [index for index in range(config.run.learners) if not config.relay_of(index)]
        groups = [list(group) for _, group in groupby(others, key=config.learner.ranks_of)]
        for indices in (*(sorted(site.learners) for site in config.sites), *groups):
            name = "learners" if len(indices) == config.run.learners else f"learners-{indices[0]}"
            files[f"{name}.sbatch"] = _learners(config, folder, indices)
        if config.run.evaluator:
            files[f"{EVALUATOR}.sbatch"] = _evaluator(config, folder)
        return files

    def copies(self, config: RunConfig) -> Mapping[str, Path]:
        """Return no files: the jobs share the file system."""
        return {}

    def logs(self, config: RunConfig, folder: Path) -> str:
        return f"{folder}/logs"

    def submit(self, config: RunConfig, folder: Path, *, resume: bool = False) -> list[Job]:
        """Submit the syncer's job, and the others to start after it."""
        if resume:
            raise ConfigError(
                "--resume is not supported on Slurm: leave it out, or continue the run on one "
                f"machine with ddiloco train --resume {config.run.folder}"
            )
        # Like any command that starts a run, move aside an earlier run in the folder, now.
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
        # Do not pass job numbers: Slurm forgets a job some minutes after its end, then rejects the
        # list.
        output = _run(["squeue", "--all", "--array", "--noheader", "--format=%F %K %T %R", "--me"])
        names = {job.id: job.name for job in jobs}
        found = []
        for line in output.splitlines():
            number, element, state, where = (*line.split(maxsplit=3), "")[:4]
            if number in names:
                name = f"learner-{element}" if element.isdigit() else names[number]
                found.append(JobState(name, number, state, where.strip("()")))
        return found

    def stop(self, jobs: Sequence[Job]) -> None:
        """Cancel the jobs, those of relays and syncer last: they pass on the last contributions.

        Slurm waits `KillWait` (30 s by default) between SIGTERM and SIGKILL.
        """
        first = [job for job in jobs if job.name != SYNCER and not job.name.startswith(RELAY)]
        deadline = now() + DRAIN_SECONDS
        if first:
            _run(["scancel", *(job.id for job in first)])
        while self.states(first) and now() < deadline:
            time.sleep(1.0)
        _run(["scancel", *(job.id for job in jobs)])


def _syncer(config: RunConfig, folder: Path) -> str:
    run, processes = shlex.quote(str(config.run.folder)), config.syncer.shards
    processes *= 1 + config.syncer.standby
    command, slurm = _command(config.launch), config.launch.slurm
    settings = shlex.quote(str(folder / SETTINGS))
    return _script(
        f"The shards of {config.run.name}; a failed shard restarts in this job.",
        [
            *_sbatch_options(config, folder, SYNCER, config.launch.syncer, times=processes),
            *_given("--partition", slurm.syncer_partition or slurm.partition),
        ],
        [
            *_prelude(config.launch),
            f'if [ "${{SLURM_RESTART_COUNT:-0}}" -gt 0 ] && [ -e {run}/run.toml ]; then',
            f"    srun --ntasks=1 {command} syncer {run} --resume",
            "else",
            f"    srun --ntasks=1 {command} syncer {settings}",
            "fi",
            "code=$?",
        ],
    )


def _learners(config: RunConfig, folder: Path, indices: Sequence[int]) -> str:
    launch, first, last = config.launch, indices[0], indices[-1]
    hosts, ranks = launch.learner.hosts, config.learner.ranks_of(first)
    tasks = ranks // hosts if hosts > 1 else 1  # On one host the ranks are children of one task.
    array = f"{first}-{last}" if len(indices) == last - first + 1 else ",".join(map(str, indices))
    site = config.site_of(first)
    options = _sbatch_options(config, folder, "learner", launch.learner, hosts=hosts, tasks=tasks)
    options += [f"--array={array}", f"--nodes={hosts}", f"--ntasks-per-node={tasks}"]
    options += _given("--gpus-per-node", str(launch.learner.gpus // hosts or ""))
    options += _given("--partition", launch.slurm.partition)
    options += site.directives if site else ()
    role = _with_syncer(config, folder, "learner", '--index "$SLURM_ARRAY_TASK_ID"')
    ddiloco = f"{_command(launch)} {role}"
    command = f"srun {ddiloco} --supervised\ncode=$?"
    if hosts > 1:
        failed = f"{shlex.quote(f'{folder}/logs')}/learner-$SLURM_ARRAY_TASK_ID.failed"
        most = Restarts.of_learners(config).failures_max
        command = _TOGETHER.format(failed=failed, command=ddiloco, most=most).rstrip()
    title = f"Learners {array}" if len(indices) > 1 else f"Learner {first}"
    return _script(
        f"{title} of {config.run.name}: one job each.",
        options,
        [*_prelude(launch), command],
        config.learner.max_preemptions,
    )


def _relay(config: RunConfig, folder: Path, site: SiteSettings) -> str:
    name = relay_process(site.name)
    command = _with_syncer(
        config, folder, "relay", f"--name {site.name} --port {site.port}", option="--upstream"
    )
    return _script(
        f"The relay of {site.name} in {config.run.name}; it restarts in this job.",
        [
            *_sbatch_options(config, folder, name, config.launch.syncer),
            *_given("--partition", config.launch.slurm.partition),
            *site.directives,
        ],
        [
            *_prelude(config.launch),
            f"srun {_command(config.launch)} {command} --supervised",
            "code=$?",
        ],
    )


def _evaluator(config: RunConfig, folder: Path) -> str:
    partition = config.launch.slurm.syncer_partition or config.launch.slurm.partition
    arguments = _with_syncer(config, folder, EVALUATOR)
    return _script(
        f"Evaluates the weights of {config.run.name} during training.",
        [
            *_sbatch_options(config, folder, EVALUATOR, config.launch.syncer),
            *_given("--partition", partition),
        ],
        [
            *_prelude(config.launch),
            f"srun {_command(config.launch)} {arguments} --supervised",
            "code=$?",
        ],
    )


def _with_syncer(
    config: RunConfig, folder: Path, role: str, *options: str, option: str = "--syncer"
) -> str:
    """Return the command line of a process that finds the shards by the run folder."""
    words = [role, shlex.quote(str(folder / SETTINGS)), *options]
    words += [option, shlex.quote(str(config.run.folder))]
    secret = config.syncer.token_file
    if config.syncer.principals_file is None and secret is not None:
        words += ["--auth-token-file", shlex.quote(str(secret))]
    return " ".join(words)


def _script(
    title: str, options: Iterable[str], lines: Iterable[str], preemptions_max: int | None = None
) -> str:
    directives = [f"#SBATCH {option}" for option in options]
    preempted = "[ $code = 130 ]"
    if preemptions_max is not None:
        count = '"${SLURM_RESTART_COUNT:-0}"'
        preempted = f"{{ {preempted} && [ {count} -lt {preemptions_max} ]; }}"
    again = _AGAIN.format(preempted=preempted)
    return "\n".join(["#!/bin/bash", f"# {title}", *directives, "", *lines, again])


def _sbatch_options(
    config: RunConfig,
    folder: Path,
    role: str,
    gets: RoleResources,
    *,
    times: int = 1,
    hosts: int = 1,
    tasks: int = 1,
) -> list[str]:
    """Return the options of sbatch.

    Args:
        config: The run's settings.
        folder: The launch folder.
        role: Role of the processes.
        gets: Resources of one process or learner.
        times: Number of processes that get these resources each.
        hosts: Number of machines that share them.
        tasks: Number of tasks that share them on each machine.
    """
    slurm = config.launch.slurm
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


def _prelude(launch: LaunchSettings) -> list[str]:
    return [f"cd {shlex.quote(str(launch.workdir))}", *launch.setup]


def _command(launch: LaunchSettings) -> str:
    """Return ``ddiloco`` if `setup` provides the environment, otherwise this Python's module."""
    return "ddiloco" if launch.setup else f"{shlex.quote(sys.executable)} -m decoupled_diloco.cli"


def _submitted(path: Path, *options: str) -> str:
    output = _sbatch(path.read_text(), "--parsable", *options, what=path.name)
    return output.strip().partition(";")[0]


def _sbatch(script: str, *options: str, what: str) -> str:
    return _run(["sbatch", *options], script, f"{what}: ")


def _run(command: list[str], script: str | None = None, what: str = "") -> str:
    """Return the output of a Slurm command.

    Raises:
        ConfigError: Slurm rejects the command, or does not answer.
    """
    try:
        ended = subprocess.run(
            command, input=script, capture_output=True, text=True, timeout=ANSWER_SECONDS
        )
    except FileNotFoundError:
        raise ConfigError(
            f"{command[0]} is not installed: run this on a login node of the Slurm cluster"
        ) from None
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{command[0]} did not answer within {ANSWER_SECONDS} s") from None
    if ended.returncode != 0:
        lines = [line.split("error: ")[-1] for line in ended.stderr.strip().splitlines()]
        raise ConfigError(f"{what}Slurm rejects it: {'; '.join(lines) or 'no reason given'}")
    return ended.stdout
