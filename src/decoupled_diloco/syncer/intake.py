"""Bodies on their way into a shard and out of it: what the data plane is told, and reports.

`Intake` joins each expected body with its announcement on the control plane, has it verified whole,
and tells the machine. `Offers` makes published copies available under the paths of the core.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

from decoupled_diloco.errors import MergeError, ProtocolError, TransportError
from decoupled_diloco.merge import Body as TensorBody
from decoupled_diloco.merge import as_bytes
from decoupled_diloco.merge.plan import values_of
from decoupled_diloco.protocol import effects as do
from decoupled_diloco.protocol import events as fact
from decoupled_diloco.protocol import messages as say
from decoupled_diloco.syncer.fragments import PublishedCopy, ShardTensors
from decoupled_diloco.transport.base import Body, BodyStore, Upload

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

DECODED_MAX = 2
"""Contributions that are decoded and not folded yet: one in the worker, one that the loop looks at.
Further bodies wait as they came, in the transport's bounded pool."""

DIFFERENCES_KEPT = 2
"""Published differences of a fragment that can be fetched."""

Spawn = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]
Handle = Callable[[fact.SyncerEvent], None]


class InWorker(Protocol):
    """Runs a function in the shard's one worker, in order."""

    def __call__(self, task: Callable[[], _T], /) -> Awaitable[_T]:
        """The result of ``task()``."""


@dataclass(frozen=True)
class Expected:
    """A body that is expected: what for, the upload, the announcement, and who waits for both."""

    key: str
    upload: Upload
    announced: asyncio.Future[Any]
    task: asyncio.Task[None]


class Intake:
    """The bodies that a shard expects.

    Args:
        tensors: Where contributions are verified and copies installed.
        bodies: The server's data plane.
        spawn: Starts a task of the shard.
        in_worker: Runs tensor work.
        handle: Tells the machine.
        stopping: Whether the shard is ending, so that what fails now means nothing.
        keep: Keeps each verified body under its path, in the worker.
    """

    def __init__(
        self,
        tensors: ShardTensors,
        bodies: BodyStore,
        *,
        spawn: Spawn,
        in_worker: InWorker,
        handle: Handle,
        stopping: Callable[[], bool],
        keep: Callable[[str, TensorBody], None] | None = None,
    ) -> None:
        self._tensors = tensors
        self._bodies = bodies
        self._spawn = spawn
        self._in_worker = in_worker
        self._handle = handle
        self._stopping = stopping
        self._keep = keep
        self._decoded = asyncio.Semaphore(DECODED_MAX)
        self._expected: dict[str, Expected] = {}
        self._paths: dict[str, str] = {}

    def url(self, path: str) -> str:
        """The transport's URL of an expected path."""
        return self._expected[path].upload.url

    def expect(self, effect: do.Expect | do.ExpectCopy) -> None:
        """Is ready for a body from now on; an older body of the same purpose is refused."""
        path, plan = effect.path, self._tensors.plan
        self.unexpect(path, "asked again")
        announced: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if isinstance(effect, do.Expect):
            key = f"{effect.learner}/{effect.fragment}/{effect.ask}"
            nbytes = plan.uplink_nbytes(effect.fragment)
            upload = self._bodies.expect(path, nbytes, effect.learner)
            task = self._spawn(self._contribution(upload, announced, effect))
        else:
            key = f"{effect.learner}/copy/{effect.attempt}/{effect.fragment}"
            nbytes = plan.whole_nbytes(effect.fragment)
            upload = self._bodies.expect(path, nbytes, effect.learner)
            task = self._spawn(self._copy(upload, announced, effect))
        expected = self._expected[path] = Expected(key, upload, announced, task)
        self._paths[key] = path
        task.add_done_callback(lambda _: self._forget(path, expected))

    def _forget(self, path: str, expected: Expected) -> None:
        if self._expected.get(path) is expected:
            del self._expected[path], self._paths[expected.key]

    def unexpect(self, path: str, why: str) -> None:
        """Refuses the body of a path from now on."""
        expected = self._expected.get(path)
        if expected is not None:
            expected.upload.cancel(why)
            expected.task.cancel()

    def announce(self, learner: str, message: say.Upload | say.Copy) -> None:
        """A learner has said what its body is."""
        match message:
            case say.Upload(fragment, ask):
                key = f"{learner}/{fragment}/{ask}"
            case say.Copy(fragment, attempt):
                key = f"{learner}/copy/{attempt}/{fragment}"
        expected = self._expected.get(self._paths.get(key, ""))
        if expected is not None and not expected.announced.done():
            expected.announced.set_result(message)

    async def _contribution(
        self, upload: Upload, announced: asyncio.Future[say.Upload], effect: do.Expect
    ) -> None:
        learner, fragment, ask = effect.learner, effect.fragment, effect.ask
        norm = 0.0

        def verify(body: Body, message: say.Upload) -> None:
            nonlocal norm
            norm = self._tensors.verify(fragment, ask, body.buffer, message.digest)
            if self._keep is not None:
                self._keep(effect.path, body.buffer)

        def arrived(message: say.Upload) -> None:
            self._handle(
                fact.BodyArrived(
                    learner=learner,
                    epoch=effect.epoch,
                    fragment=fragment,
                    ask=ask,
                    base=message.base,
                    steps=message.steps,
                    tokens=message.tokens,
                    nbytes=upload.nbytes,
                    norm=norm,
                )
            )

        try:
            await self._take(upload, announced, verify, arrived)
        except (TransportError, ProtocolError, MergeError) as error:
            if not self._stopping():
                logger.warning("fragment %d: nothing from %s: %s", fragment, learner, error)
                self._handle(fact.BodySpoiled(learner, fragment, ask, str(error)))

    async def _copy(
        self, upload: Upload, announced: asyncio.Future[say.Copy], effect: do.ExpectCopy
    ) -> None:
        learner, fragment, attempt = effect.learner, effect.fragment, effect.attempt
        numel = self._tensors.plan.fragments[fragment].numel

        def receive(body: Body, message: say.Copy) -> None:
            self._tensors.receive(fragment, values_of(body.buffer, numel), message.digest)
            if self._keep is not None:
                self._keep(effect.path, body.buffer)

        def arrived(message: say.Copy) -> None:
            self._handle(fact.CopyArrived(learner, fragment, attempt, message.digest))

        try:
            await self._take(upload, announced, receive, arrived)
        except (TransportError, ProtocolError, MergeError) as error:
            if not self._stopping():
                self._handle(fact.CopySpoiled(learner, fragment, attempt, str(error)))

    async def _take(
        self,
        upload: Upload,
        announced: asyncio.Future[_T],
        use: Callable[[Body, _T], None],
        then: Callable[[_T], None],
    ) -> None:
        """Waits for body and announcement, uses both in the worker, gives the buffer back.

        What the machine orders when it is told ``then`` has gone through the worker before the next
        one is decoded.
        """
        body: Body | None = None
        try:
            whole = body = await upload.body
            message = await announced
            async with self._decoded:
                await self._in_worker(lambda: use(whole, message))
                then(message)
                await self._in_worker(lambda: None)
        finally:
            upload.cancel("the wait for it is over")
            if body is not None:
                body.release()


