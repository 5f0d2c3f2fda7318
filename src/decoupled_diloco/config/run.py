"""Every setting of a run: its meaning, unit, range, default, and when to change it.

The symbols in the descriptions (M, P, H, K, τ, γ) are those of the paper, *Decoupled DiLoCo*, arXiv
2604.21428. A default from the paper names its section. A default of our own gives the reason.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import (
    Field,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)

from decoupled_diloco.config.addresses import BETWEEN, require_store, url_of
from decoupled_diloco.config.launch import LaunchSettings
from decoupled_diloco.config.plugins import NotLoaded, registered
from decoupled_diloco.config.privacy import (
    THRESHOLD_MIN,
    UNUSED_BY_SUMS,
    WITH_SECURE_SUMS,
    PrivacySettings,
    check_dp,
)
from decoupled_diloco.config.settings import MODULE, NAME, Settings, suggestion
from decoupled_diloco.config.sync import SUMMED_RULES, OuterSettings, SyncSettings
from decoupled_diloco.config.syncer import PORT_MAX, SyncerSettings
from decoupled_diloco.errors import ConfigError, MethodError
from decoupled_diloco.protocol.adapt import period_at

SCHEDULE_STEPS_TRIED = 10_000
"""The number of steps for which a schedule is called before the run starts."""

MEMBERS_MAX = 4_000
"""The largest cohort of a secure sum: its keys must fit into one message of 1 MiB."""

LEARNERS_MAX = 100_000
"""The limit that is checked. Every process holds a name, a port and more for each learner, and only
a few learners have been measured; shard 0 is at capacity with about 2,500."""

Parallelism: TypeAlias = Literal["plain", "ddp", "fsdp", "tp"]
"""How a model is divided over the ranks of a learner; "plain" is one rank."""

_DEVICE = re.compile(r"auto|gpu|cpu|mps|(cuda|xpu)(:[0-9]{1,4})?")

_PRIVATE: dict[str, Any] = {
    "run": {
        *("folder", "evaluator", "evaluate_interval_seconds", "evaluate_command"),
        *("fork_server", "trackers", "imports", "imports_from", "store", "store_interval_seconds"),
    },
    "sync": {"initial_weights"},
    "privacy": {"parties"},
    "syncer": True,
    "tls": True,
    "learner": True,
    "faults": True,
    "sites": True,
    "launch": True,
    "trust": {"score_every"},
}
"""The settings that learners do not receive."""


OF_WORKLOAD_DATA = ("elastic", "partitions")
"""The settings of `[data]` that divide the data of a workload among the learners."""


def has_value(table: Any, name: str) -> bool:
    """Whether a table sets a value, before the table is validated."""
    return bool(table.get(name) if isinstance(table, dict) else getattr(table, name, None))


def require_command(settings: Settings, name: str, command: tuple[str, ...]) -> None:
    """Checks the form of a command.

    Raises:
        ConfigError: The list is empty, the program is empty, or a process cannot receive an
            argument.
    """
    if name in settings.model_fields_set and not command:
        raise ConfigError(
            f"{name}=[] in {settings.table} is empty: list the program and its arguments, for "
            f'example {name} = ["python", "train.py"], or leave {name} out'
        )
    if command and not command[0].strip():
        raise ConfigError(
            f"{name}={list(command)!r} in {settings.table} begins with an empty text: list the "
            "program first"
        )
    if any("\0" in word for word in command):
        raise ConfigError(
            f"{name}={list(command)!r} in {settings.table} contains a NUL character, which no "
            "process can receive: remove it"
        )


class TlsSettings(Settings):
    """`[tls]`: encrypted connections, with files from `ddiloco certs` or your own CA."""

    table: ClassVar[str] = "[tls]"

    cert: Path | None = Field(default=None, strict=False)
    """File with the shards' certificate, PEM, valid for the hosts in their addresses. With it the
    shards serve HTTPS, and their addresses begin with https://. All files of this table are
    relative to the folder where the command starts. A renewed file is loaded without a restart.
    Default: plain HTTP."""

    key: Path | None = Field(default=None, strict=False)
    """File with the private key of `cert`, PEM, without a passphrase."""

    ca_cert: Path | None = Field(default=None, strict=False)
    """File with the CA certificates that may sign the shards' certificate, PEM. Every process that
    connects to the shards needs it. Default: the CA certificates of the system."""

    client_ca_cert: Path | None = Field(default=None, strict=False)
    """File with the CA certificates that sign the certificates of clients, PEM. Each learner,
    evaluator and shard then presents a certificate with its id as a name, and can act for no other
    id. No token is needed then, unless [syncer] has a token_file or principals_file. A shard
    presents `cert`, where "shard-*" stands for all shards. Default: clients are identified by
    tokens only."""

    clients: Path | None = Field(default=None, strict=False)
    """Folder with a certificate and a key for each client: learner-0.pem and learner-0.key, and so
    on, evaluator.pem and evaluator.key. Default: clients present no certificate."""

    @property
    def serves(self) -> bool:
        """Whether the shards serve HTTPS themselves."""
        return self.cert is not None

    @property
    def scheme(self) -> str:
        """The scheme of the addresses of shards and relays."""
        return "https" if self.serves else "http"

    @model_validator(mode="after")
    def _check_files_against_each_other(self) -> TlsSettings:
        if (self.cert is None) != (self.key is None):
            has, lacks = ("cert", "key") if self.key is None else ("key", "cert")
            raise ConfigError(f"[tls] has {has} without {lacks}: set both, or neither")
        if self.client_ca_cert is not None and not self.serves:
            raise ConfigError(
                f"client_ca_cert={str(self.client_ca_cert)!r} in [tls] would be ignored without "
                "cert: set cert and key, too, or take client_ca_cert out"
            )
        return self


ModuleName = Annotated[str, Field(pattern=MODULE)]


def host_and_port(name: str, address: str) -> tuple[str, int]:
    """The host and the port of an address.

    >>> host_and_port("metrics_address", "[::1]:9400")
    ('::1', 9400)

    Raises:
        ConfigError: It is not an address.
    """
    host, colon, port = address.rpartition(":")
    if not (colon and host and port.isascii() and port.isdigit() and int(port) <= PORT_MAX):
        raise ConfigError(
            f"{name}={address!r} is not a valid address: write 'host:port', for example "
            "'127.0.0.1:9400'; port 0 picks a free port"
        )
    return host.strip("[]"), int(port)


class RunSettings(Settings):
    """`[run]`: the run's name, its number of learners, and its end."""

    table: ClassVar[str] = "[run]"

    name: str = Field(default="run", pattern=NAME)
    """Name of the run, for file names and reports. It may contain letters, digits, '.', '_' and
    '-'."""

    folder: Path = Field(default=Path("runs/run"), strict=False)
    """Folder for everything that the run writes, relative to the folder where the command starts.
    An earlier run in this folder is moved aside. A folder with other files is refused. Default:
    runs/<name>."""

    seed: int = Field(default=0, ge=0, lt=2**32)
    """Seed of the initial weights and of the order of the data, 0 to 2^32 - 1. Change it to repeat
    a measurement independently."""

    learners: int = Field(default=4, ge=1, le=LEARNERS_MAX)
    """M: number of independent learners, 1 to 100,000. The paper trains with 8 and tries 1 to 16.
    Four learners fit a small machine. Only a few learners have been measured in real processes, and
    shard 0 is at capacity with about 2,500."""

    max_steps: int | None = Field(default=None, ge=1)
    """The global step at which the run ends, at least 1. With both budgets, the first one that is
    reached ends the run."""

    max_tokens: int | None = Field(default=None, ge=1)
    """Number of tokens of all learners together at which the run ends, at least 1."""

    checkpoint_interval_seconds: float = Field(default=600.0, ge=0)
    """Seconds between two consistent checkpoints of the whole run; 0 writes none. Use them to go
    back in time (ddiloco train --resume RUN --checkpoint last). Recovery from a crash does not need
    them, because every process writes its own checkpoint. The last two are kept, with 12 bytes per
    parameter at the shards and 16 at each learner."""

    evaluator: bool = True
    """Whether to start a process that evaluates the global weights on held-out data during the run.
    It only reads. Turn it off if the learners need every core."""

    evaluate_interval_seconds: float = Field(default=10.0, gt=0)
    """Seconds from the start of one evaluation to the start of the next, greater than 0. Raise it
    if evaluations take processor time that the learners need."""

    evaluate_command: tuple[str, ...] = Field(default=(), strict=False)
    """Program that evaluates the global weights: a list of the program and its arguments. It uses
    `dd.Observer(model)` without an address. Default: the workload's own evaluation; none with
    `command` in [learner]."""

    trackers: tuple[str, ...] = Field(default=(), strict=False)
    """Experiment trackers to which a separate process logs the numbers of the run and of each
    learner: "tensorboard" (in `RUN/tensorboard`), "wandb" or "mlflow". A colon adds a destination:
    "tensorboard:FOLDER", "wandb:PROJECT", "mlflow:TRACKING_URI". Default: none."""

    store: str = ""
    """Address of an object store to which a separate process mirrors the run: "s3://BUCKET/PREFIX",
    "gs://BUCKET/PREFIX", "az://CONTAINER/PREFIX" or "file:///FOLDER". It needs the extra `store`.
    The run can then continue on an empty machine (ddiloco train --resume s3://…). Credentials come
    from the environment or from the machine's role, not from this file. If the store is slow or
    unreachable, training continues and `ddiloco status` shows the backlog. Default: none."""

    store_interval_seconds: float = Field(default=30.0, ge=1)
    """Seconds from the start of one state in `store` to the start of the next, at least 1; half of
    that if shards have separate run folders. A run that loses its machine loses the work since the
    last complete state. Raise it to make fewer requests: each state costs one per changed file, and
    one more."""

    fork_server: bool = True
    """Whether one process imports PyTorch and forks the learners, shards and evaluator (Linux).
    They start sooner, and a restarted process works again within two seconds. Turn it off if your
    workload uses a library that does not support forks."""

    imports: tuple[ModuleName, ...] = Field(default=(), strict=False)
    """Modules that every process imports before it checks the settings of this file, for example
    one that registers a codec. Processes that only join the run do not import them."""

    imports_from: Path | None = Field(default=None, strict=False)
    """Folder to search for `imports` and for methods such as "module:function". Installed modules
    and the folder where the command starts come first. Default: the folder of this file."""

    def inapplicable(self) -> Mapping[str, str]:
        """The settings of the evaluator without an evaluator, and of the store without a store."""
        names = () if self.evaluator else ("evaluate_interval_seconds", "evaluate_command")
        without = {} if self.store else {"store_interval_seconds": "without store"}
        return dict.fromkeys(names, "with evaluator=false") | without

    @model_validator(mode="after")
    def _check_store(self) -> RunSettings:
        if self.store:
            require_store("store", self.store)
        if self.store.startswith("memory:"):
            raise ConfigError(
                f"store={self.store!r} in [run] would end with the process that mirrors the run: "
                "use file:///FOLDER"
            )
        return self

    @model_validator(mode="after")
    def _check_command(self) -> RunSettings:
        require_command(self, "evaluate_command", self.evaluate_command)
        return self

    @model_validator(mode="before")
    @classmethod
    def _name_the_folder(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data  # The caller refuses it: it is not a table.
        return {"folder": f"runs/{data.get('name', 'run')}", **data}

    @model_validator(mode="after")
    def _check_budget(self) -> RunSettings:
        if self.max_steps is None and self.max_tokens is None:
            raise ConfigError(
                "[run] has no budget, so the run would never end: set max_steps or max_tokens"
            )
        return self


STEP_AND_CHECKPOINT_SECONDS = 30.0
"""Time for the last step and checkpoint of a learner that is asked to stop, after
`flush_seconds`."""


class LearnerSettings(Settings):
    """`[learner]`: the training processes that the launcher starts."""

    table: ClassVar[str] = "[learner]"

    command: tuple[str, ...] = Field(default=(), strict=False)
    """Your training program, which is started for each learner: a list of the program and its
    arguments, such as ["torchrun", "--nproc-per-node=8", "train.py"]. It uses `dd.Learner(model)`
    without an address. Paths are relative to the folder where `ddiloco` starts. Programs beside the
    Python that runs `ddiloco` come first. Default: the learners train `[workload]`."""

    disconnect_seconds: float | None = Field(default=None, gt=0)
    """Seconds after which a learner that cannot reach the syncer ends with an error, greater than
    0. Default: the learner continues to train and tries to connect forever."""

    checkpoint_interval_seconds: float = Field(default=60.0, ge=0)
    """Seconds between two checkpoints of a learner in `RUN/learners`, 0 and up. A checkpoint holds
    the model, the inner optimizer and the position in the data. 0 writes none, and a restarted
    learner starts its data again. A step waits only for a copy in memory. With AdamW a checkpoint
    writes 16 bytes per parameter."""

    metrics_address: str = ""
    """Address at which Prometheus can scrape the first learner, "host:port". Each further learner
    has the next port, so several learners fit on one machine. Port 0 picks a free port; the log
    shows it. Default: none; the shards export what they know of each learner in any case."""

    flush_seconds: float = Field(default=10.0, ge=0)
    """Longest time for the final sync of a learner that receives SIGTERM, seconds, 0 and up. 0
    skips the final sync. A cloud gives notice of a preemption 30 to 120 seconds before."""

    max_failures: int | None = Field(default=None, ge=0)
    """Restarts of a learner after failures in a row, 0 and up: a crash, a kill, or an exit code
    other than 0, unless it was asked to stop. With one failure more, it stays down. A failure after
    30 seconds is the first one in a row. On Kubernetes, all failures count. Default: 5; on
    Kubernetes 50."""

    max_preemptions: int | None = Field(default=None, ge=0)
    """Restarts of a learner after preemptions in all, 0 and up: it received SIGTERM, for example
    from a spot machine that is taken away, and left in order. With one preemption more, it stays
    down. On Slurm, requeues after failures count, too. Kubernetes and Ray do not count preemptions.
    Default: no limit."""

    threads: int = Field(default=1, ge=1)
    """Threads for the tensor arithmetic of one learner, or of each of its ranks, at least 1. The
    default fits several learners on one machine. Keep learners × ranks × threads within its number
    of cores."""

    device: str = Field(default="auto")
    """Device of the learners: "auto", "gpu", "cpu", "cuda", "cuda:1", "xpu", "xpu:0" or "mps".
    "auto" takes the first kind that PyTorch finds, in the order cuda, xpu, mps, cpu. "gpu" does the
    same without the CPU, and `ddiloco launch` sets it where it reserves GPUs. `ddiloco train`
    divides the GPUs of this machine among the learners, and each rank takes the one of its
    LOCAL_RANK. A missing device is an error."""

    precision: Literal["fp32", "bf16"] = "fp32"
    """Arithmetic of the forward pass and the loss. "bf16" runs them in PyTorch's autocast, and the
    weights keep the type that the workload creates. "fp32" changes nothing."""

    party_key: Path | None = Field(default=None, strict=False)
    """File with the private key of the learners' party, or a folder with the keys of several
    parties, such as hospital-a.key, for a run on one machine. The path is relative to the folder
    where the command starts. It is never sent anywhere. It needs parties in [privacy]. Default: the
    learners do not sign."""

    ranks: int | Annotated[tuple[int, ...], Field(strict=False)] = 1
    """Number of processes (ranks) of one learner, at least 1: one number for all learners, or a
    list with one for each. All ranks together are one learner of the run. More than one needs
    elastic=false in [data]."""

    parallelism: Parallelism | Annotated[tuple[Parallelism, ...], Field(strict=False)] = "fsdp"
    """How the model is divided over the ranks of a learner: one word for all learners, or a list
    with one for each. "ddp": each rank has the whole model. "fsdp": each rank has a part of every
    tensor (FSDP2). With both, each rank trains its own batch. "tp": the ranks share the arithmetic
    of one batch (tensor parallel). "plain" in a list: this learner has one rank."""

    sync_ranks: int | Literal["hosts", "all"] = 1
    """The ranks of a multi-rank learner that exchange its fragments with the syncer, each for its
    part: a number from 1 to its ranks, "hosts" (one per host), or "all". Together they hold the
    published copies, 4 bytes per parameter of host memory. Raise it if one host's link is the
    bottleneck."""

    @property
    def leave_seconds_max(self) -> float:
        """The longest time from SIGTERM to the end of a learner, its last checkpoint included.

        >>> LearnerSettings(flush_seconds=20).leave_seconds_max
        50.0
        """
        return self.flush_seconds + STEP_AND_CHECKPOINT_SECONDS

    def ranks_of(self, index: int) -> int:
        """The number of processes of a learner; a learner beyond the list has the last number."""
        told = self.ranks
        return told[min(index, len(told) - 1)] if isinstance(told, tuple) else told

    def metrics_of(self, index: int) -> str | None:
        """The address of a learner's metrics, if there is one.

        >>> LearnerSettings(metrics_address="0.0.0.0:9400").metrics_of(2)
        '0.0.0.0:9402'
        """
        if not self.metrics_address:
            return None
        _, port = host_and_port("metrics_address", self.metrics_address)
        return f"{self.metrics_address.rpartition(':')[0]}:{port + index if port else 0}"

    def parallelism_of(self, index: int) -> Parallelism:
        """How a learner's model is divided over its ranks."""
        if self.ranks_of(index) == 1:
            return "plain"
        told = self.parallelism
        return told[min(index, len(told) - 1)] if isinstance(told, tuple) else told

    def inapplicable(self) -> Mapping[str, str]:
        """The settings of several ranks with one rank, or with a command that starts its own."""
        if self.command:
            decided = ("ranks", "parallelism", "precision")
            return dict.fromkeys(decided, "with command, whose program decides it")
        names = ("parallelism", "sync_ranks") if self.ranks == 1 else ()
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
        if self.metrics_address:
            host_and_port("metrics_address", self.metrics_address)
        return self

    @model_validator(mode="after")
    def _check_ranks(self) -> LearnerSettings:
        each = self.ranks if isinstance(self.ranks, tuple) else (self.ranks,)
        if not each or min(each) < 1:
            raise ConfigError(
                f"ranks={self.ranks!r} in {self.table} is out of range: it must be at least 1 for "
                "each learner"
            )
        return self


class DataSettings(Settings):
    """`[data]`: how the learners share the workload's data."""

    table: ClassVar[str] = "[data]"

    elastic: bool = True
    """Whether the coordinator leases partitions of the data to the learners. true: each partition
    is trained once per epoch while learners join and leave, and RUN/data.ledger lists its learner.
    false: each learner has a fixed share of the data and draws from it at random. That is the
    setting of the papers, and the one for learners with different data."""

    partitions: int = Field(default=128, ge=1, le=1 << 24)
    """Number of partitions of the data, at least 1; fewer if an epoch has fewer batches. Use
    several times the number of learners, so that the last partitions of an epoch are shared evenly.
    Use few enough that a partition lasts many steps."""

    prefetch: int = Field(default=2, ge=1, le=63)
    """Number of leased partitions that a learner holds beyond the one that it trains, 1 to 63. They
    let it continue while the coordinator is away. After them it repeats its last partition, and the
    ledger records that."""

    def inapplicable(self) -> Mapping[str, str]:
        """The settings of partitions if the data are not leased."""
        names = ("partitions", "prefetch")
        return {} if self.elastic else dict.fromkeys(names, "with elastic=false")


class WorkloadSettings(Settings):
    """`[workload]`: what the learners train."""

    table: ClassVar[str] = "[workload]"

    name: str = "gpt"
    """A built-in workload ("gpt", "paced", "digits", "moe", "speech" or "vit"), or your own as
    "module:function"."""

    options: dict[str, Any] = Field(default_factory=dict)
    """Settings of the workload. `decoupled_diloco.workloads` documents those of the built-in
    workloads."""


class FaultSettings(Settings):
    """One entry of `[[faults]]`: a learner that the local launcher kills, as a demonstration."""

    table: ClassVar[str] = "[[faults]]"

    at: float = Field(ge=0, lt=1)
    """When the learner is killed, as a share of the budget, 0 to less than 1."""

    kill: str
    """Name of the learner that receives SIGKILL, "learner-0" to "learner-<M - 1>"."""

    restart: bool = True
    """Whether the launcher restarts the learner. With false it stays dead."""


class SiteSettings(Settings):
    """Table `[[sites]]`: learners behind one relay."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    """Name of the site and of its relay, such as "site-a". The relay's auth token or certificate is
    for this name."""

    learners: tuple[int, ...] = Field(strict=False)
    """Numbers of the learners at this site. The relay may represent no others, if each process has
    its own token."""

    upstream: str = ""
    """Name of the site whose relay this one dials; default: it dials the shards."""

    port: int = Field(default=0, ge=0, le=65535)
    """Port of the relay that `ddiloco train` or `ddiloco launch` starts; 0: any free one, and on
    Kubernetes that of the shards."""

    nodes: dict[str, str] = Field(default_factory=dict)
    """Labels of this site's nodes (Kubernetes, Ray): {"topology.kubernetes.io/zone" = "a"}. They
    are added to `learner_nodes`, for the relay and the site's learners."""

    directives: tuple[str, ...] = Field(default=(), strict=False)
    """Options for sbatch that select this site's nodes (Slurm): "--partition=a",
    "--constraint=rack1". They follow those in `[launch.slurm]`, for the relay and the site's
    learners."""

    @property
    def learner_ids(self) -> tuple[str, ...]:
        """The names of its learners."""
        return tuple(f"learner-{number}" for number in self.learners)

    @field_validator("learners", mode="after")
    @classmethod
    def _check_learners(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if not value or len(set(value)) < len(value) or min(value) < 0:
            raise ConfigError(
                f"learners={list(value)} in [[sites]] must list at least one learner, each once: "
                "for example learners = [0, 1]"
            )
        return value


class TrustSettings(Settings):
    """`[trust]`: what limits the harm of a learner that trains badly."""

    table: ClassVar[str] = "[trust]"

    probation_periods: int = Field(default=0, ge=0)
    """Number of periods of `sync_every` own steps in which a learner's contributions have weight 0
    after it joined a run in progress with a fresh inner optimizer: without a checkpoint, and
    without the state of another learner. Such a learner counts for no quorum. Its training is
    dropped, so raise it only if joining learners raise the loss. 0: a learner counts at once (the
    paper)."""

    act: Literal["off", "show", "weigh", "exclude"] = "off"
    """Whether the evaluator scores learners, and what a low score does. The score is the median of
    the last 3 gains: by how much a learner's own contributions of one period lower the held-out
    loss, relative to the median learner. "show" only displays it. "weigh" lowers the weight of a
    learner's contributions. "exclude" gives them weight 0 until its score has recovered. Both need
    2 gains. With scores, the shards record payloads, as with `record_payloads` in [syncer]."""

    score_every: int = Field(default=4, ge=2)
    """Periods of `sync_every` steps from one score to the next, at least 2. For each score, the
    evaluator evaluates the model once per learner, and once more."""

    score_limit: float = Field(default=0.25, gt=0, le=0.5)
    """Score below which a learner is excluded, greater than 0 to 0.5. It counts again above twice
    the limit. With "weigh", a learner's weight falls from twice the limit on, in proportion to its
    score. Lower the limit if learners have very different data."""

    def inapplicable(self) -> Mapping[str, str]:
        """How to score without scores, and a limit without an effect."""
        if self.act == "off":
            return dict.fromkeys(("score_every", "score_limit"), "with act='off'")
        return {"score_limit": "with act='show'"} if self.act == "show" else {}


class RunConfig(Settings):
    """A whole run: the settings of one TOML file, with all defaults filled in."""

    run: RunSettings
    """The run's name, its number of learners, and its end."""

    sync: SyncSettings = Field(default_factory=SyncSettings)
    """The method: the schedule, the codecs and the merge."""

    outer: OuterSettings = Field(default_factory=OuterSettings)
    """The outer optimizer."""

    syncer: SyncerSettings = Field(default_factory=SyncerSettings)
    """The syncer's processes and addresses."""

    privacy: PrivacySettings = Field(default_factory=PrivacySettings)
    """What other processes and parties learn about a learner's training."""

    tls: TlsSettings = Field(default_factory=TlsSettings)
    """Certificates for encrypted connections."""

    learner: LearnerSettings = Field(default_factory=LearnerSettings)
    """The learners' processes."""

    data: DataSettings = Field(default_factory=DataSettings)
    """How the learners share the data."""

    workload: WorkloadSettings | None = Field(default_factory=WorkloadSettings)
    """Model and data; `None` if the learners run a `command` with its own."""

    trust: TrustSettings = Field(default_factory=TrustSettings)
    """What limits the harm of a learner that trains badly."""

    faults: tuple[FaultSettings, ...] = Field(default=(), strict=False)
    """Learners to kill during the run."""

    sites: tuple[SiteSettings, ...] = Field(default=(), strict=False)
    """Sites, each with learners behind a relay."""

    launch: LaunchSettings = Field(default_factory=LaunchSettings)
    """Where `ddiloco launch` places the processes. Other commands ignore it."""

    @property
    def learner_ids(self) -> tuple[str, ...]:
        """The names of the learners, in the order of their shares of the data."""
        return tuple(f"learner-{index}" for index in range(self.run.learners))

    def inapplicable(self) -> Mapping[str, str]:
        """What a run with secure sums does not use."""
        if not self.privacy.secure_sums:
            return {}
        return {name: WITH_SECURE_SUMS + why for name, why in UNUSED_BY_SUMS.items()}

    @property
    def threshold(self) -> int:
        """The least number of contributions in a secure sum; 0 without secure sums."""
        if not self.privacy.secure_sums:
            return 0
        return self.privacy.threshold or max(THRESHOLD_MIN, self.run.learners // 2 + 1)

    @property
    def records_payloads(self) -> bool:
        """Whether the shards record the payloads of contributions."""
        return self.syncer.record_payloads or self.trust.act != "off"

    def workload_options(self) -> dict[str, Any]:
        """The options for the workload: those of the file, and two from the run.

        These are `seed`, and `total_steps` for the learning rate schedule if the budget is in
        steps. The file may set both to other values.
        """
        options: dict[str, Any] = {"seed": self.run.seed}
        if self.run.max_steps is not None:
            options["total_steps"] = self.run.max_steps
        return options | self.required_workload.options

    @property
    def required_workload(self) -> WorkloadSettings:
        """The workload, where one is required.

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
        """The settings that the syncer sends to all learners, as values that `read_settings` reads.

        Settings of one process or machine are left out: addresses, folders, threads, faults.
        """
        public = self.model_dump(mode="json", exclude=_PRIVATE)
        if self.workload is None:
            # Complete, because the receiver does not know the command.
            public |= {"workload": None, "data": self.data.model_dump(mode="json")}
        else:
            public["workload"]["options"] = self.workload_options()
        return public | {"shards": self.syncer.shards}

    @model_validator(mode="before")
    @classmethod
    def _leave_out_what_a_command_has(cls, data: Any) -> Any:
        """Removes the workload and its evaluation if there is a command."""
        if not (isinstance(data, dict) and has_value(data.get("learner"), "command")):
            return data
        run = data.get("run")
        if isinstance(run, dict) and "evaluate_command" not in run:
            data = {**data, "run": {"evaluator": False, **run}}
        return {"workload": None, **data}

    @model_validator(mode="before")
    @classmethod
    def _start_with_schedule(cls, data: Any) -> Any:
        """Set `sync_every` to what the schedule returns for step 0."""
        sync, run = (data.get(name) if isinstance(data, dict) else None for name in ("sync", "run"))
        if not (isinstance(sync, dict) and isinstance(run, dict)) or "sync_every" in sync:
            return data
        schedule, steps = registered("schedule", str(sync.get("schedule"))), run.get("max_steps")
        if isinstance(schedule, NotLoaded) or not isinstance(steps, int | None):
            return data
        try:
            period = period_at(schedule, 0, steps)
        except MethodError as error:
            raise ConfigError(f"schedule={sync['schedule']!r} in [sync]: {error}") from None
        return {**data, "sync": {**sync, "sync_every": period}}

    @model_validator(mode="after")
    def _try_schedule(self) -> RunConfig:
        """Call the schedule for the steps of the run, so that a mistake shows before it starts."""
        schedule, steps = registered("schedule", str(self.sync.schedule)), self.run.max_steps
        if isinstance(schedule, NotLoaded):
            return self
        last = SCHEDULE_STEPS_TRIED if steps is None else steps
        try:
            for step in range(0, last + 1, max(1, last // SCHEDULE_STEPS_TRIED)):
                period_at(schedule, step, steps, self.sync.overlap_steps)
        except MethodError as error:
            raise ConfigError(f"schedule={self.sync.schedule!r} in [sync]: {error}") from None
        return self

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
                f"evaluator=true in [run] needs evaluate_command {because}: name the program that "
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
    def _keep_what_has_an_effect(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        kept = super()._keep_what_has_an_effect(dump)
        if self.learner.command and "data" in kept:
            kept["data"] = {k: v for k, v in kept["data"].items() if k not in OF_WORKLOAD_DATA}
        return kept

    @model_validator(mode="after")
    def _check_tables_against_each_other(self) -> RunConfig:
        learners, fragments = self.run.learners, self.sync.fragments
        for index, name in enumerate(self.learner_ids if self.sync.moments else ()):
            if self.learner.ranks_of(index) > 1:
                raise ConfigError(
                    f"ranks={self.learner.ranks_of(index)} of {name} in [learner] cannot be "
                    "combined with [sync.moments], which needs learners with one rank: set "
                    "ranks=1, or take [sync.moments] out"
                )
        if self.sync.quorum > learners:
            raise ConfigError(
                f"quorum={self.sync.quorum} in [sync] exceeds learners={learners} in [run]: "
                "lower quorum or start more learners"
            )
        devices = self.sync.devices
        if devices is not None and devices.cohort is not None and devices.cohort > learners:
            raise ConfigError(
                f"cohort={devices.cohort} in [sync.devices] exceeds learners={learners} in [run]: "
                "lower cohort or raise learners, the number of devices"
            )
        if devices is not None and self.learner.ranks != 1:
            raise ConfigError(
                f"ranks={self.learner.ranks!r} in [learner] cannot be combined with "
                "[sync.devices], because a device is one process: set ranks=1"
            )
        if devices is not None and self.workload is not None and self.data.elastic:
            raise ConfigError(
                "elastic=true in [data] cannot be combined with [sync.devices], because each "
                "device has its own data: set elastic=false"
            )
        if self.syncer.shards > fragments:
            raise ConfigError(
                f"shards={self.syncer.shards} in [syncer] exceeds fragments={fragments} in [sync], "
                "so a shard would own nothing: lower shards or raise fragments"
            )
        if self.run.store and self.syncer.lease_store and self.syncer.shards > 1:
            raise ConfigError(
                f"lease_store in [syncer] cannot be combined with shards={self.syncer.shards} and "
                "store in [run], because a standby would copy the state of all shards over that of "
                "one that runs: set shards=1, or share the run folder and take lease_store out"
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
                f"metrics_address={self.learner.metrics_address!r} in [learner] with "
                f"learners={learners} needs ports up to {last.rpartition(':')[2]}, but {PORT_MAX} "
                "is the last: lower the port"
            )
        if self.learner.party_key is not None and not self.privacy.members:
            raise ConfigError(
                f"party_key={str(self.learner.party_key)!r} in [learner] would be ignored without "
                "parties in [privacy]: set parties, or take party_key out"
            )
        self._check_addresses()
        self._check_sites()
        self._check_quotas()
        self._check_trust()
        self._check_ranks()
        self._check_gpus()
        self._check_faults()
        self._check_secure_sums()
        if self.privacy.dp is not None:
            check_dp(
                *(self.privacy.dp, self.sync, self.syncer),
                learners=learners,
                store=self.run.store,
                has_sites=bool(self.sites),
                is_secure=self.privacy.secure_sums,
            )
        return self

    def _check_addresses(self) -> None:
        plain = [each for each in self.syncer.addresses if "http://" in each]
        if self.tls.serves and plain:
            raise ConfigError(
                f"address {plain[0]!r} in [syncer] is not encrypted, but [tls] has a cert: "
                "write https://, or take cert out"
            )

    def _check_sites(self) -> None:
        known: dict[str, str] = {}
        for site in self.sites:
            if site.name in known.values():
                raise ConfigError(
                    f"name={site.name!r} occurs twice in [[sites]]: give each site its own name"
                )
            if site.upstream and site.upstream not in known.values():
                raise ConfigError(
                    f"upstream={site.upstream!r} of site {site.name!r} in [[sites]] names no site "
                    "above it: list that site first, or leave upstream out to dial the shards"
                )
            for index in site.learners:
                if index >= self.run.learners:
                    raise ConfigError(
                        f"learner {index} of site {site.name!r} in [[sites]] is out of range: with "
                        f"learners={self.run.learners} in [run] it must be from 0 to "
                        f"{self.run.learners - 1}"
                    )
                if f"{index}" in known:
                    raise ConfigError(
                        f"learner {index} is at site {known[f'{index}']!r} and at site "
                        f"{site.name!r} in [[sites]]: list it once"
                    )
                known[f"{index}"] = site.name
            known[f"site {site.name}"] = site.name
            self._check_place(site)
        if self.sites and self.sync.merge.rule not in SUMMED_RULES:
            raise ConfigError(
                f"rule={self.sync.merge.rule!r} in [sync.merge] cannot be combined with [[sites]], "
                "because a relay sends sums and not single contributions: choose 'rda' or 'mean'"
            )

    def _check_quotas(self) -> None:
        parties = self.privacy.agreed
        if parties is None or not parties.has_quotas:
            return
        if ":" in self.sync.merge.rule:
            raise ConfigError(
                f"rule={self.sync.merge.rule!r} in [sync.merge] cannot be combined with share_min "
                "and share_max in parties.toml, because a shard adds the sums of the parties: "
                "choose 'rda' or 'mean', or leave the shares out"
            )
        for site in self.sites:
            names = [name for name in self.represented()[site.name] if name in self.learner_ids]
            found = sorted({parties.of_learner(name).name for name in names})
            if len(found) > 1:
                raise ConfigError(
                    f"site {site.name!r} in [[sites]] has learners of {' and '.join(found)}, so "
                    "its relay would mix the parties whose shares parties.toml limits: write one "
                    "site for each party, or leave share_min and share_max out"
                )

    def represented(self) -> dict[str, list[str]]:
        """The processes that each relay represents, by its name."""
        relays = {site.name: list(site.learner_ids) for site in self.sites}
        # A relay before another one also represents the learners behind that one.
        for site in reversed(self.sites):
            if site.upstream:
                relays[site.upstream] += [*relays[site.name], site.name]
        return relays

    def _check_trust(self) -> None:
        act, learners, quorum = self.trust.act, self.run.learners, self.sync.quorum
        if act == "off":
            return
        if not self.run.evaluator or self.run.evaluate_command:
            raise ConfigError(
                f"act={act!r} in [trust] needs the built-in evaluator, which scores the learners: "
                "set evaluator=true in [run] without evaluate_command, or leave act out"
            )
        for used, what in (
            (self.privacy.secure_sums, "secure_sums=true in [privacy]"),
            (self.privacy.dp is not None, "[privacy.dp]"),
        ):
            if used:
                raise ConfigError(
                    f"act={act!r} in [trust] cannot be combined with {what}, because a score needs "
                    "single contributions: leave one of them out"
                )
        if self.sites:
            raise ConfigError(
                f"act={act!r} in [trust] cannot be combined with [[sites]], because a relay sends "
                "sums and not single contributions: leave one of them out"
            )
        if act == "show":
            return
        if learners < 3:
            raise ConfigError(
                f"act={act!r} in [trust] needs at least 3 learners, but learners={learners} in "
                "[run]: a score compares with the median learner: set act='show'"
            )
        if act == "weigh" and self.sync.participation == "async":
            raise ConfigError(
                "act='weigh' in [trust] cannot be combined with participation='async', which "
                "merges contributions one by one, so that a weight has no effect: set act='exclude'"
            )
        left = learners - (learners - 1) // 2
        if act == "exclude" and quorum > left:
            raise ConfigError(
                f"quorum={quorum} in [sync] exceeds {left}: act='exclude' in [trust] may exclude "
                f"{learners - left} of {learners} learners, and the run would then stall: lower "
                "quorum, or set act='weigh'"
            )

    def _check_secure_sums(self) -> None:
        """Reject what requires single contributions."""
        privacy, sync, learners = self.privacy, self.sync, self.run.learners
        if not privacy.secure_sums:
            return
        threshold = self.threshold
        if threshold > learners:
            raise ConfigError(
                f"threshold={threshold} in [privacy] exceeds learners={learners} in [run], so no "
                "sum would ever be opened: lower threshold or start more learners"
            )
        from decoupled_diloco.merge.fixed_point import FixedPoint  # torch takes seconds
        from decoupled_diloco.privacy.dp import bits_needed

        noise = 0.0
        if privacy.dp is not None:
            # Of equal fragments; a smaller one is checked when the model is known.
            noise = privacy.dp.mechanism(sync.fragments).noise_of_sum(1)
        form = FixedPoint.of(privacy.bits, learners, noise)
        if privacy.dp is not None:
            least = bits_needed(privacy.dp.noise_multiplier, learners)
            if form.bits < least:
                raise ConfigError(
                    f"bits={form.bits} in [privacy] is too coarse for noise_multiplier="
                    f"{privacy.dp.noise_multiplier:g} in [privacy.dp], of which each of {learners} "
                    f"learners adds a share: set bits to {least} or more, or raise noise_multiplier"
                )
        if learners > MEMBERS_MAX:
            raise ConfigError(
                f"learners={learners} in [run] exceeds {MEMBERS_MAX} with secure_sums=true in "
                "[privacy], whose cohort must fit into one message: start fewer learners"
            )
        if sync.moments is not None:
            raise ConfigError(
                "[sync.moments] cannot be combined with secure_sums=true in [privacy], because "
                "moments have no bound for its fixed point: take one of them out"
            )
        why = "because a shard must not see single contributions"
        refused = (
            ("rule", sync.merge.rule, ("rda", "mean"), sync.merge.table),
            ("buffers", sync.merge.buffers, ("mean", "local"), sync.merge.table),
            ("participation", sync.participation, ("active", "all"), sync.table),
            ("record_payloads", self.syncer.record_payloads, (False,), self.syncer.table),
        )
        for name, given, allowed, table in refused:
            if given not in allowed:
                shown = " or ".join(
                    repr(a).lower() if isinstance(a, bool) else repr(a) for a in allowed
                )
                raise ConfigError(
                    f"{name}={given!r} in {table} cannot be combined with secure_sums=true in "
                    f"[privacy], {why}: set {name}={shown}"
                )
        for index, name in enumerate(self.learner_ids):
            if self.learner.ranks_of(index) > 1 and self.learner.sync_ranks != 1:
                raise ConfigError(
                    f"sync_ranks={self.learner.sync_ranks!r} in [learner] cannot be combined with "
                    f"secure_sums=true in [privacy], because one rank of {name} masks the whole "
                    "contribution: set sync_ranks=1"
                )

    def _check_place(self, site: SiteSettings) -> None:
        """Reject a choice of nodes that the backend would ignore."""
        backend = self.launch.backend
        if site.nodes and backend == "slurm":
            raise ConfigError(
                f"nodes={site.nodes!r} of site {site.name!r} in [[sites]] would be ignored on "
                'Slurm, which has no labels: write directives = ["--constraint=…"]'
            )
        if site.directives and backend in ("kubernetes", "ray"):
            raise ConfigError(
                f"directives={list(site.directives)!r} of site {site.name!r} in [[sites]] would be "
                f'ignored with backend="{backend}" in [launch]: write nodes = {{LABEL = "VALUE"}}'
            )

    def site_of(self, index: int) -> SiteSettings | None:
        """The site of a learner; `None`: it dials the shards."""
        return next((site for site in self.sites if index in site.learners), None)

    def relay_of(self, index: int) -> str:
        """The name of a learner's relay; empty: it dials the shards."""
        site = self.site_of(index)
        return site.name if site else ""

    def _check_ranks(self) -> None:
        learner, learners = self.learner, self.run.learners
        for name in ("ranks", "parallelism"):
            told = getattr(learner, name)
            if isinstance(told, tuple) and len(told) != learners:
                raise ConfigError(
                    f"{name} in [learner] lists {len(told)}, but learners={learners}: write one "
                    "for all, or one for each"
                )
        for index, name in enumerate(self.learner_ids):
            ranks, cut = learner.ranks_of(index), learner.parallelism
            word = cut[index] if isinstance(cut, tuple) else learner.parallelism_of(index)
            if ranks > 1 and word == "plain":
                raise ConfigError(
                    f"parallelism='plain' in [learner] is for one rank, but {name} has "
                    f"ranks={ranks}: choose 'ddp', 'fsdp' or 'tp', or set one rank"
                )
            if ranks == 1 and word != "plain":
                raise ConfigError(
                    f"parallelism={word!r} in [learner] would be ignored for {name}, which has "
                    "ranks=1: write 'plain', or set more ranks"
                )
            if ranks % self.launch.learner.hosts:
                raise ConfigError(
                    f"hosts={self.launch.learner.hosts} in [launch.learner] does not divide the "
                    f"ranks={ranks} of {name}: change one of them"
                )
            if learner.command:
                continue
            sync_ranks = learner.sync_ranks
            if ranks > 1 and isinstance(sync_ranks, int) and not 1 <= sync_ranks <= ranks:
                raise ConfigError(
                    f"sync_ranks={sync_ranks} in [learner] is out of range for {name}, which has "
                    f"ranks={ranks}: choose 1 to {ranks}, 'hosts' or 'all'"
                )
            if ranks > 1 and self.data.elastic:
                raise ConfigError(
                    f"ranks={learner.ranks!r} in [learner] cannot be combined with elastic=true in "
                    "[data], which is for learners with one process: set elastic=false"
                )

    def _check_gpus(self) -> None:
        gpus, device = self.launch.learner.gpus, self.learner.device
        if not gpus or self.launch.backend == "local":
            return
        hosts = self.launch.learner.hosts
        if gpus % hosts:
            raise ConfigError(
                f"gpus={gpus} in [launch.learner] is not a multiple of hosts={hosts}: change one "
                "of them"
            )
        if device == "cpu":
            raise ConfigError(
                f"gpus={gpus} in [launch.learner] would be idle with device='cpu' in [learner]: "
                "leave gpus out, or write device='auto'"
            )
        for index, name in enumerate(self.learner_ids):
            if self.learner.ranks_of(index) > gpus:
                raise ConfigError(
                    f"gpus={gpus} in [launch.learner] is too few for {name}, which has "
                    f"ranks={self.learner.ranks_of(index)}: reserve one GPU for each rank"
                )

    def _check_faults(self) -> None:
        dead: dict[str, float] = {}
        for fault in sorted(self.faults, key=lambda fault: fault.at):
            if fault.kill not in self.learner_ids:
                raise ConfigError(
                    f"kill={fault.kill!r} in [[faults]] is not a learner: "
                    f"{suggestion(fault.kill, self.learner_ids)}"
                )
            if fault.kill in dead:
                raise ConfigError(
                    f"kill={fault.kill!r} at={fault.at} in [[faults]] would be ignored, because "
                    f"{fault.kill} is dead since at={dead[fault.kill]}: set restart=true there or "
                    "take this entry out"
                )
            if not fault.restart:
                dead[fault.kill] = fault.at


def advertised(config: RunConfig, ports: Sequence[int] = ()) -> tuple[str, ...]:
    """The addresses at which learners reach the shards, in order of the shards.

    They come from `addresses`, or from the host and the ports.

    Args:
        ports: The actual ports of the shards, and then those of their standbys. Default: the ports
            in the settings.

    Raises:
        ConfigError: The settings do not fix the ports.
    """
    settings = config.syncer
    if settings.addresses:
        return settings.addresses
    if not ports and not settings.port:
        raise ConfigError(
            "port=0 in [syncer] picks free ports, so no process knows where the shards are: pass "
            "their addresses (--syncer for a learner, --addresses for a shard), or set port"
        )
    shards = settings.shards
    ports = ports or range(settings.port, settings.port + shards * (1 + settings.standby))
    urls = [url_of(settings.host, port, config.tls.scheme) for port in ports]
    return tuple(BETWEEN.join(urls[shard::shards]) for shard in range(shards))
