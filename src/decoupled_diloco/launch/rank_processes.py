"""The ranks of one learner as processes of this machine.

The process that the supervisor has started becomes their *head*: it trains nothing, passes SIGTERM
on to rank 0, which has the others stop at the same step, and ends all as soon as one fails. What it
ends with is the learner's exit code, and who starts the learner again is the supervisor alone: each
life has new processes and a new store to meet in. All are in the head's process group, and end when
it does, however it ends.

Ranks are told what torchrun tells its workers, so a learner whose ranks torchrun has started, on
one machine or on several, needs no head. Nor do the tasks of a step of Slurm, if they are as many:
they take their places from what Slurm tells them, and srun ends with the highest exit code.
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
"""How long the other ranks may take to end after one has failed."""

STOP_WITH_PARENT = "--stop-with-parent"

HOST = "127.0.0.1"


def is_rank() -> bool:
    """Whether this process was started as a rank, by a head or by torchrun."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def take_place_in_step(ranks: int) -> bool:
    """Makes this process a rank if it is a task of a Slurm step of so many; whether it is.

    They meet at MASTER_ADDR and MASTER_PORT, where rank 0 listens.
    """
    if ranks == 1 or os.environ.get("SLURM_STEP_NUM_TASKS") != str(ranks):
        return False
    here = os.environ.get("SLURM_NTASKS_PER_NODE", str(ranks))
    rank, local = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_LOCALID"])
    os.environ.update(_numbers(rank, local, ranks, int(here)))
    return True


def become_ranks(ranks: int, watch: Callable[[], None] | None) -> None:
    """Starts the ranks; returns in each of them, whose standard input closes when the head ends.

    Ranks are forked where this process has itself been forked from one that had imported torch;
    else they are processes of the same command line.

    Args:
        watch: Begins to look whether the head is to end, once there is one.
    """
    alive, ends = os.pipe()
    with socket.create_server((HOST, 0), backlog=ranks) as meeting:
        port = meeting.getsockname()[1]
        pids: list[int] = []
        for rank in range(ranks):
            told = _told(rank, ranks, port)
            if "torch" not in sys.modules:
                pids.append(_spawn(told, alive))
                continue
            pid = os.fork()
            if pid == 0:
                os.dup2(alive, 0)
                os.close(alive)
                os.close(ends)
                os.environ.update(told)
                signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's comes by the head
                return
            pids.append(pid)
        os.close(alive)
        if watch is not None:
            watch()
        _lead(pids, meeting)


def _told(rank: int, ranks: int, port: int) -> dict[str, str]:
    """The environment of a rank, as torchrun makes it."""
    return {
        **_numbers(rank, rank, ranks, ranks),
        "MASTER_ADDR": HOST,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the head's; rank 0 opens none
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


def _numbers(rank: int, local: int, ranks: int, here: int) -> dict[str, str]:
    numbers = {"RANK": rank, "LOCAL_RANK": local, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": here}
    told = {name: str(number) for name, number in numbers.items()}
    return {**told, "TORCHELASTIC_RUN_ID": "ddiloco"}


def _spawn(told: Mapping[str, str], alive: int) -> int:
    command = sys.orig_argv if STOP_WITH_PARENT in sys.argv else [*sys.orig_argv, STOP_WITH_PARENT]
    return os.posix_spawn(
        sys.executable,
        command,
        {**os.environ, **told},
        file_actions=[(os.POSIX_SPAWN_DUP2, alive, 0)],
    )


def _lead(pids: list[int], meeting: socket.socket) -> NoReturn:
    """Waits for all ranks, and ends as the first that failed."""

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
    """Where the ranks find one another. Its threads begin after all forks."""
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
    """Of the ranks that failed, in order: what keeps a learner down, or the first one's code."""
    final = [code for code in FINAL_EXIT_CODES if code in failed]
    first = next(iter([*final, *failed]), 0)
    return first if first >= 0 else 128 - first