class Offers:
    """Published copies that learners may fetch.

    Of each fragment: the newest whole, which is the shard's own published copy, and the two newest
    differences, so that who is one version behind need not fetch four bytes an element. Who asks
    for an older body is told that it is gone, and fetches the newest whole.

    Args:
        bodies: The server's data plane.
    """

    def __init__(self, bodies: BodyStore) -> None:
        self._bodies = bodies
        self._wholes: dict[int, str] = {}
        self._differences: dict[int, list[str]] = {}
        self._urls: dict[str, str] = {}

    def offer(self, fragment: int, version: say.Version, published: PublishedCopy) -> None:
        """Offers a version: whole, and as difference unless that is empty."""
        whole, difference = f"/whole/{fragment}/{version}", f"/difference/{fragment}/{version}"
        older = self._wholes.pop(fragment, whole)
        if older != whole:
            self._withdraw(older)
        self._wholes[fragment] = whole
        self._urls[whole] = self._bodies.offer(whole, _view(published.whole), published.digest)
        if published.difference.numel():
            kept = self._differences.setdefault(fragment, [])
            kept.append(difference)
            self._urls[difference] = self._bodies.offer(difference, _view(published.difference), "")
            while len(kept) > DIFFERENCES_KEPT:
                self._withdraw(kept.pop(0))

    def _withdraw(self, path: str) -> None:
        self._bodies.withdraw(path)
        del self._urls[path]

    def url(self, path: str) -> str:
        """The transport's URL of an offered path; empty for an empty path."""
        return self._urls[path] if path else ""


def _view(tensor: torch.Tensor) -> memoryview:
    return as_bytes(tensor).numpy().data
