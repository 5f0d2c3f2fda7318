"""What a launcher passes to a user's program, so that `Learner` and `Observer` find their run.

The launcher sets environment variables, which torchrun and other starters pass on to every rank. A
secret is never among them, only the path of its file. The program's standard input is one end of a
pipe whose other end the launcher holds: it closes when the launcher ends, however it ends. Ranks
that torchrun has put into sessions of their own notice that, and end.
"""

from __future__ import annotations

import functools
import os
import select
import signal
import stat
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

from decoupled_diloco.errors import ConfigError
from decoupled_diloco.storage.shared_folder import SharedFolder, recorded_end, shared_addresses
from decoupled_diloco.transport.base import Client
from decoupled_diloco.transport.tls import Tls
from decoupled_diloco.transport.tokens import read_secret

PREFIX = "DDILOCO_"

Role = Literal["learner", "evaluator"]

_KIND = {"learner": "Learner", "evaluator": "Observer"}

Init = TypeVar("Init", bound=Callable[..., None])


@dataclass(frozen=True)
class Launched:
    """A program's place in its run. Field ``name`` is the variable ``DDILOCO_NAME``, and so on.

    Empty text means that a value is not set.

    Attributes:
        role: What the program is to the run.
        name: The name to join with.
        index: Which learner, 0 to ``learners`` - 1.
        learners: How many learners the run has.
        syncer: Addresses of the shards, separated by commas.
        run_folder: The run folder that says where the shards are, in the place of ``syncer``.
        folder: The run folder on this machine, which may record the run's end.
        token_file: File with the secret.
        tls_authority: Certificate of the authority that the shards' certificates come from.
        tls_certificate: Certificate of this process, and ``tls_key`` its key.
        checkpoint: Folder of all learners' checkpoints.
        checkpoint_seconds: Seconds from one checkpoint to the next.
        flush_seconds: How long `Learner.close` waits for what is not merged yet.
        disconnect_seconds: How long to try to reach the shards; empty: forever.
        listen: See `Learner`, as ``metrics`` and ``carriers``.
        tape: File of this process's events.
        evaluate_seconds: Seconds from one evaluation to the next.
        stdin: Number of the pipe that is the program's standard input.
    """

    role: str = ""
    name: str = ""
    index: str = ""
    learners: str = ""
    syncer: str = ""
    run_folder: str = ""
    folder: str = ""
    token_file: str = ""
    tls_authority: str = ""
    tls_certificate: str = ""
    tls_key: str = ""
    checkpoint: str = ""
    checkpoint_seconds: str = ""
    flush_seconds: str = ""
    disconnect_seconds: str = ""
    listen: str = ""
    metrics: str = ""
    carriers: str = ""
    tape: str = ""
    evaluate_seconds: str = ""
    stdin: str = ""

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> Launched:
        """What an environment says."""
        return cls(**{f.name: environment.get(_variable(f.name), "") for f in fields(cls)})

    def environment(self) -> dict[str, str]:
        """The variables that `read` reads, each with a value."""
        return {_variable(f.name): v for f in fields(self) if (v := getattr(self, f.name))}

    def addresses(self) -> tuple[str, ...]:
        """Where the shards are.

        Waits until they are started, if the run folder has to say where.
        """
        if self.run_folder:
            return shared_addresses(Path(self.run_folder))
        return tuple(self.syncer.split(","))

    def arguments(self) -> dict[str, Any]:
        """The arguments of `Learner` or `Observer`, without those that have no value.

        Raises:
            ConfigError: The secret cannot be read, or a variable has no number.
        """
        token, tls = self._token(), self._tls()
        if self.role == "learner":
            own: dict[str, Any] = {
                "learner_id": self.name,
                "checkpoint": self.checkpoint or None,
                "checkpoint_every_seconds": self._number("checkpoint_seconds"),
                "hand_in_seconds": self._number("flush_seconds"),
                "listen": self.listen or None,
                "metrics": self.metrics or None,
                "carriers": int(self.carriers) if self.carriers.isdigit() else self.carriers,
                "tape": self.tape or None,
            }
        else:
            own = {"name": self.name}
        own |= {"token": token, "tls": tls, "give_up_seconds": self._number("disconnect_seconds")}
        return {name: value for name, value in own.items() if value not in (None, "")}

    def client(self, token: str | None, tls: Tls | None) -> Callable[[], Client]:
        """Makes the transport's client, which finds in the run folder what is recorded there."""

        def make() -> Client:
            # Imported here: the launcher reads this module, and starts sooner without aiohttp.
            from decoupled_diloco.transport.http_client import HttpClient

            return HttpClient(
                token=read_secret(token),
                principal=self.name if self.run_folder else "",
                tls=tls,
                locator=SharedFolder(Path(self.run_folder)) if self.run_folder else None,
                ended=lambda: recorded_end(Path(self.run_folder or self.folder)),
            )

        return make

    def _token(self) -> str | None:
        if not self.token_file:
            return None
        try:
            return Path(self.token_file).read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"{_variable('token_file')}={self.token_file!r} cannot be read "
                f"({getattr(error, 'strerror', None) or 'it is not text'}): it is the file with "
                "the run's secret"
            ) from None

    def _tls(self) -> Tls | None:
        authority, certificate = self.tls_authority or None, self.tls_certificate or None
        if authority is None and certificate is None:
            return None
        return Tls(authority, certificate, self.tls_key or None)

    def _number(self, name: str) -> float | None:
        text = getattr(self, name)
        try:
            return float(text) if text else None
        except ValueError:
            raise ConfigError(
                f"{_variable(name)}={text!r} is not a number of seconds: leave it to the launcher, "
                "which sets it"
            ) from None


