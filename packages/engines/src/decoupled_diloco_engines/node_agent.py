"""Node agent of a Ray actor: keeps one part of a run going on one host.

A failed process restarts here, as under the launcher of a whole run. A part is over when the
process with the part's name ends with exit code 0. The agent gives up on this host after repeated
failures, because the host may be at fault. If the settings are rejected, it gives up for good.

A shard listens on the node on which it happens to run, and writes its address to the run folder for
the other processes. It holds a lock there for as long as its process lives. If Ray loses contact
with a shard and starts it on another node, the lock keeps the old process from writing beside its
successor. This works as far as the file system's locks do.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from decoupled_diloco.config import RunConfig, load_config
from decoupled_diloco.config.addresses import url_of
from decoupled_diloco.config.method import plan_of as merge_plan_of
from decoupled_diloco.errors import ConfigError, DilocoError
from decoupled_diloco.launch.placement import PlacedProcess, ThisMachine
from decoupled_diloco.launch.ports import free_ports
from decoupled_diloco.launch.processes import LOGGER, open_tape
from decoupled_diloco.launch.run_folder import enter_run_folder
from decoupled_diloco.launch.supervisor import Restarts, Supervisor
from decoupled_diloco.launch.termination import INTERRUPTED
from decoupled_diloco.runtime import now, runtime
from decoupled_diloco.storage.files import write_text
from decoupled_diloco.storage.shared_folder import PLACES, read_places, write_place
from decoupled_diloco.tape import TapeWriter
from decoupled_diloco.tape.samples import WeightsSaved
from decoupled_diloco_engines.ray_plan import RayPart, RayPlan

POLL_SECONDS = 0.1
LINES = 100
"""Lines at the end of a log in which the process's last error is searched."""
CHECK_SECONDS = 0.5
"""Interval between checks of a shared file that another host writes."""

LOGGER_SECONDS = 60.0
"""Time limit for the experiment logger after the end of the run."""

SHARD = "shard-"

ENDED = "ended"
"""Subfolder of the launch folder with one note per ended actor."""

ERROR_PREFIX = "error: "
"""Start of the line in which a command reports why it was rejected."""


@dataclass(frozen=True)
class Ending:
    """Result of a part on this host.

    Attributes:
        code: Exit code of its process; 0: the run is over.
        words: Its last message.
    """

    code: int
    words: str = ""

    @property
    def is_final(self) -> bool:
        """Whether a restart on another node would not help."""
        return self.code in (0, ConfigError.exit_code, INTERRUPTED)


def note_of(launch: Path, actor: str) -> Path:
    """Return the path of an actor's note."""
    return launch / ENDED / f"{actor}.json"


def read_notes(launch: Path) -> dict[str, Ending]:
    """Return the results of a launch's ended actors, by name."""
    found = {}
    for path in sorted((launch / ENDED).glob("*.json")):
        note = json.loads(path.read_text())
        found[path.stem] = Ending(note["code"], note["words"])
    return found


class RefusedElsewhere(Exception):
    """Another host of this learner was rejected, so this host will be rejected, too."""

    def __init__(self, ending: Ending) -> None:
        super().__init__(ending.words)
        self.ending = ending


class StopRequested(Exception):
    """`Keeper.end` was called during a wait."""


