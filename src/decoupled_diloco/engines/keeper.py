"""Keeps a part of a run going on one host: what an actor of Ray does there.

What fails begins again here, as under the launcher of a whole run. A part is over when the process
with its own name ends with 0. It is given up here when it fails again and again, since the host may
be at fault, and for good when its settings are refused.

A shard listens where it happens to run, and writes that down in the run folder, which the others
read. It holds a lock there for as long as its process lives, so that a shard which Ray takes for
lost, and has started elsewhere, cannot write beside its successor, as far as the file system's
locks reach.
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
from decoupled_diloco.engines.ray_plan import RayPart, RayPlan
from decoupled_diloco.errors import ConfigError, Error
from decoupled_diloco.launch.folder import enter_run_folder
from decoupled_diloco.launch.placement import PlacedProcess, ThisMachine
from decoupled_diloco.launch.ports import free_ports
from decoupled_diloco.launch.processes import LOGGER, open_tape
from decoupled_diloco.launch.supervisor import Supervisor
from decoupled_diloco.launch.termination import INTERRUPTED
from decoupled_diloco.observe.samples import WeightsSaved
from decoupled_diloco.observe.tape import TapeWriter
from decoupled_diloco.runtime import now, runtime
from decoupled_diloco.storage.files import write_text
from decoupled_diloco.storage.shared_folder import PLACES, read_places, write_place

POLL_SECONDS = 0.1
LINES = 100
"""How many lines of a log are about its process's last end."""
LOOK_SECONDS = 0.5
"""How often a shared file is looked at that another host has to write."""

LOGGER_SECONDS = 60.0
"""How long the log of experiments may take after the run is over."""

SHARD = "shard-"

ENDED = "ended"
"""The folder in the launch folder that says how each actor has ended."""

SENTENCE = "error: "
"""What a line begins with by which a command says why it was refused."""


@dataclass(frozen=True)
class HowEnded:
    """How a part has ended on this host.

    Attributes:
        code: Exit code of its process; 0: the run is over.
        words: What it said last.
    """

    code: int
    words: str = ""

    @property
    def is_final(self) -> bool:
        """Whether it would not help to start it again elsewhere."""
        return self.code in (0, ConfigError.exit_code, INTERRUPTED)


def note_of(launch: Path, actor: str) -> Path:
    """Where an actor's end is written down."""
    return launch / ENDED / f"{actor}.json"


def read_notes(launch: Path) -> dict[str, HowEnded]:
    """How the actors of a launch have ended that have; by name."""
    found = {}
    for path in sorted((launch / ENDED).glob("*.json")):
        told = json.loads(path.read_text())
        found[path.stem] = HowEnded(told["code"], told["words"])
    return found


class RefusedElsewhere(Exception):
    """Another host of this learner was refused: it has ended like this one will."""

    def __init__(self, how: HowEnded) -> None:
        super().__init__(how.words)
        self.how = how


class ToldToEnd(Exception):
    """`Keeper.end` was called while something was waited for."""


class Keeper:
    """One part of a run on one of its hosts.

    Args:
        plan: Of the run.
        part: Which.
        host: The how-manieth of the part's hosts this is.
        address: By which the other nodes reach this one.
    """

    def __init__(self, plan: RayPlan, part: RayPart, host: int, address: str) -> None:
        self.plan = plan
        self.part = part
        self.host = host
        self.address = address
        self.name = part.actors[host]
        self.state = "starting"
        self._told = threading.Event()
        self._look_at = 0.0  # at the other hosts' notes

    def end(self) -> None:
        """Has the process hand in and end."""
        self._told.set()

    def run(self) -> HowEnded:
        """Runs the part's processes, again when they fail, for as long as that makes sense."""
        try:
            config = self._settings()
            folder = enter_run_folder(config)
            (folder / "logs").mkdir(exist_ok=True)
            header = {"machine": "launcher"}
            with (
                self._alone(folder) as descriptors,
                open_tape(folder, f"launcher.{self.name}", header) as tape,
            ):
                return self._supervise(config, folder, descriptors, tape)
        except ToldToEnd:
            return HowEnded(INTERRUPTED)
        except RefusedElsewhere as refused:
            return refused.how
        except Error as error:
            return HowEnded(error.exit_code, str(error))

    def wait(self, until: Callable[[], bool], state: str, seconds: float | None = None) -> None:
        """Waits for something; says so as long as it does.

        Raises:
            ToldToEnd: told to end meanwhile.
            RefusedElsewhere: another host of the part was refused meanwhile.
        """
        began, before = now(), self.state
        while not until() and (seconds is None or now() < began + seconds):
            self.state = state
            self._pause(LOOK_SECONDS)
        self.state = before

    def _pause(self, seconds: float) -> None:
        if self._told.wait(seconds):
            raise ToldToEnd
        if len(self.part.actors) > 1 and now() >= self._look_at:
            self._look_at = now() + LOOK_SECONDS
            notes = read_notes(self.plan.settings.parent)
            for name in self.part.actors:
                if name in notes and notes[name].code == ConfigError.exit_code:
                    raise RefusedElsewhere(notes[name])

    def _settings(self) -> RunConfig:
        path = self.plan.settings
        self.wait(path.exists, f"waits for {path}: the launch folder must be on all nodes")
        config = load_config(path)
        workdir = config.where.workdir or Path()
        self.wait(workdir.is_dir, f"waits for {workdir}: workdir in [where] must be on all nodes")
        os.chdir(workdir)
        return config

    @contextlib.contextmanager
    def _alone(self, folder: Path) -> Iterator[tuple[int, ...]]:
        """The lock that the process of a shard holds; shard 0 holds that of the whole run."""
        if not self.name.startswith(SHARD):
            yield ()
            return
        (folder / PLACES).mkdir(exist_ok=True)
        path = folder / ("lock" if self.name == "shard-0" else f"{PLACES}/{self.name}.lock")
        with path.open("a+") as file:
            self.wait(lambda: _locked(file), "waits for its former process to end")
            yield (file.fileno(),)

    def _supervise(
        self, config: RunConfig, folder: Path, descriptors: tuple[int, ...], tape: TapeWriter
    ) -> HowEnded:
        supervisor = Supervisor(_Here(self, config, folder, descriptors), tape)
        patience = config.learner.leave_seconds_max
        try:
            for name, command in self.part.commands.items():
                own = self.name if name == self.part.name else name
                supervisor.start(own, [*command.arguments, "--stop-with-parent"])
            main = supervisor.children[self.name]
            while not (main.done or main.down):
                self.state = "running" if main.running else "starting again"
                self._pause(POLL_SECONDS)
                supervisor.poll()
            self.state = "ending"
            words = supervisor.last_words(self.name) if main.code else ""
            if main.code == 0:
                self._is_over(config, folder, tape, supervisor)
            return HowEnded(main.code or 0, words)
        finally:
            self.state = "ending"
            supervisor.stop(extra_seconds=patience)

    def _is_over(
        self, config: RunConfig, folder: Path, tape: TapeWriter, supervisor: Supervisor
    ) -> None:
        """The coordinator ends last: every share of the result is in the run folder."""
        if self.name != "shard-0":
            return
        from decoupled_diloco.syncer.result import assemble, read_layout  # torch takes seconds

        plan = merge_plan_of(read_layout(folder), config)
        weights = assemble(folder, plan, config.syncer.shards)
        tape.sample(now(), WeightsSaved(str(weights)))
        supervisor.retire()
        logger = supervisor.children.get(LOGGER)
        deadline = now() + LOGGER_SECONDS
        while logger is not None and logger.running and now() < deadline:
            self._told.wait(LOOK_SECONDS)
            supervisor.poll()


