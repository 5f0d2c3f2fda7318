"""What learners and the coordinator say to each other about the transfer of a state."""

from __future__ import annotations

from dataclasses import dataclass

from decoupled_diloco.protocol.versions import Holding


@dataclass(frozen=True, slots=True)
class Trains:
    """Learner → coordinator: I have begun to train; ``gives``: and give my state to others."""

    gives: bool


@dataclass(frozen=True, slots=True)
class TransferWanted:
    """Learner → coordinator: I begin with nothing; who has seen these versions, and is healthy?

    ``attempt`` numbers the asking; ``refused``: whom I have asked in vain.
    """

    attempt: int
    seen: tuple[Holding, ...]
    refused: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class StateWanted:
    """Coordinator → learner: this one needs your state, once you have seen these versions."""

    learner: str
    attempt: int
    seen: tuple[Holding, ...]


@dataclass(frozen=True, slots=True)
class StateOffered:
    """Donor → coordinator: a copy of my state is ready for this learner.

    It is a head of ``head_nbytes``, whose ``digest`` is given and which has those of all chunks,
    and ``nbytes`` in chunks. ``address``: where I serve it myself, to who shows the ``key``, which
    is this process's and opens nothing else; empty: a shard must relay it.
    """

    learner: str
    attempt: int
    head_nbytes: int
    nbytes: int
    digest: str
    address: str
    key: str = ""


@dataclass(frozen=True, slots=True)
class StateDeclined:
    """Donor → coordinator: this learner cannot have my state, and why."""

    learner: str
    attempt: int
    reason: str


@dataclass(frozen=True, slots=True)
class StateUnwanted:
    """Coordinator → donor: forget the copy."""

    learner: str
    attempt: int


@dataclass(frozen=True, slots=True)
class TransferReady:
    """Coordinator → learner: this one's state is yours; the rest as in `StateOffered`."""

    donor: str
    attempt: int
    head_nbytes: int
    nbytes: int
    digest: str
    address: str
    key: str = ""


@dataclass(frozen=True, slots=True)
class TransferLost:
    """Coordinator → learner: your donor is gone, or declines: ask again without it."""

    donor: str
    attempt: int
    reason: str


@dataclass(frozen=True, slots=True)
class NoTransfer:
    """Coordinator → learner: nobody can give you its state, and why."""

    reason: str
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class RelayWanted:
    """Learner → coordinator: I cannot reach my donor; let a shard relay."""

    attempt: int


@dataclass(frozen=True, slots=True)
class RelayOpened:
    """Coordinator → donor and learner: the head is chunk 0 of this path, at the coordinator."""

    learner: str
    attempt: int
    path: str


@dataclass(frozen=True, slots=True)
class ChunkTaken:
    """Learner → coordinator: I have this chunk from the relay, and all before it."""

    attempt: int
    chunk: int


FromMember = Trains | TransferWanted | StateOffered | StateDeclined | RelayWanted | ChunkTaken
ToMember = NoTransfer | TransferReady | TransferLost | StateWanted | StateUnwanted | RelayOpened