class Keeper:
    """One part of a run on one of its hosts.

    Args:
        plan: The plan of the run.
        part: The part.
        host: Index of this host among the part's hosts.
        address: Address of this node for other nodes.
    """

    def __init__(self, plan: RayPlan, part: RayPart, host: int, address: str) -> None:
        self.plan = plan
        self.part = part
        self.host = host
        self.address = address
        self.name = part.actors[host]
        self.state = "starting"
        self._stop_requested = threading.Event()
        self._next_check = 0.0  # of the other hosts' notes

    def end(self) -> None:
        """Ask the process to flush and end."""
        self._stop_requested.set()

    def run(self) -> Ending:
        """Run the part's processes and restart failed ones; return when a restart cannot help."""
        try:
            config = self._settings()
            folder = enter_run_folder(config)
            (folder / "logs").mkdir(exist_ok=True)
            header = {"machine": "launcher"}
            with (
                self._shard_lock(folder) as descriptors,
                open_tape(folder, f"launcher.{self.name}", header) as tape,
            ):
                return self._supervise(config, folder, descriptors, tape)
        except StopRequested:
            return Ending(INTERRUPTED)
        except RefusedElsewhere as refused:
            return refused.ending
        except DilocoError as error:
            return Ending(error.exit_code, str(error))

    def wait(self, until: Callable[[], bool], state: str, seconds: float | None = None) -> None:
        """Wait for a condition, and report `state` in the meantime.

        Raises:
            StopRequested: `end` was called.
            RefusedElsewhere: Another host of the part was rejected.
        """
        began, before = now(), self.state
        while not until() and (seconds is None or now() < began + seconds):
            self.state = state
            self._pause(CHECK_SECONDS)
        self.state = before

    def _pause(self, seconds: float) -> None:
        if self._stop_requested.wait(seconds):
            raise StopRequested
        if len(self.part.actors) > 1 and now() >= self._next_check:
            self._next_check = now() + CHECK_SECONDS
            notes = read_notes(self.plan.settings.parent)
            for name in self.part.actors:
                if name in notes and notes[name].code == ConfigError.exit_code:
                    raise RefusedElsewhere(notes[name])

    def _settings(self) -> RunConfig:
        path = self.plan.settings
        self.wait(path.exists, f"waiting for {path}: the launch folder must be on all nodes")
        config = load_config(path)
        workdir = config.launch.workdir or Path()
        self.wait(
            workdir.is_dir, f"waiting for {workdir}: workdir in [launch] must be on all nodes"
        )
        os.chdir(workdir)
        return config

    @contextlib.contextmanager
    def _shard_lock(self, folder: Path) -> Iterator[tuple[int, ...]]:
        """Lock the shard for its process, which inherits the lock; shard 0 locks the whole run."""
        if not self.name.startswith(SHARD):
            yield ()
            return
        (folder / PLACES).mkdir(exist_ok=True)
        path = folder / ("lock" if self.name == "shard-0" else f"{PLACES}/{self.name}.lock")
        with path.open("a+") as file:
            self.wait(lambda: _locked(file), "waiting for its former process to end")
            yield (file.fileno(),)

    def _supervise(
        self, config: RunConfig, folder: Path, descriptors: tuple[int, ...], tape: TapeWriter
    ) -> Ending:
        supervisor = Supervisor(_LocalMachine(self, config, folder, descriptors), tape)
        patience = config.learner.leave_seconds_max
        try:
            for name, command in self.part.commands.items():
                own = self.name if name == self.part.name else name
                is_learner = command.arguments[0] == "learner"
                limits = Restarts.of_learners(config) if is_learner else Restarts()
                supervisor.start(own, [*command.arguments, "--stop-with-parent"], limits=limits)
            main = supervisor.children[self.name]
            while not (main.done or main.down):
                self.state = "running" if main.running else "restarting"
                self._pause(POLL_SECONDS)
                supervisor.poll()
            self.state = "ending"
            words = supervisor.last_words(self.name) if main.code else ""
            if main.code == 0:
                self._finish_run(config, folder, tape, supervisor)
            return Ending(main.code or 0, words)
        finally:
            self.state = "ending"
            supervisor.stop(extra_seconds=patience)

    def _finish_run(
        self, config: RunConfig, folder: Path, tape: TapeWriter, supervisor: Supervisor
    ) -> None:
        """On shard 0, which ends last, assemble the weights and let the logger finish."""
        if self.name != "shard-0":
            return
        from decoupled_diloco.syncer.result import assemble, read_layout  # torch is slow

        plan = merge_plan_of(read_layout(folder), config)
        weights = assemble(folder, plan, config.syncer.shards)
        tape.sample(now(), WeightsSaved(str(weights)))
        supervisor.retire()
        logger = supervisor.children.get(LOGGER)
        deadline = now() + LOGGER_SECONDS
        while logger is not None and logger.running and now() < deadline:
            self._stop_requested.wait(CHECK_SECONDS)
            supervisor.poll()


