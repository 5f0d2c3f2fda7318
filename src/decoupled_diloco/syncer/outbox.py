"""What a shard's peers hear of, or may do: in the order in which the machine has ordered it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import assert_never

from decoupled_diloco.protocol import effects as do
from decoupled_diloco.protocol import messages as say
from decoupled_diloco.protocol.wire import numbered
from decoupled_diloco.syncer.bodies import Downloads, Uploads
from decoupled_diloco.syncer.seals import Seals
from decoupled_diloco.syncer.sessions import Sessions
from decoupled_diloco.syncer.slices import Slices

InOrder = (
    do.Accept
    | do.Reject
    | do.Send
    | do.Broadcast
    | do.Evict
    | do.Expect
    | do.ExpectCopy
    | do.Unexpect
    | do.Stop
)
"""What goes this way."""


class Outbox:
    """Carries out in slices, for the event loop must answer heartbeats meanwhile.

    Args:
        sessions: The learners' connections.
        downloads: Where copies are that may be fetched.
        uploads: Bodies that are expected; there are none before the layout is set.
        seals: The shard's seals; there are none before it is admitted.
        checkpoint: Number of the run's newest checkpoint, which every message bears.
        stop: Ends the shard, once its peers have heard the rest.
        fail: Told of an error; nothing more is done then.
    """

    def __init__(
        self,
        sessions: Sessions,
        downloads: Downloads,
        *,
        uploads: Callable[[], Uploads],
        seals: Callable[[], Seals],
        checkpoint: Callable[[], int],
        stop: Callable[[], object],
        fail: Callable[[BaseException], None],
    ) -> None:
        self._sessions = sessions
        self._downloads = downloads
        self._uploads = uploads
        self._seals = seals
        self._checkpoint = checkpoint
        self._stop = stop
        self._slices = Slices(self._do, fail)

    def put(self, effect: InOrder) -> None:
        """Appends an effect; `go_on` carries it out, as of the checkpoint of now."""
        match effect:
            case (
                do.Send(message=say.Published() as news)
                | do.Broadcast(message=say.Published() as news)
            ):
                # Where the copy is now: it may be withdrawn before everybody has heard of it.
                effect = dataclasses.replace(effect, message=self._offered(news))
        self._slices.put((effect, self._checkpoint()))

    def go_on(self) -> None:
        """Carries out what this turn of the event loop has room for."""
        self._slices.go_on()

    def _do(self, ordered: tuple[InOrder, int]) -> Iterator[object] | None:
        effect, checkpoint = ordered
        match effect:
            case do.Accept(connection, learner, epoch):
                self._sessions.accept(connection, learner, epoch)
            case do.Reject(connection, reason, final):
                self._sessions.reject(
                    connection, numbered(say.Refusal(reason, final), checkpoint), reason
                )
            case do.Send(learner, message):
                self._sessions.send(learner, numbered(self._located(message), checkpoint))
            case do.Broadcast(message):
                return self._sessions.broadcast(numbered(message, checkpoint))
            case do.Evict(learner, reason):
                self._sessions.evict(learner, reason)
            case do.Stop():
                self._stop()
            case do.Expect() | do.ExpectCopy():
                self._uploads().expect(effect)
            case do.Unexpect(path, why):
                self._uploads().unexpect(path, why)
            case _:
                assert_never(effect)
        return None

    def _located(self, message: say.Message) -> say.Message:
        """The message with the path of an expected body replaced by its URL."""
        if not isinstance(message, say.Pull | say.CopyWanted):
            return message
        return dataclasses.replace(message, path=self._uploads().url(message.path))

    def _offered(self, message: say.Published) -> say.Published:
        """The message with the shard's seal, and the paths of copies replaced by their URLs."""
        return dataclasses.replace(
            self._seals().sealed(message),
            difference=self._downloads.url(message.difference),
            whole=self._downloads.url(message.whole),
            difference_nbytes=self._downloads.difference_nbytes(message.difference),
        )
