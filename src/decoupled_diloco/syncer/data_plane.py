"""A shard's incoming and outgoing payloads.

`Uploads` matches each expected payload with its announcement on the control plane, has it verified
as a whole, and passes the result to the machine. `Downloads` offers published copies under the
paths that the machine uses.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeVar

import torch

from decoupled_diloco.errors import MergeError, ProtocolError, TransportError
from decoupled_diloco.merge import Body as TensorBody
from decoupled_diloco.merge import as_bytes
from decoupled_diloco.merge.plan import values_of
from decoupled_diloco.protocol import messages
from decoupled_diloco.protocol.messages import Asking, Version, average_path
from decoupled_diloco.shell.driver import Driver, executes
from decoupled_diloco.syncer.contributions import Contributions
from decoupled_diloco.syncer.shard_tensors import PublishedCopy, ShardTensors
from decoupled_diloco.transport.payload_store import BodyBooks, BodyUpload, body_url
from decoupled_diloco.transport.pool import PoolBody

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

DECODED_MAX = 2
"""Contributions that are decoded and not yet folded: one in the worker, one that the loop handles.

Further payloads wait undecoded in the transport's bounded pool.
"""


class InWorker(Protocol):
    """The shard's only worker thread."""

    def run(self, task: Callable[[], _T], /) -> Coroutine[Any, Any, _T]:
        """Run a function after all earlier ones, and return the result of ``task()``."""


@dataclass(slots=True)
class Expected:
    """An expected payload.

    Attributes:
        effect: The order to expect it.
        upload: Its upload; ``None`` if a relay receives it.
        message: The learner's announcement, once received.
        has_arrived: ``None`` until the upload ends; then whether the payload arrived.
        task: The task that processes the payload, once it has arrived.
        report: The relay's report that the payload has arrived there. It may overtake the
            announcement, which passes through the learner's own connection.
    """

    effect: messages.Expect | messages.ExpectCopy
    upload: BodyUpload | None
    message: Any = None
    has_arrived: bool | None = None
    task: asyncio.Task[None] | None = None
    report: messages.BodyArrived | None = None

    @property
    def is_over(self) -> bool:
        """Whether payload and announcement are here, or the upload failed."""
        return self.has_arrived is False or (bool(self.has_arrived) and self.message is not None)


_Purpose = tuple[str, int, Asking | int]


def _purpose(effect: messages.Expect | messages.ExpectCopy) -> _Purpose:
    """Return the learner, the fragment and the request that an announcement names."""
    name = effect.ask if isinstance(effect, messages.Expect) else effect.attempt
    return effect.learner, effect.fragment, name