class _Here(ThisMachine):
    """Processes on this host, told what is known only here."""

    def __init__(
        self, keeper: Keeper, config: RunConfig, folder: Path, descriptors: tuple[int, ...]
    ) -> None:
        super().__init__(folder, descriptors)
        self._keeper = keeper
        self._config = config
        self._module = ""
        self._met = ""  # where this host last met the others

    def start(self, name: str, arguments: list[str]) -> PlacedProcess:
        part = self._keeper.part
        command = part.commands[part.name if name == self._keeper.name else name]
        self._module = command.module
        told = self._known(arguments)
        for word, value in told.items():
            arguments = [each.replace(word, value) for each in arguments]
        return super().start(name, arguments)

    def last_words(self, name: str) -> str:
        """A rank's own sentence, rather than what torchrun says of how it has ended."""
        log = self.folder / "logs" / f"{name}.log"
        known = self._over_hosts and log.exists()
        lines = log.read_text(errors="replace").splitlines() if known else []
        said = [line for line in lines[-LINES:] if line.startswith(SENTENCE)]
        return said[-1] if said else super().last_words(name)

    @property
    def _over_hosts(self) -> bool:
        return len(self._keeper.part.actors) > 1

    def command(self, arguments: list[str]) -> list[str]:
        return [sys.executable, "-m", self._module, *arguments]

    def _known(self, arguments: list[str]) -> dict[str, str]:
        """What stands for the words in braces that these arguments have."""
        first = str(self._keeper.host == 0).lower()
        known = {"{host}": self._keeper.address, "{first}": first}
        text = " ".join(arguments)
        if "{port}" in text:
            known["{port}"] = str(self._port())
        if "{addresses}" in text:
            known["{addresses}"] = ",".join(self._addresses(int(known["{port}"])))
        if "{meeting}" in text:
            known["{meeting}"] = self._meeting()
        return known

    def _port(self) -> int:
        """As the settings say, or any free one of this host."""
        port, shard = self._config.syncer.port, self._shard
        return port + shard if port else _free_port()

    @property
    def _shard(self) -> int:
        return int(self._keeper.name.removeprefix(SHARD))

    def _addresses(self, port: int) -> list[str]:
        """Where all shards are, once they have been started; ours is written down."""
        scheme = "https" if self._config.tls.serves else "http"
        write_place(self.folder, self._shard, url_of(self._keeper.address, port, scheme))
        shards = self._config.syncer.shards
        self._keeper.wait(
            lambda: len(read_places(self.folder)) >= shards, "waits for the other shards"
        )
        return [of_shard[-1] for of_shard in read_places(self.folder)]

    def _meeting(self) -> str:
        """Where the hosts of this learner meet, in each of its lives anew; the first one says."""
        path = self.folder / PLACES / "meetings" / self._keeper.part.name
        path.parent.mkdir(parents=True, exist_ok=True)
        if self._keeper.host == 0:
            address = f"{self._keeper.address}:{_free_port()}"
            write_text(path, f"{address} {runtime().unique_id()}")
            return address

        def anew() -> bool:
            return path.exists() and path.read_text() != self._met

        self._keeper.wait(anew, "waits for its first host")
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
