"""The sums that relays send to a shard, or to another relay (rule 22)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from decoupled_diloco.errors import MergeError, ProtocolError, TransportError
from decoupled_diloco.merge.sum_payload import sum_nbytes
from decoupled_diloco.protocol import messages
from decoupled_diloco.shell.driver import Driver, executes
from decoupled_diloco.syncer.contributions import Contributions
from decoupled_diloco.syncer.data_plane import InWorker
from decoupled_diloco.transport.payload_store import BodyBooks, BodyUpload

logger = logging.getLogger(__name__)


def sum_path(relay: str, connection: str, fragment: int, number: int) -> str:
    """Return the path of a relay's sum."""
    return f"/sum/{fragment}/{relay}/{connection}/{number}"


@dataclass(slots=True)
class ExpectedSum:
    """A sum that a relay may send; ``message`` is its announcement, once received."""

    relay: str
    connection: str
    fragment: int
    number: int
    upload: BodyUpload
    message: messages.Sum | None = None
    has_arrived: bool = False

    @property
    def name(self) -> tuple[str, int, int]:
        """What no other expected sum has; a new connection counts from 1 again."""
        return self.connection, self.fragment, self.number


class Sums:
    """Expects the next sum of each fragment from each connected relay.

    A relay sends the sums of a fragment one after the other, so the next one is expected as soon as
    the upload of the one before has ended.

    Args:
        tensors: Verifies and folds sums.
        bodies: The server's data plane.
        driver: The driver of the machine.
        worker: Runs tensor work.
        relays: Sends a message to a relay.
        checks: Compare each sum with the ordered contributions. Only a shard knows all of them.
    """

    def __init__(
        self,
        tensors: Contributions,
        bodies: BodyBooks,
        driver: Driver[Any, Any],
        worker: InWorker,
        relays: Callable[[str, messages.Message], None],
        *,
        checks: bool,
    ) -> None:
        self._checks = checks
        self._tensors = tensors
        self._bodies = bodies
        self._driver = driver
        self._worker = worker
        self._relays = relays
        self._expected: dict[tuple[str, int, int], ExpectedSum] = {}
        self._connections: dict[str, str] = {}

    def begin(self, relay: str, connection: str, fragments: Iterable[int]) -> None:
        """Expect sums of these fragments from a relay that has connected."""
        if connection in self._connections:
            return
        self._connections[connection] = relay
        for fragment in fragments:
            self._expect(relay, connection, fragment, 1)

    def end(self, connection: str) -> None:
        """Refuse the sums of a connection that is lost."""
        self._connections.pop(connection, None)
        gone = [each for each in self._expected.values() if each.connection == connection]
        for expected in gone:
            self._forget(expected)
            expected.upload.cancel("its relay has lost its connection")

    def _expect(self, relay: str, connection: str, fragment: int, number: int) -> None:
        path = sum_path(relay, connection, fragment, number)
        upload = self._bodies.expect(path, sum_nbytes(self._tensors.plan, fragment), relay)
        expected = ExpectedSum(relay, connection, fragment, number, upload)
        self._expected[expected.name] = expected
        upload.when_ended = partial(self._ended, expected)

    def _forget(self, expected: ExpectedSum) -> bool:
        """Forget a sum; return whether it was still expected."""
        is_current = self._expected.get(expected.name) is expected
        if is_current:
            del self._expected[expected.name]
        return is_current

    def announce(self, connection: str, message: messages.Sum) -> None:
        """Take a relay's announcement of a sum."""
        expected = self._expected.get((connection, message.fragment, message.number))
        if expected is None or expected.message is not None:
            logger.warning("a relay announced sum %d, which is not expected", message.number)
            return
        expected.message = message
        self._take_up(expected)

    def failed(self, connection: str, message: messages.SumCorrupt) -> None:
        """Take a relay's report that it could not send a sum."""
        expected = self._expected.get((connection, message.fragment, message.number))
        if expected is not None:
            expected.upload.cancel(message.reason)
            self._ended(expected, False)
        if connection in self._connections:
            self._driver.deliver(replace(message, relay=self._connections[connection]))

    def _ended(self, expected: ExpectedSum, has_arrived: bool) -> None:
        if self._expected.get(expected.name) is not expected:
            return
        number = expected.number + 1
        self._expect(expected.relay, expected.connection, expected.fragment, number)
        expected.has_arrived = has_arrived
        if not has_arrived:
            self._forget(expected)
        self._take_up(expected)

    def _take_up(self, expected: ExpectedSum) -> None:
        message = expected.message
        if message is not None and expected.has_arrived and self._forget(expected):
            self._driver.spawn(self._take_in(expected, message))

    async def _take_in(self, expected: ExpectedSum, announced: messages.Sum) -> None:
        relay, fragment, number = expected.relay, expected.fragment, expected.number
        try:
            body = await expected.upload.body
            try:
                verify = partial(self._verify, expected, announced)
                await self._worker.run(lambda: verify(body.buffer))
                if expected.connection not in self._connections:
                    return  # its requests are void, and its number may name another sum
                fact = messages.SumArrived(
                    relay, fragment, number, announced.asks, expected.upload.nbytes
                )
                self._driver.deliver(fact)
                await self._worker.run(lambda: None)
            finally:
                body.release()
        except (TransportError, ProtocolError, MergeError) as error:
            if not self._driver.stopped:
                logger.warning("fragment %d: the sum of %s is rejected: %s", fragment, relay, error)
                self._driver.deliver(
                    messages.SumCorrupt(relay, fragment, number, announced.asks, str(error))
                )

    def _verify(self, expected: ExpectedSum, announced: messages.Sum, body: memoryview) -> None:
        name = (expected.relay, expected.number)
        self._tensors.verify_sum(expected.fragment, name, body, announced.digest)
        if self._checks:  # break: sum-unchecked
            self._tensors.check_sum(expected.fragment, name, announced.asks)

    @executes(messages.FoldSum)
    def _fold(self, order: messages.FoldSum) -> Coroutine[Any, Any, None] | None:
        if order.at:
            self._relays(order.at, replace(order, at="", party=""))
            return None
        name = (order.relay, order.number)
        return self._worker.run(partial(self._tensors.fold_sum, order.fragment, name, order.party))

    @executes(messages.DropSum)
    def _drop(self, order: messages.DropSum) -> Coroutine[Any, Any, None] | None:
        if order.at:
            self._relays(order.at, replace(order, at=""))
            return None
        name = (order.relay, order.number)
        return self._worker.run(partial(self._tensors.drop_sum, order.fragment, name))