class _LocalMachine(ThisMachine):
    """Processes on this host; it replaces placeholders in their arguments."""

    def __init__(
        self, keeper: Keeper, config: RunConfig, folder: Path, descriptors: tuple[int, ...]
    ) -> None:
        super().__init__(folder, descriptors)
        self._keeper = keeper
        self._config = config
        self._module = ""
        self._met = ""  # contents of the rendezvous file at the last start on this host

    def start(self, name: str, arguments: list[str]) -> PlacedProcess:
        part = self._keeper.part
        command = part.commands[part.name if name == self._keeper.name else name]
        self._module = command.module
        for word, value in self._placeholders(arguments).items():
            arguments = [each.replace(word, value) for each in arguments]
        return super().start(name, arguments)

    def last_words(self, name: str) -> str:
        """Return a rank's own error line, if any, instead of torchrun's report."""
        log = self.folder / "logs" / f"{name}.log"
        known = self._multi_host and log.exists()
        lines = log.read_text(errors="replace").splitlines() if known else []
        errors = [line for line in lines[-LINES:] if line.startswith(ERROR_PREFIX)]
        return errors[-1] if errors else super().last_words(name)

    @property
    def _multi_host(self) -> bool:
        return len(self._keeper.part.actors) > 1

    def command(self, arguments: list[str]) -> list[str]:
        return [sys.executable, "-m", self._module, *arguments]

    def _placeholders(self, arguments: list[str]) -> dict[str, str]:
        """Return the values of the placeholders that these arguments contain."""
        first = str(self._keeper.host == 0).lower()
        known = {"{host}": self._keeper.address, "{first}": first}
        text = " ".join(arguments)
        if "{port}" in text:
            known["{port}"] = str(self._port())
        if "{addresses}" in text:
            known["{addresses}"] = ",".join(self._addresses(int(known["{port}"])))
        if "{meeting}" in text:
            known["{meeting}"] = self._rendezvous()
        return known

    def _port(self) -> int:
        """Return the configured port, or a free one of this host."""
        port, shard = self._config.syncer.port, self._shard
        return port + shard if port else _free_port()

    @property
    def _shard(self) -> int:
        return int(self._keeper.name.removeprefix(SHARD))

    def _addresses(self, port: int) -> list[str]:
        """Publish this shard's address; return all shards' addresses after all have started."""
        address = url_of(self._keeper.address, port, self._config.tls.scheme)
        write_place(self.folder, self._keeper.name, address)
        shards = self._config.syncer.shards
        self._keeper.wait(
            lambda: len(read_places(self.folder)) >= shards, "waiting for the other shards"
        )
        return [of_shard[-1] for of_shard in read_places(self.folder)]

    def _rendezvous(self) -> str:
        """Return the rendezvous address of this learner's hosts; the first host picks it."""
        path = self.folder / PLACES / "meetings" / self._keeper.part.name
        path.parent.mkdir(parents=True, exist_ok=True)
        if self._keeper.host == 0:
            address = f"{self._keeper.address}:{_free_port()}"
            # The id makes each start's contents unique, so that the others do not reuse an old
            # address.
            write_text(path, f"{address} {runtime().unique_id()}")
            return address

        def is_new() -> bool:
            return path.exists() and path.read_text() != self._met

        self._keeper.wait(is_new, "waiting for its first host")
        self._met = path.read_text()
        return self._met.split()[0]


def _locked(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _free_port() -> int:
    return free_ports("0.0.0.0", [0])[0]
