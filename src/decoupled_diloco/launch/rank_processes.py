"""The ranks of one learner as processes of this machine.

The process that the supervisor has started becomes the ranks' *head*, which does not train. It
forwards SIGTERM to rank 0, which stops all ranks at the same step. If one rank fails, the head ends
the others. It exits with the learner's exit code, and only the supervisor restarts the learner.
After each restart the ranks are new processes with a new rendezvous store. All are in the head's
process group, and they end with the head even if it is killed.

Ranks have the environment of torchrun's workers. Therefore a learner whose ranks torchrun has
started, on one or several machines, needs no head. A Slurm step with one task per rank needs none
either: the tasks read their ranks from Slurm's environment, and srun returns the highest exit code.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from types import FrameType
from typing import NoReturn

from decoupled_diloco.errors import FINAL_EXIT_CODES

GRACE_SECONDS = 5
"""Time that the other ranks have to end after one has failed; then the head kills them."""

STOP_WITH_PARENT = "--stop-with-parent"

HOST = "127.0.0.1"


def is_rank() -> bool:
    """Whether this process was started as a rank, by a head or by torchrun."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def take_place_in_step(ranks: int) -> bool:
    """Make this process a rank if it is a task of a Slurm step with one task per rank.

    The ranks connect to MASTER_ADDR and MASTER_PORT, where rank 0 listens.

    Returns:
        Whether this process is a rank now.
    """
    if ranks == 1 or os.environ.get("SLURM_STEP_NUM_TASKS") != str(ranks):
        return False
    here = os.environ.get("SLURM_NTASKS_PER_NODE", str(ranks))
    rank, local = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_LOCALID"])
    os.environ.update(_numbers(rank, local, ranks, int(here)))
    return True


def become_ranks(ranks: int, watch: Callable[[], None] | None) -> None:
    """Start the ranks and return in each of them; the head does not return.

    A rank's standard input closes when the head ends. If this process has imported torch, the
    ranks are forked. Otherwise they are new processes with the same command line.

    Args:
        ranks: The number of ranks.
        watch: Called in the head after the ranks are started; starts to watch for its end.
    """
    alive, ends = os.pipe()
    with socket.create_server((HOST, 0), backlog=ranks) as meeting:
        port = meeting.getsockname()[1]
        pids: list[int] = []
        for rank in range(ranks):
            environment = _environment(rank, ranks, port)
            if "torch" not in sys.modules:
                pids.append(_spawn(environment, alive))
                continue
            pid = os.fork()
            if pid == 0:
                os.dup2(alive, 0)
                os.close(alive)
                os.close(ends)
                os.environ.update(environment)
                signal.signal(signal.SIGINT, signal.SIG_IGN)  # the head handles Ctrl-C
                return
            pids.append(pid)
        os.close(alive)
        if watch is not None:
            watch()
        _lead(pids, meeting)


def _environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    """Return a rank's environment variables, as torchrun sets them."""
    return {
        **_numbers(rank, rank, ranks, ranks),
        "MASTER_ADDR": HOST,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # use the head's store; rank 0 opens none
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


def _numbers(rank: int, local: int, ranks: int, here: int) -> dict[str, str]:
    numbers = {"RANK": rank, "LOCAL_RANK": local, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": here}
    variables = {name: str(number) for name, number in numbers.items()}
    return {**variables, "TORCHELASTIC_RUN_ID": "ddiloco"}


def _spawn(environment: Mapping[str, str], alive: int) -> int:
    command = sys.orig_argv if STOP_WITH_PARENT in sys.argv else [*sys.orig_argv, STOP_WITH_PARENT]
    return os.posix_spawn(
        sys.executable,
        command,
        {**os.environ, **environment},
        file_actions=[(os.POSIX_SPAWN_DUP2, alive, 0)],
    )


def _lead(pids: list[int], meeting: socket.socket) -> NoReturn:
    """Wait for all ranks, and exit with the code of the first failed one."""

    def end_all(number: int, frame: FrameType | None) -> None:
        for pid in living:
            _send(pid, signal.SIGKILL)

    def pass_on(number: int, frame: FrameType | None) -> None:
        if pids[0] in living:
            _send(pids[0], signal.SIGTERM)

    living = set(pids)
    signal.signal(signal.SIGALRM, end_all)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, pass_on)
    store = _serve(meeting, len(pids))
    failed: list[int] = []
    while living:
        pid, status = os.wait()
        living.discard(pid)
        code = os.waitstatus_to_exitcode(status)
        if code != 0:
            failed.append(code)
            if len(failed) == 1:
                signal.alarm(GRACE_SECONDS)
    del store
    sys.stdout.flush()
    os._exit(_exit_code(failed))


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _serve(meeting: socket.socket, ranks: int) -> object:
    """Serve the ranks' rendezvous store.

    Call it after all forks: it starts threads, and a fork would copy their locks.
    """
    from torch._C._distributed_c10d import TCPStore

    return TCPStore(
        HOST,
        meeting.getsockname()[1],
        ranks,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=meeting.detach(),
    )


def _exit_code(failed: list[int]) -> int:
    """Return the learner's exit code.

    Args:
        failed: Exit codes of the failed ranks, in order. A code that prevents a restart takes
            precedence; otherwise the first one counts.
    """
    final = [code for code in FINAL_EXIT_CODES if code in failed]
    first = next(iter([*final, *failed]), 0)
    return first if first >= 0 else 128 - first
