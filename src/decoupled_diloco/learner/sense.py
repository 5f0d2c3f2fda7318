"""What peers say must make sense before the state machine hears of it.

A message that names what does not exist is the peer's mistake: it costs that peer its connection,
never the training loop.
"""

from __future__ import annotations

from decoupled_diloco.errors import ProtocolError
from decoupled_diloco.protocol import messages as say
from decoupled_diloco.protocol.data_leases.messages import LeasesGiven
from decoupled_diloco.protocol.options import Options
from decoupled_diloco.protocol.transfer.messages import StateWanted


def require_sense(message: say.ToLearner, shard: int, options: Options) -> None:
    """Refuses what a shard says of a fragment that is not its own.

    Raises:
        ProtocolError: names the fragment.
    """
    named = [getattr(message, "fragment", None), *getattr(message, "coming", ())]
    for fragment in (each for each in named if each is not None):
        if fragment >= options.fragments or options.owner(fragment) != shard:
            kind = type(message).__name__
            text = f"{kind} is about fragment {fragment}, which is not shard {shard}'s"
            raise ProtocolError(text)


def require_sense_of_coordinator(
    message: say.ToMember, options: Options, parts: int | None
) -> None:
    """Refuses what the coordinator says of fragments or parts of the data that do not exist.

    Raises:
        ProtocolError: names the first of them.
    """
    match message:
        case StateWanted(seen=seen):
            wrong = [held.fragment for held in seen if held.fragment >= options.fragments]
            if wrong:
                raise ProtocolError(f"StateWanted names fragment {wrong[0]}, which does not exist")
        case LeasesGiven(leases=leases):
            wrong = [lease.part for lease in leases if parts is None or lease.part >= parts]
            if wrong:
                raise ProtocolError(f"LeasesGiven names part {wrong[0]}, which does not exist")
