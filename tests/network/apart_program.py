"""One rank of a learner, on a separate machine."""

from __future__ import annotations

from collections.abc import Mapping

from network.network_spaces import ENDS, FAR_ADDRESS, enter, name_machine
from ranks import rank_program
from ranks.rank_program import Job


def main(job: Job, surroundings: Mapping[str, str]) -> None:
    """Train with collectives that survive a cut."""
    rank_program.COLLECTIVE_SECONDS = 300
    hasty(job, surroundings)


def hasty(job: Job, surroundings: Mapping[str, str]) -> None:
    """Train with collectives that do not survive a cut. Rank 1 is at the near end of the link."""
    near, far = ENDS
    name_machine((near if surroundings.get("RANK") == "1" else far)[0])
    nameless(job, surroundings)


def nameless(job: Job, surroundings: Mapping[str, str]) -> None:
    """Train on two machines with the same name."""
    near, far = ENDS
    space, device = near if surroundings.get("RANK") == "1" else far
    enter(space)
    own = {"MASTER_ADDR": FAR_ADDRESS, "GLOO_SOCKET_IFNAME": device}
    rank_program.main(job, {**surroundings, **own})