class Uploads:
    """The payloads that a shard, or a relay, expects.

    A payload may arrive at a relay instead. The relay receives the orders about it, and reports it.

    Args:
        tensors: Verifies contributions and installs copies.
        bodies: The server's data plane.
        driver: The driver of the shard's machine.
        worker: Runs tensor work.
        relays: Sends a message to a relay.
        keep: Records each verified payload under its path; called in the worker.
    """

    def __init__(
        self,
        tensors: Contributions,
        bodies: BodyBooks,
        driver: Driver[Any, Any],
        worker: InWorker,
        relays: Callable[[str, messages.Message], None],
        keep: Callable[[str, TensorBody], None] | None = None,
    ) -> None:
        self._tensors = tensors
        self._bodies = bodies
        self._driver = driver
        self._worker = worker
        self._relays = relays
        self._keep = keep
        self._decoded = asyncio.Semaphore(DECODED_MAX)
        self._expected: dict[str, Expected] = {}
        self._paths: dict[_Purpose, str] = {}

    def url(self, path: str) -> str:
        """Return the transport's URL of an expected path; a relay uses the same."""
        return body_url(path)

    @executes(messages.Expect, messages.ExpectCopy, sliced=True)
    def expect(self, effect: messages.Expect | messages.ExpectCopy) -> None:
        """Accept a payload from now on; an older payload for the same purpose is rejected."""
        path, plan = effect.path, self._tensors.plan
        self._refuse(path, "requested again")
        self._paths[_purpose(effect)] = path
        if isinstance(effect, messages.Expect) and effect.relay:
            self._expected[path] = Expected(effect, None)
            self._relays(effect.relay, replace(effect, relay=""))
            return
        if isinstance(effect, messages.Expect):
            sizes = plan.uplink_sizes(effect.fragment, effect.codec)
            nbytes, nbytes_min = sizes[-1], sizes[0]
        else:
            nbytes = nbytes_min = plan.whole_nbytes(effect.fragment)
        upload = self._bodies.expect(path, nbytes, effect.learner, nbytes_min)
        expected = self._expected[path] = Expected(effect, upload)
        upload.when_ended = partial(self._ended, expected)

    @executes(messages.Unexpect, sliced=True)
    def unexpect(self, order: messages.Unexpect) -> None:
        """Reject a payload from now on."""
        self._refuse(order.path, order.why)
        if order.relay:
            self._relays(order.relay, replace(order, relay=""))

    def _refuse(self, path: str, why: str) -> None:
        """Reject the payload of a path from now on."""
        expected = self._expected.get(path)
        if expected is not None:
            self._forget(expected)
            if expected.upload is not None:
                expected.upload.cancel(why)
            if expected.task is not None:
                expected.task.cancel()

    def _forget(self, expected: Expected) -> None:
        effect = expected.effect
        if self._expected.get(effect.path) is expected:
            del self._expected[effect.path]
            if self._paths.get(purpose := _purpose(effect)) == effect.path:
                del self._paths[purpose]

    def announce(self, learner: str, message: messages.Upload | messages.Copy) -> None:
        """Take a learner's announcement of its payload."""
        match message:
            case messages.Upload(fragment, ask):
                path = self._paths.get((learner, fragment, ask))
            case messages.Copy(fragment, attempt):
                path = self._paths.get((learner, fragment, attempt))
        if path is not None and self._expected[path].message is None:
            expected = self._expected[path]
            expected.message = message
            if expected.report is not None:
                self._pass_on(expected, expected.report)
            else:
                self._take_up(expected)

    def _ended(self, expected: Expected, has_arrived: bool) -> None:
        expected.has_arrived = has_arrived
        self._take_up(expected)  # break: arrived-payload-ignored

    def _take_up(self, expected: Expected) -> None:
        """Start to process a payload once it has arrived or its upload has failed.

        Until then no task waits for it, because a round expects thousands of payloads.
        """
        is_wanted = self._expected.get(expected.effect.path) is expected
        if is_wanted and expected.task is None and expected.is_over:
            expected.task = self._driver.spawn(self._take_in(expected))

    def reported(self, relay: str, fact: messages.BodyArrived | messages.BodyCorrupt) -> None:
        """Take a relay's report of a payload; ignore it if the payload is not expected there."""
        expected = self._expected.get(self._paths.get((fact.learner, fact.fragment, fact.ask), ""))
        effect = None if expected is None else expected.effect
        if expected is None or not isinstance(effect, messages.Expect):
            return
        if effect.relay != relay:
            return  # break: relay-speaks-for-others
        if isinstance(fact, messages.BodyCorrupt):
            self._forget(expected)
            self._driver.deliver(fact)
        else:
            expected.report = fact
            if expected.message is not None:
                self._pass_on(expected, fact)

    def _pass_on(self, expected: Expected, report: messages.BodyArrived) -> None:
        """Pass a relay's report to the machine, with the counters of the learner's announcement."""
        effect, announced = expected.effect, expected.message
        assert isinstance(effect, messages.Expect)
        self._forget(expected)
        self._tensors.reported(effect.fragment, effect.ask, report.norm)
        fact = replace(
            report,
            epoch=effect.epoch,
            base=announced.base,
            steps=announced.steps,
            tokens=announced.tokens,
            relay=effect.relay,
        )
        self._driver.deliver(fact)

    async def _take_in(self, expected: Expected) -> None:
        upload = expected.upload
        assert upload is not None
        try:
            if isinstance(expected.effect, messages.Expect):
                await self._contribution(upload, expected.message, expected.effect)
            else:
                await self._copy(upload, expected.message, expected.effect)
        finally:
            self._forget(expected)

    async def _contribution(
        self, upload: BodyUpload, announced: messages.Upload, effect: messages.Expect
    ) -> None:
        learner, fragment, ask = effect.learner, effect.fragment, effect.ask
        norm, alike = 0.0, tuple[str, ...]()

        def verify(body: PoolBody) -> None:
            nonlocal norm, alike
            tensors = self._tensors
            whole = tensors.unpacked(fragment, body.buffer, announced.base, effect.codec)
            norm = tensors.verify(fragment, ask, whole, announced.digest, effect.codec)
            alike = tensors.alike(fragment, ask, learner)
            if self._keep is not None:
                self._keep(effect.path, whole)

        def arrived() -> None:
            self._driver.deliver(
                messages.BodyArrived(
                    learner=learner,
                    epoch=effect.epoch,
                    fragment=fragment,
                    ask=ask,
                    base=announced.base,
                    steps=announced.steps,
                    tokens=announced.tokens,
                    nbytes=upload.nbytes,
                    norm=norm,
                    alike=alike,
                )
            )

        try:
            await self._take(upload, verify, arrived)
        except (TransportError, ProtocolError, MergeError) as error:
            if not self._driver.stopped:
                logger.warning(
                    "fragment %d: the contribution of %s is rejected: %s", fragment, learner, error
                )
                is_finite = not isinstance(error, MergeError)
                self._driver.deliver(
                    messages.BodyCorrupt(learner, fragment, ask, str(error), is_finite)
                )

    async def _copy(
        self, upload: BodyUpload, announced: messages.Copy, effect: messages.ExpectCopy
    ) -> None:
        learner, fragment, attempt = effect.learner, effect.fragment, effect.attempt
        numel = self._tensors.plan.fragments[fragment].numel

        tensors = self._tensors
        assert isinstance(tensors, ShardTensors), "only shards expect copies"

        def receive(body: PoolBody) -> None:
            tensors.receive(fragment, values_of(body.buffer, numel), announced.digest)
            if self._keep is not None:
                self._keep(effect.path, body.buffer)

        def arrived() -> None:
            self._driver.deliver(messages.CopyArrived(learner, fragment, attempt, announced.digest))

        try:
            await self._take(upload, receive, arrived)
        except (TransportError, ProtocolError, MergeError) as error:
            if not self._driver.stopped:
                self._driver.deliver(messages.CopyCorrupt(learner, fragment, attempt, str(error)))

    async def _take(
        self, upload: BodyUpload, use: Callable[[PoolBody], None], then: Callable[[], None]
    ) -> None:
        """Use a payload in the worker, notify the machine, and release the buffer.

        The orders that ``then`` causes have passed through the worker before the next payload is
        decoded.
        """
        body = await upload.body
        try:
            async with self._decoded:  # break: decoded-without-limit
                await self._worker.run(lambda: use(body))
                then()
                # The worker is a queue: this returns when the orders that `then` caused are done.
                await self._worker.run(lambda: None)
        finally:
            body.release()


