"""One process of a run, started again where it was: in a job of a cluster, or on a lone machine.

An engine that starts a job again takes its time (Slurm two minutes), and gives the machine away
meanwhile. So what fails begins again inside the job, as under the launcher of a whole run, and a
job ends only when the run is over, when it is told to, or when starting again does not help.
"""

from __future__ import annotations

import signal
import time

from decoupled_diloco.config import RunConfig
from decoupled_diloco.launch.placement import ThisMachine
from decoupled_diloco.launch.processes import open_tape
from decoupled_diloco.launch.run_folder import enter_run_folder
from decoupled_diloco.launch.supervisor import Supervisor
from decoupled_diloco.launch.termination import INTERRUPTED, handling, interrupt

POLL_SECONDS = 0.1


def supervise(config: RunConfig, name: str, arguments: list[str]) -> int:
    """Runs ``ddiloco ARGUMENTS`` under a name, again when it fails; returns its last exit code.

    On SIGTERM or SIGINT it is told to go, and has the time that a learner has for that.

    Raises:
        Error: the run folder cannot be used.
    """
    folder = enter_run_folder(config)
    (folder / "logs").mkdir(exist_ok=True)
    with open_tape(folder, f"launcher.{name}", {"machine": "launcher"}) as tape:
        supervisor = Supervisor(ThisMachine(folder, forks=config.run.fork_server), tape)
        patience = config.learner.leave_seconds_max
        try:
            with handling(interrupt, signal.SIGTERM):
                supervisor.start(name, [*arguments, "--stop-with-parent"])
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
