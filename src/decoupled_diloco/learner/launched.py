"""The values that a launcher passes to a user's program, so that it finds its run.

The launcher sets environment variables, which torchrun and other starters pass on to every rank.
They never include a secret, only the path of its file. The program's standard input is one end of a
pipe, and the launcher has the other end. That end closes whenever the launcher ends, even if it is
killed. So ranks that torchrun has put into separate sessions detect it, and end.
"""

from __future__ import annotations

import os
import select
import signal
import stat
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal, TypeVar, cast

from decoupled_diloco.errors import ConfigError
from decoupled_diloco.learner.option_groups import (
    Checkpointing,
    Observability,
    ParticipantOptions,
    PartyFiles,
    SyncerConnection,
    Timeouts,
)
from decoupled_diloco.storage.shared_folder import SharedFolder, recorded_end, shared_addresses
from decoupled_diloco.transport.interface import Client
from decoupled_diloco.transport.tls import TLSConfig
from decoupled_diloco.transport.tokens import read_secret

PREFIX = "DDILOCO_"

Role = Literal["learner", "evaluator"]

T = TypeVar("T")

_KIND = {"learner": "Learner", "evaluator": "Observer"}


def client_in_run(
    principal: str,
    token: str | None,
    tls: TLSConfig | None,
    *,
    folder: Path,
    shared: Path | None,
) -> Client:
    """Return a client that also reads the records of a run folder.

    Args:
        principal: Name of the process.
        token: Its auth token.
        tls: Its CA and certificate.
        folder: The run folder on this machine, which may record the run's end.
        shared: The shards' run folder, if this machine shares it; their addresses are read there
            whenever they are dialed.
    """
    # Imported here: the launcher reads this module, and starts sooner without aiohttp.
    from decoupled_diloco.transport.http_client import HttpClient

    return HttpClient(
        token=token,
        principal=principal,
        tls=tls,
        locator=None if shared is None else SharedFolder(shared),
        ended=lambda: recorded_end(shared or folder),
    )


@dataclass(frozen=True)
class Launched:
    """A program's place in its run. Field ``name`` is the variable ``DDILOCO_NAME``, and so on.

    Empty text means that a value is not set.

    Attributes:
        role: The program's role in the run: ``"learner"`` or ``"evaluator"``.
        name: The name to join with.
        index: Index of the learner, 0 to ``learners`` - 1.
        learners: Number of learners in the run.
        syncer: Addresses of the shards, separated by commas.
        run_folder: The shared run folder that records the shards' addresses. Then ``syncer`` is
            only the address of the learner's relay, if it has one.
        folder: The run folder on this machine, which may record the run's end.
        auth_token_file: File with the auth token.
        tls_ca_cert: Certificate of the CA that signed the shards' certificates.
        tls_cert: Certificate of this process; ``tls_key`` is its key.
        checkpoint: Folder for the checkpoints of all learners.
        checkpoint_seconds: Seconds between two checkpoints.
        flush_seconds: Seconds that `Learner.close` waits for training that is not merged yet.
        disconnect_seconds: Seconds without any reachable shard before an error; empty: forever.
        metrics_address: See `Observability`.
        sync_ranks: See `Learner`.
        event_tape: File for this process's events.
        evaluate_seconds: Seconds between two evaluations.
        parties: See `PartyFiles`.
        party_key: See `PartyFiles`.
        stdin: Inode number of the pipe that is the program's standard input.
    """

    role: str = ""
    name: str = ""
    index: str = ""
    learners: str = ""
    syncer: str = ""
    run_folder: str = ""
    folder: str = ""
    auth_token_file: str = ""
    tls_ca_cert: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    checkpoint: str = ""
    checkpoint_seconds: str = ""
    flush_seconds: str = ""
    disconnect_seconds: str = ""
    metrics_address: str = ""
    sync_ranks: str = ""
    event_tape: str = ""
    evaluate_seconds: str = ""
    parties: str = ""
    party_key: str = ""
    stdin: str = ""

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> Launched:
        """Return the values that are set in an environment."""
        return cls(**{f.name: environment.get(_variable(f.name), "") for f in fields(cls)})

    def environment(self) -> dict[str, str]:
        """Return the variables for `read`, without empty ones."""
        return {_variable(f.name): v for f in fields(self) if (v := getattr(self, f.name))}

    def addresses(self) -> tuple[str, ...]:
        """Return the addresses of the relay, if any, and of the shards.

        With ``run_folder``, wait until the started shards have recorded them.
        """
        shards = shared_addresses(Path(self.run_folder)) if self.run_folder else ()
        return (*filter(None, self.syncer.split(",")), *shards)

    def fill(self, given: ParticipantOptions) -> tuple[SyncerConnection, ParticipantOptions]:
        """Return the connection, and the program's options completed by the run's.

        With ``run_folder``, wait until the started shards have recorded their addresses.

        Raises:
            ConfigError: The auth token cannot be read, or a variable is not a number.
        """
        passed = ParticipantOptions(
            name=self.name or None,
            auth_token=self._token(),
            tls=self._tls(),
            timeouts=Timeouts(
                disconnect=self._number("disconnect_seconds", None),
                flush=self._number("flush_seconds", Timeouts.flush),
            ),
            observability=Observability(
                metrics_address=self.metrics_address or None, event_tape=self.event_tape or None
            ),
            sync_ranks=self._sync_ranks(),
            checkpoint=Checkpointing(
                self.checkpoint or None,
                self._number("checkpoint_seconds", Checkpointing.interval_seconds),
            ),
            party=PartyFiles(self.parties or None, self.party_key or None),
        )
        options = given.filled(passed)
        own_client = self.run_folder or self.folder
        client = self._client(options.auth_token, options.tls) if own_client else None
        return SyncerConnection(self.addresses(), client), options

    def _sync_ranks(self) -> int | Literal["hosts", "all"] | None:
        if self.sync_ranks.isdigit():
            return int(self.sync_ranks)
        return cast('Literal["hosts", "all"]', self.sync_ranks) or None

    def _client(self, auth_token: str | None, tls: TLSConfig | None) -> Callable[[], Client]:
        """Return a function that creates a client that also reads the run folder's records."""
        shared = Path(self.run_folder) if self.run_folder else None
        principal = self.name if self.run_folder else ""
        return lambda: client_in_run(
            principal, read_secret(auth_token), tls, folder=Path(self.folder), shared=shared
        )

    def _token(self) -> str | None:
        if not self.auth_token_file:
            return None
        try:
            return Path(self.auth_token_file).read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"{_variable('auth_token_file')}={self.auth_token_file!r} cannot be read "
                f"({getattr(error, 'strerror', None) or 'it is not text'}): make the file with "
                "the run's auth token readable for this process"
            ) from None

    def _tls(self) -> TLSConfig | None:
        ca_cert, cert = self.tls_ca_cert or None, self.tls_cert or None
        if ca_cert is None and cert is None:
            return None
        return TLSConfig(ca_cert, cert, self.tls_key or None)

    def _number(self, name: str, default: T) -> float | T:
        text = getattr(self, name)
        try:
            return float(text) if text else default
        except ValueError:
            raise ConfigError(
                f"{_variable(name)}={text!r} is not a number of seconds: do not set it, the "
                "launcher does"
            ) from None


