"""Run one process and restart it in place: in a job of a cluster, or alone on a machine.

An engine restarts a job slowly (Slurm after two minutes), and may give the machine to another job.
Therefore a process that fails restarts inside the job, as under the launcher of a whole run. The
job ends only when the run ends, when it is asked to stop, or when restarts do not help.
"""

from __future__ import annotations

import signal
import time

from decoupled_diloco.config import RunConfig
from decoupled_diloco.launch.placement import ThisMachine
from decoupled_diloco.launch.processes import open_tape
from decoupled_diloco.launch.run_folder import enter_run_folder
from decoupled_diloco.launch.supervisor import Restarts, Supervisor
from decoupled_diloco.launch.termination import INTERRUPTED, handling, interrupt

POLL_SECONDS = 0.1


def supervise(config: RunConfig, name: str, arguments: list[str]) -> int:
    """Run ``ddiloco ARGUMENTS`` under a name, and restart it when it fails.

    On SIGTERM or SIGINT the process is asked to stop, and gets the time of a learner to leave.

    Returns:
        Its last exit code.

    Raises:
        DilocoError: The run folder cannot be used.
    """
    folder = enter_run_folder(config)
    (folder / "logs").mkdir(exist_ok=True)
    with open_tape(folder, f"launcher.{name}", {"machine": "launcher"}) as tape:
        supervisor = Supervisor(ThisMachine(folder, forks=config.run.fork_server), tape)
        patience = config.learner.leave_seconds_max
        try:
            with handling(interrupt, signal.SIGTERM):
                is_learner = arguments[:1] == ["learner"]
                limits = Restarts.of_learners(config) if is_learner else Restarts()
                supervisor.start(name, [*arguments, "--stop-with-parent"], limits=limits)
                child = supervisor.children[name]
                while not (child.done or child.down):
                    time.sleep(POLL_SECONDS)
                    supervisor.poll()
        except KeyboardInterrupt:
            with handling(signal.SIG_IGN, signal.SIGINT, signal.SIGTERM):
                supervisor.stop(extra_seconds=patience)
            return INTERRUPTED
        code = child.code or 0
        if code:
            print(f"{name} stays down: {supervisor.last_words(name)}", flush=True)
        with handling(signal.SIG_IGN, signal.SIGINT, signal.SIGTERM):
            supervisor.stop()
        return code if code >= 0 else 128 - code