class Downloads:
    """Published copies that learners can fetch.

    For each fragment, these are the newest whole copy, which is the shard's own published copy, and
    the newest differences. So a learner that is a few versions behind need not fetch four bytes per
    element. A request for an older payload is answered as gone; the learner then fetches the newest
    whole copy.

    Args:
        bodies: The server's data plane.
        differences: The number of differences kept per fragment, at least 1.
    """

    def __init__(self, bodies: BodyBooks, differences: int) -> None:
        self._bodies, self._kept = bodies, differences
        self._wholes: dict[int, str] = {}
        self._differences: dict[int, list[str]] = {}
        self._urls: dict[str, str] = {}
        self._sizes: dict[str, int] = {}

    def offer(self, fragment: int, version: Version, published: PublishedCopy) -> None:
        """Offer a version as a whole copy and, unless it is empty, as a difference."""
        whole, difference = f"/whole/{fragment}/{version}", f"/difference/{fragment}/{version}"
        older = self._wholes.pop(fragment, whole)
        if older != whole:
            self._withdraw(older)  # break: older-whole-copy-offered
        self._wholes[fragment] = whole
        # break: whole-copy-zeroed
        self._urls[whole] = self._bodies.offer(whole, _view(published.whole), published.digest)
        if published.difference.numel():
            kept = self._differences.setdefault(fragment, [])
            kept.append(difference)
            self._urls[difference] = self._bodies.offer(
                difference, _view(published.difference), published.difference_digest
            )
            self._sizes[difference] = published.difference.numel()
            while len(kept) > self._kept:
                self._withdraw(kept.pop(0))
        if published.average is not None and published.average.numel():
            # Under one path for all versions, because no message announces it. The version as its
            # digest lets a client notice a replacement between two ranges.
            self._bodies.offer(average_path(fragment), _view(published.average), str(version))

    def _withdraw(self, path: str) -> None:
        self._bodies.withdraw(path)
        del self._urls[path]
        self._sizes.pop(path, None)

    def url(self, path: str) -> str:
        """Return the transport's URL of an offered path; empty for an empty path."""
        return self._urls[path] if path else ""

    def difference_nbytes(self, path: str) -> int:
        """Return the size of an offered difference; 0 for an empty path."""
        return self._sizes[path] if path else 0


def _view(tensor: torch.Tensor) -> memoryview:
    return as_bytes(tensor).numpy().data