def _variable(name: str) -> str:
    return PREFIX + name.upper()


def launched_as(role: Role) -> Launched:
    """Return this process's place in its run, and end the process when its launcher ends.

    Raises:
        ConfigError: No launcher started this process, or it was started in another role or none.
    """
    found = Launched.read(os.environ)
    kind = _KIND[role]
    if not (found.syncer or found.run_folder):
        raise ConfigError(
            f"dd.{kind}(model) has no syncer address, and {_variable('syncer')} is not set: pass "
            f'an address, as dd.{kind}(model, "http://HOST:PORT"), or start this program with '
            f"ddiloco train or ddiloco {role}"
        )
    if found.role not in _KIND:
        given = _variable("syncer" if found.syncer else "run_folder")
        problem = f"is {found.role!r}, which is not known" if found.role else "is not set"
        raise ConfigError(
            f"{given} is set, but {_variable('role')} {problem}: only ddiloco sets these "
            f'variables: unset {given} and pass an address, as dd.{kind}(model, "http://HOST:PORT")'
        )
    if found.role != role:
        raise ConfigError(
            f"dd.{kind}(model) without a syncer address, but this program was started as the run's "
            f"{found.role}: use dd.{_KIND[found.role]}, or pass an address"
        )
    _end_with_the_launcher(found.stdin)
    return found


_watching: set[int] = set()


def _end_with_the_launcher(stdin: str) -> None:
    """Start a thread that kills this process as soon as the launcher has ended.

    It does so only if standard input is still the launcher's pipe. It reads nothing from the pipe.
    """
    if os.getpid() in _watching or not stdin.isdigit():
        return
    try:
        found = os.fstat(0)
    except OSError:
        return
    if not stat.S_ISFIFO(found.st_mode) or found.st_ino != int(stdin):
        return
    _watching.add(os.getpid())

    def watch() -> None:
        poll = select.poll()
        poll.register(0, 0)  # no event but the hang-up, which is always reported
        poll.poll()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="launcher", daemon=True).start()