def _variable(name: str) -> str:
    return PREFIX + name.upper()


def launched_as(role: Role) -> Launched:
    """This process's place in its run.

    Raises:
        ConfigError: No launcher has started it, or as something else.
    """
    found = Launched.read(os.environ)
    kind = _KIND[role]
    if not (found.syncer or found.run_folder):
        raise ConfigError(
            f"dd.{kind}(model) has no syncer address, and {_variable('syncer')} is not set: pass "
            f'an address, as dd.{kind}(model, "http://HOST:PORT"), or start this program with '
            f"ddiloco train or ddiloco {role}"
        )
    if found.role != role:
        raise ConfigError(
            f"dd.{kind}(model) without a syncer address, but this program was started as the run's "
            f"{found.role}: use dd.{_KIND.get(found.role, kind)}, or pass an address"
        )
    _end_with_the_launcher(found.stdin)
    return found


def finds_its_run(role: Role) -> Callable[[Init], Init]:
    """Has a constructor without an address take what the launcher has passed.

    Explicit arguments other than `None` win.
    """

    def decorate(init: Init) -> Init:
        @functools.wraps(init)
        def constructor(self: object, *positional: Any, **named: Any) -> None:
            if positional[1:] == (None,):
                positional = positional[:1]
            if len(positional) < 2 and named.get("syncer") is None:
                launched = launched_as(role)
                explicit = {name: value for name, value in named.items() if value is not None}
                named = {**launched.arguments(), **explicit, "syncer": launched.addresses()}
                if launched.run_folder or launched.folder:
                    client = launched.client(named.get("token"), named.get("tls"))
                    named.setdefault("client", client)
            init(self, *positional, **named)

        return cast("Init", constructor)

    return decorate


_watching: set[int] = set()


def _end_with_the_launcher(stdin: str) -> None:
    """Ends this process at once when the launcher has ended, whatever else it does.

    Only if its standard input still is the launcher's pipe. Nothing is read from it.
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
        poll.register(0, 0)  # whether it is closed, not what it holds
        poll.poll()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="launcher", daemon=True).start()
