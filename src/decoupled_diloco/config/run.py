"""Every setting of a run: its meaning, unit, range, default, and why one would change it.

Symbols in the descriptions (M, P, H, K, τ, γ) are those of the paper, *Decoupled DiLoCo*, arXiv
2604.21428. A default that is the paper's names its section; one that is ours says why.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from decoupled_diloco.config.addresses import BETWEEN, url_of
from decoupled_diloco.config.command import OF_WORKLOAD_DATA, has_value, require_command
from decoupled_diloco.config.settings import Settings, suggestion
from decoupled_diloco.config.sync import OuterSettings, SyncSettings
from decoupled_diloco.config.syncer import PORT_MAX, SyncerSettings
from decoupled_diloco.config.tls import TlsSettings
from decoupled_diloco.config.where import WhereSettings
from decoupled_diloco.errors import ConfigError

LEARNERS_MAX = 100_000
"""A run is made for thousands; each has a name, a port and more in every process."""

Parallelism: TypeAlias = Literal["plain", "ddp", "fsdp", "tp"]
"""How a model is cut over the ranks of a learner; "plain": it has one rank."""

_DEVICE = re.compile(r"auto|gpu|cpu|mps|(cuda|xpu)(:[0-9]{1,4})?")

_PRIVATE: dict[str, Any] = {
    "run": {
        *("folder", "evaluator", "evaluate_every_seconds", "evaluate_command"),
        *("fork_server", "log", "imports", "imports_from"),
    },
    "sync": {"initial_weights"},
    "syncer": True,
    "tls": True,
    "learner": True,
    "faults": True,
    "where": True,
}
"""What learners are not told."""


ModuleName = Annotated[str, Field(pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$")]


def host_and_port(name: str, address: str) -> tuple[str, int]:
    """The parts of an address.

    >>> host_and_port("metrics", "[::1]:9400")
    ('::1', 9400)

    Raises:
        ConfigError: It is none.
    """
    host, colon, port = address.rpartition(":")
    if not (colon and host and port.isascii() and port.isdigit() and int(port) <= PORT_MAX):
        raise ConfigError(
            f"{name}={address!r} is no address: write it as 'host:port', for example "
            "'127.0.0.1:9400'; port 0 means any free one"
        )
    return host.strip("[]"), int(port)


class RunSettings(Settings):
    """`[run]`: what the run is called, how many learners it has, and when it ends."""

    table: ClassVar[str] = "[run]"
    renamed: ClassVar[Mapping[str, str]] = {"spare": "fork_server"}

    name: str = Field(default="run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the run, in file names and reports. Letters, digits, '.', '_' and '-'."""

    folder: Path = Field(default=Path("runs/run"), strict=False)
    """Folder for everything the run writes, relative to where the command is started. An earlier
    run in it is moved aside; a folder with other files is refused. Default: runs/<name>."""

    seed: int = Field(default=0, ge=0, lt=2**32)
    """Seed of the initial weights and of the order of the data, 0 to 2^32 - 1. Change it to repeat
    a measurement independently."""

    learners: int = Field(default=4, ge=1, le=LEARNERS_MAX)
    """M: number of independent learners, 1 to 100,000. The paper trains 8, and tries 1 to 16; 4 fit
    a small machine."""

    budget_steps: int | None = Field(default=None, ge=1)
    """The run ends at this global step, at least 1. When both budgets are given, the first one
    reached ends the run."""

    budget_tokens: int | None = Field(default=None, ge=1)
    """The run ends when all learners together have trained on this many tokens, at least 1."""

    checkpoint_every_seconds: float = Field(default=600.0, ge=0)
    """Seconds from one consistent checkpoint of the whole run to the next; 0: none. It is for going
    back (ddiloco train --resume RUN --checkpoint last): what a crash needs, every process writes
    anyway. Two are kept, 12 bytes a parameter at the shards and 16 at each learner."""

    evaluator: bool = True
    """Start a process that evaluates the global weights on held-out data while the run goes on. It
    only reads. Turn it off where every core counts."""

    evaluate_every_seconds: float = Field(default=10.0, gt=0)
    """Seconds from one evaluation's start to the next one's, greater than 0. Raise it when
    evaluations take processor time that the learners need."""

    evaluate_command: tuple[str, ...] = Field(default=(), strict=False)
    """Program that evaluates the global weights: the program and its arguments, as a list. It uses
    `dd.Observer(model)` without an address. Default: the workload's own evaluation; with `command`
    in [learner], none."""

    log: tuple[str, ...] = Field(default=(), strict=False)
    """Where a process of its own logs the run's numbers and each learner's: "tensorboard" (to
    `RUN/tensorboard`), "wandb", "mlflow", or one of them with what it is called there, as
    "tensorboard:FOLDER", "wandb:PROJECT", "mlflow:TRACKING_URI". Default: nowhere."""

    fork_server: bool = True
    """On Linux one process imports PyTorch, and learners, shards and evaluator are forked from it:
    they start sooner, and one that is started again is at work within two seconds. Turn it off if
    your workload uses a library that does not survive a fork."""

    imports: tuple[ModuleName, ...] = Field(default=(), strict=False)
    """Modules that every process started with this file imports before it checks the settings, for
    example one that registers a codec. Processes that only join the run do not import them."""

    imports_from: Path | None = Field(default=None, strict=False)
    """Folder in which `imports` and methods such as "module:function" are found, after the
    installed modules and the folder where the command is started. Default: that of this file."""

    def inapplicable(self) -> Mapping[str, str]:
        """The settings of the evaluator need one."""
        names = ("evaluate_every_seconds", "evaluate_command")
        return {} if self.evaluator else dict.fromkeys(names, "with evaluator=false")

    @model_validator(mode="after")
    def _check_command(self) -> RunSettings:
        require_command(self, "evaluate_command", self.evaluate_command)
        return self

    @model_validator(mode="before")
    @classmethod
    def _name_the_folder(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data  # What is no table is told of by the table that it should be.
        return {"folder": f"runs/{data.get('name', 'run')}", **data}

    @model_validator(mode="after")
    def _check_budget(self) -> RunSettings:
        if self.budget_steps is None and self.budget_tokens is None:
            raise ConfigError(
                "[run] has no budget, so the run would never end: set budget_steps or budget_tokens"
            )
        return self


STEP_AND_CHECKPOINT_SECONDS = 30.0
"""What a learner that is told to go may take beside `hand_in_seconds`, where a machine is left."""


class LearnerSettings(Settings):
    """`[learner]`: the training processes that the local launcher starts."""

    table: ClassVar[str] = "[learner]"

    command: tuple[str, ...] = Field(default=(), strict=False)
    """Your training program, started for each learner: the program and its arguments, as a list,
    such as ["torchrun", "--nproc-per-node=8", "train.py"]. It uses `dd.Learner(model)` without an
    address. Paths are relative to where `ddiloco` is started. Programs beside the Python that runs
    `ddiloco` come first. Default: the learners train `[workload]`."""

    give_up_seconds: float | None = Field(default=None, gt=0)
    """A learner that cannot reach the syncer for this many seconds ends with an error; greater
    than 0. Default: it trains on and keeps trying for ever."""

    checkpoint_every_seconds: float = Field(default=30.0, ge=0)
    """How often a learner keeps itself (model, inner optimizer, position in its data) in
    `RUN/learners`, 0 and up; 0: never, and one that is started again begins its data anew. A step
    waits for a copy in memory alone; the disk gets 16 bytes a parameter each time with AdamW."""

    listen: str = ""
    """Where other learners fetch this one's optimizer state if they begin without a checkpoint,
    "host:port"; port 0: any free one. Default: nowhere, a shard relays it, which takes the syncer's
    bandwidth twice."""

    metrics: str = ""
    """Where Prometheus can scrape the learners, "host:port" of the first; learner 1 has the next
    port, and so on, so that several fit on one machine. Port 0: any free one, which the log tells.
    Default: nowhere; what the shards know of each learner they tell in any case."""

    hand_in_seconds: float = Field(default=10.0, ge=0)
    """How long a learner that is told to go (SIGTERM) waits for what it has trained to be taken, 0
    and up; 0: it goes at once. The notice of a cloud's preemption leaves 30 to 120 seconds."""

    threads: int = Field(default=1, ge=1)
    """Threads of tensor arithmetic of one learner, or of each of its ranks, at least 1. 1 because
    several learners usually share this machine: learners × ranks × threads should not exceed its
    cores."""

    device: str = Field(default="auto")
    """Device that the learners train on: "auto", "gpu", "cpu", "cuda", "cuda:1", "xpu", "xpu:0" or
    "mps". "auto" takes the first kind that PyTorch finds, in the order cuda, xpu, mps, cpu; "gpu"
    does the same without the CPU, and `ddiloco launch` writes it where it reserves GPUs. `ddiloco
    train` divides the GPUs of this machine among the learners, and each rank takes that of its
    LOCAL_RANK. A device that is missing is an error."""

    precision: Literal["fp32", "bf16"] = "fp32"
    """Arithmetic of the forward pass and the loss: "bf16" runs them in PyTorch's autocast, and the
    weights stay as the workload makes them. "fp32" changes nothing."""

    ranks: int | Annotated[tuple[int, ...], Field(strict=False)] = 1
    """Processes that one learner is, at least 1: one number, or a list with one for each learner.
    To the run they are one learner. Needs leases=false in [data]."""

    parallelism: Parallelism | Annotated[tuple[Parallelism, ...], Field(strict=False)] = "fsdp"
    """How the model is cut over the ranks of a learner: one word, or a list with one for each
    learner. "ddp": each rank has all of it; "fsdp": each has a part of every tensor (FSDP2); both
    train a batch on each rank. "tp": the ranks share the arithmetic of one batch (tensor parallel).
    "plain" in a list: this learner has one rank."""

    carriers: int | Literal["hosts", "all"] = 1
    """How many ranks of a learner of several carry its fragments to the syncer and back, each its
    part: a number from 1 to its ranks, "hosts" (one on each host), or "all". They share the 4 bytes
    a parameter of host memory that published copies take."""

    @property
    def leave_seconds_max(self) -> float:
        """How long a learner that is told to go may take, to its last checkpoint.

        >>> LearnerSettings(hand_in_seconds=20).leave_seconds_max
        50.0
        """
        return self.hand_in_seconds + STEP_AND_CHECKPOINT_SECONDS

    def ranks_of(self, index: int) -> int:
        """How many processes a learner is; one that came later is as the last one."""
        told = self.ranks
        return told[min(index, len(told) - 1)] if isinstance(told, tuple) else told

    def metrics_of(self, index: int) -> str | None:
        """Where a learner can be scraped, if it can.

        >>> LearnerSettings(metrics="0.0.0.0:9400").metrics_of(2)
        '0.0.0.0:9402'
        """
        if not self.metrics:
            return None
        _, port = host_and_port("metrics", self.metrics)
        return f"{self.metrics.rpartition(':')[0]}:{port + index if port else 0}"

    def parallelism_of(self, index: int) -> Parallelism:
        """How a learner's model is cut."""
        if self.ranks_of(index) == 1:
            return "plain"
        told = self.parallelism
        return told[min(index, len(told) - 1)] if isinstance(told, tuple) else told

    def inapplicable(self) -> Mapping[str, str]:
        """One rank has nothing to cut; a command makes its ranks itself."""
        if self.command:
            decided = ("ranks", "parallelism", "precision")
            return dict.fromkeys(decided, "with command, whose program decides that")
        names = ("parallelism", "carriers") if self.ranks == 1 else ()
        return dict.fromkeys(names, "with ranks=1")

    @model_validator(mode="after")
    def _check_device(self) -> LearnerSettings:
        if not _DEVICE.fullmatch(self.device):
            raise ConfigError(
                f"device={self.device!r} in {self.table} is not a valid device: write 'auto', "
                "'gpu', 'cpu', 'cuda', 'cuda:1', 'xpu:0' or 'mps'"
            )
        most = max(self.ranks, default=1) if isinstance(self.ranks, tuple) else self.ranks
        if ":" in self.device and most > 1:
            kind = self.device.partition(":")[0]
            raise ConfigError(
                f"device={self.device!r} in {self.table} names one device, but "
                f"ranks={self.ranks!r} needs one for each rank: write device={kind!r}"
            )
        return self

    @model_validator(mode="after")
    def _check_command(self) -> LearnerSettings:
        require_command(self, "command", self.command)
        if self.command and ":" in self.device:
            raise ConfigError(
                f"device={self.device!r} in {self.table} would be ignored with command, whose "
                "program chooses among the devices that it sees: leave device out, or set "
                "CUDA_VISIBLE_DEVICES where ddiloco is started"
            )
        return self

    @model_validator(mode="after")
    def _check_metrics(self) -> LearnerSettings:
        if self.metrics:
            host_and_port("metrics", self.metrics)
        return self

    @model_validator(mode="after")
    def _check_ranks(self) -> LearnerSettings:
        each = self.ranks if isinstance(self.ranks, tuple) else (self.ranks,)
        if not each or min(each) < 1:
            raise ConfigError(
                f"ranks={self.ranks!r} in {self.table} is out of range: it must be at least 1 for "
                "each learner"
            )
        if self.listen and max(each) > 1:
            raise ConfigError(
                f"listen={self.listen!r} in {self.table} does not go with ranks={self.ranks!r}: a "
                "learner of several ranks gives its state to nobody: leave listen out"
            )
        return self


class DataSettings(Settings):
    """`[data]`: how the learners share the workload's data."""

    table: ClassVar[str] = "[data]"

    leases: bool = True
    """true: the data are cut into virtual parts that the coordinator lends out, so that each is
    trained once in a pass while learners come and go, and RUN/data.ledger lists who trained it.
    false: each of the run's learners has a fixed part of its own, and draws from it at random (the
    papers' setting; for learners whose data differ)."""

    parts: int = Field(default=128, ge=1, le=1 << 24)
    """Virtual parts, at least 1; fewer where a pass has fewer batches. Several times the learners,
    so that the last ones of a pass are shared evenly; few enough that a part lasts many steps."""

    leases_ahead: int = Field(default=2, ge=1, le=63)
    """Leases that a learner holds beyond the one it trains, 1 to 63. It trains on that long while
    the coordinator is away; then it repeats its last part, and the ledger says so."""

    def inapplicable(self) -> Mapping[str, str]:
        """Without leases there are no parts."""
        return {} if self.leases else dict.fromkeys(("parts", "leases_ahead"), "with leases=false")


class WorkloadSettings(Settings):
    """`[workload]`: what the learners train."""

    table: ClassVar[str] = "[workload]"

    name: str = "gpt"
    """A built-in workload ("gpt", "moe", "vit", "paced"), or one's own as "module:function"."""

    options: dict[str, Any] = Field(default_factory=dict)
    """Settings of the workload; those of the built-in ones are documented in
    `decoupled_diloco.workloads`."""


class FaultSettings(Settings):
    """One entry of `[[faults]]`: a learner that the local launcher kills, to show what happens."""

    table: ClassVar[str] = "[[faults]]"

    at: float = Field(ge=0, lt=1)
    """Share of the budget that is used up when the fault happens, 0 to less than 1."""

    kill: str
    """Name of the learner that gets SIGKILL, "learner-0" to "learner-<M - 1>"."""

    restart: bool = True
    """Whether the launcher starts it again; false: it stays dead."""


class RunConfig(Settings):
    """A whole run: what one TOML file says, with all defaults filled in."""

    run: RunSettings
    """What the run is called, how many learners it has, and when it ends."""

    sync: SyncSettings = Field(default_factory=SyncSettings)
    """The method: fragments, period, quorum, merging."""

    outer: OuterSettings = Field(default_factory=OuterSettings)
    """The outer optimizer."""

    syncer: SyncerSettings = Field(default_factory=SyncerSettings)
    """The syncer's processes and addresses."""

    tls: TlsSettings = Field(default_factory=TlsSettings)
    """Certificates."""

    learner: LearnerSettings = Field(default_factory=LearnerSettings)
    """The learner's processes."""

    data: DataSettings = Field(default_factory=DataSettings)
    """How the learners share the data."""

    workload: WorkloadSettings | None = Field(default_factory=WorkloadSettings)
    """Model and data; `None` where the learners run a `command`, which has its own."""

    faults: tuple[FaultSettings, ...] = Field(default=(), strict=False)
    """Learners to kill on the way."""

    where: WhereSettings = Field(default_factory=WhereSettings)
    """On what `ddiloco launch` places the processes. Other commands do not look at it."""

    @property
    def learner_ids(self) -> tuple[str, ...]:
        """The names of the learners, in the order of their parts of the data."""
        return tuple(f"learner-{index}" for index in range(self.run.learners))

    def workload_options(self) -> dict[str, Any]:
        """The options to build the workload with: those of the file, and what the run knows.

        These are `seed`, and `total_steps` for the learning rate schedule if the budget is in
        steps. The file may set both otherwise.
        """
        options: dict[str, Any] = {"seed": self.run.seed}
        if self.run.budget_steps is not None:
            options["total_steps"] = self.run.budget_steps
        return options | self.required_workload.options

    @property
    def required_workload(self) -> WorkloadSettings:
        """The workload, for what cannot do without one.

        Raises:
            ConfigError: The learners run a command.
        """
        if self.workload is None:
            raise ConfigError(
                f"{self.run.name} has no [workload], because its learners run a command: only that "
                "program can build the model"
            )
        return self.workload

    def public(self) -> dict[str, Any]:
        """What the syncer decides for all learners, as plain values that `read_settings` reads.

        Left out is what concerns one process or machine only: addresses, folders, threads, faults.
        """
        public = self.model_dump(mode="json", exclude=_PRIVATE)
        if self.workload is None:
            # Complete, as the settings of another process that has not read the command.
            public |= {"workload": None, "data": self.data.model_dump(mode="json")}
        else:
            public["workload"]["options"] = self.workload_options()
        return public | {"shards": self.syncer.shards}

    @model_validator(mode="before")
    @classmethod
    def _leave_out_what_a_command_has(cls, data: Any) -> Any:
        """With a command there is no workload, and nothing evaluates it."""
        if not (isinstance(data, dict) and has_value(data.get("learner"), "command")):
            return data
        run = data.get("run")
        if isinstance(run, dict) and "evaluate_command" not in run:
            data = {**data, "run": {"evaluator": False, **run}}
        return {"workload": None, **data}

    @model_validator(mode="after")
    def _check_command(self) -> RunConfig:
        if not self.learner.command:
            return self
        because = "with command in [learner]"
        if self.workload is not None:
            raise ConfigError(
                f"[workload] would be ignored {because}, whose program has its own model and data: "
                "leave one of them out"
            )
        if self.run.evaluator and not self.run.evaluate_command:
            raise ConfigError(
                f"evaluator=true in [run] needs evaluate_command {because}: give the program that "
                "evaluates, or leave evaluator out"
            )
        for name in OF_WORKLOAD_DATA:
            if name in self.data.model_fields_set:
                raise ConfigError(
                    f"{name}={getattr(self.data, name)!r} in [data] would be ignored {because}, "
                    f"whose program chooses its own data: leave {name} out"
                )
        return self

    @model_serializer(mode="wrap")
    def _tell_what_has_an_effect(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        told = super()._tell_what_has_an_effect(dump)
        if self.learner.command and "data" in told:
            told["data"] = {k: v for k, v in told["data"].items() if k not in OF_WORKLOAD_DATA}
        return told

    @model_validator(mode="after")
    def _check_tables_against_each_other(self) -> RunConfig:
        learners, fragments = self.run.learners, self.sync.fragments
        if self.sync.quorum > learners:
            raise ConfigError(
                f"quorum={self.sync.quorum} exceeds learners={learners}: "
                "lower quorum or start more learners"
            )
        if self.syncer.shards > fragments:
            raise ConfigError(
                f"shards={self.syncer.shards} exceeds fragments={fragments}: a shard would own "
                "nothing: lower shards or raise fragments"
            )
        for entry in self.outer.by_fragment:
            for fragment in entry.fragments:
                if not 0 <= fragment < fragments:
                    raise ConfigError(
                        f"fragment {fragment} in [[outer.by_fragment]] is out of range: with "
                        f"fragments={fragments} it must be from 0 to {fragments - 1}"
                    )
        last = self.learner.metrics_of(learners - 1)
        if last is not None and int(last.rpartition(":")[2]) > PORT_MAX:
            raise ConfigError(
                f"metrics={self.learner.metrics!r} in [learner] with learners={learners} needs "
                f"ports up to {last.rpartition(':')[2]}, but {PORT_MAX} is the last: lower the port"
            )
        self._check_addresses()
        self._check_ranks()
        self._check_gpus()
        self._check_faults()
        return self

    def _check_addresses(self) -> None:
        plain = [each for each in self.syncer.addresses if "http://" in each]
        if self.tls.serves and plain:
            raise ConfigError(
                f"address {plain[0]!r} in [syncer] is not encrypted, but [tls] has a certificate: "
                "write https://, or take the certificate out"
            )

    def _check_ranks(self) -> None:
        learner, learners = self.learner, self.run.learners
        for name in ("ranks", "parallelism"):
            told = getattr(learner, name)
            if isinstance(told, tuple) and len(told) != learners:
                raise ConfigError(
                    f"{name} in [learner] lists {len(told)}, but learners={learners}: give one for "
                    "all, or one for each"
                )
        for index, name in enumerate(self.learner_ids):
            ranks, cut = learner.ranks_of(index), learner.parallelism
            word = cut[index] if isinstance(cut, tuple) else learner.parallelism_of(index)
            if ranks > 1 and word == "plain":
                raise ConfigError(
                    f"parallelism='plain' in [learner] is for one rank, but {name} has "
                    f"ranks={ranks}: choose 'ddp', 'fsdp' or 'tp', or give it one rank"
                )
            if ranks == 1 and word != "plain":
                raise ConfigError(
                    f"parallelism={word!r} in [learner] would be ignored for {name}, which has "
                    "ranks=1: write 'plain', or give it more ranks"
                )
            if ranks % self.where.learner.hosts:
                raise ConfigError(
                    f"hosts={self.where.learner.hosts} in [where.learner] does not divide the "
                    f"ranks={ranks} of {name}: change one of them"
                )
            if learner.command:
                continue
            carriers = learner.carriers
            if ranks > 1 and isinstance(carriers, int) and not 1 <= carriers <= ranks:
                raise ConfigError(
                    f"carriers={carriers} in [learner] is out of range for {name}, which has "
                    f"ranks={ranks}: choose 1 to {ranks}, 'hosts' or 'all'"
                )
            if ranks > 1 and self.data.leases:
                raise ConfigError(
                    f"ranks={learner.ranks!r} in [learner] does not go with leases=true in [data]: "
                    "leased data are for learners of one process: set data.leases=false"
                )

    def _check_gpus(self) -> None:
        gpus, device = self.where.learner.gpus, self.learner.device
        if not gpus or self.where.engine == "local":
            return
        if device == "cpu":
            raise ConfigError(
                f"gpus={gpus} in [where.learner] would be idle with device='cpu' in [learner]: "
                "leave gpus out, or write device='auto'"
            )
        for index, name in enumerate(self.learner_ids):
            if self.learner.ranks_of(index) > gpus:
                raise ConfigError(
                    f"gpus={gpus} in [where.learner] is too few for {name}, which has "
                    f"ranks={self.learner.ranks_of(index)}: reserve one GPU for each rank"
                )

    def _check_faults(self) -> None:
        dead: dict[str, float] = {}
        for fault in sorted(self.faults, key=lambda fault: fault.at):
            if fault.kill not in self.learner_ids:
                raise ConfigError(
                    f"kill={fault.kill!r} in [[faults]] names no learner: "
                    f"{suggestion(fault.kill, self.learner_ids)}"
                )
            if fault.kill in dead:
                raise ConfigError(
                    f"kill={fault.kill!r} at={fault.at} in [[faults]] would be ignored, because it "
                    f"is dead since at={dead[fault.kill]}: set restart=true there or take it out"
                )
            if not fault.restart:
                dead[fault.kill] = fault.at


def advertised(config: RunConfig, ports: Sequence[int] = ()) -> tuple[str, ...]:
    """The addresses at which learners reach the shards, in order of the shards.

    They come from the settings, or from host and ports.

    Args:
        ports: The ports that the shards really have, and then their standbys; default: those of
            the settings.

    Raises:
        ConfigError: the settings leave the ports to chance.
    """
    settings = config.syncer
    if settings.addresses:
        return settings.addresses
    if not ports and not settings.port:
        raise ConfigError(
            "syncer.port=0 means any free ports, so no process knows where the shards are: give "
            "their addresses (--syncer for a learner, --addresses for a shard), or set syncer.port"
        )
    shards = settings.shards
    ports = ports or range(settings.port, settings.port + shards * (1 + settings.standbys))
    scheme = "https" if config.tls.serves else "http"
    urls = [url_of(settings.host, port, scheme) for port in ports]
    return tuple(BETWEEN.join(urls[shard::shards]) for shard in range(shards))
