"""The real shells, broken on purpose; see `breaks`."""

from __future__ import annotations

from decoupled_diloco.learner.background import Background
from decoupled_diloco.learner.body_exchange import BodyExchange
from decoupled_diloco.learner.checkpointer import Checkpointer
from decoupled_diloco.learner.exchange import LearnerTensors
from decoupled_diloco.learner.joining import CoordinatorSession as Joining
from decoupled_diloco.learner.shard_links import ShardLinks
from decoupled_diloco.learner.taking_part import TakingPart
from decoupled_diloco.ranks.carrier import Carrier
from decoupled_diloco.ranks.carriers import CarriedExchange
from decoupled_diloco.ranks.tensors import RankTensors
from decoupled_diloco.simulate.shrink import Changes
from decoupled_diloco.syncer.bodies import Downloads, Uploads
from decoupled_diloco.syncer.coordinator import CoordinatorHost
from decoupled_diloco.syncer.coordinator_disk import CoordinatorDisk
from decoupled_diloco.syncer.merging import Merging
from decoupled_diloco.syncer.sessions import Sessions
from decoupled_diloco.syncer.shard import Shard
from decoupled_diloco.syncer.slices import Slices
from simulation.breaks import Break

LEARNERS = (
    Break(
        "a learner does not notice that its connection is gone",
        ShardLinks,
        "_converse",
        "duties.told(fact.Lost(shard_peer(shard)))",
        "pass",
        noticed_by=22,
    ),
    Break(
        "a copy that could not be fetched is told to nobody",
        BodyExchange,
        "fetch",
        "self._told(fact.FetchFailed(fragment, effect.version, str(error)))",
        "pass",
        noticed_by=11,
    ),
    Break(
        "a learner is not woken at its deadlines",
        Background,
        "_arm",
        "if deadline is not None:",
        "if False:",
        noticed_by=17,
    ),
    Break(
        "who has lost the coordinator does not join again",
        Joining,
        "stay",
        "member = await self._join_again(client)",
        "member = None",
        noticed_by=7,
    ),
    Break(
        "what the model has is not brought back from its checkpoint",
        Checkpointer,
        "restore",
        "self._model.load_state_dict(dict(checkpoint.model), strict=whole)",
        "pass",
        noticed_by=31,
    ),
    Break(
        "who has seen the end does not wait for its last copies",
        TakingPart,
        "_finish",
        "while not self.over and background.failure is None:",
        "while False:",
    ),
    Break(
        "an applied copy is not what the next difference is added to",
        LearnerTensors,
        "apply",
        "self.published[fragment], self.staged[fragment] = new, None",
        "self.staged[fragment] = None",
    ),
)

SHARDS = (
    Break(
        "a shard is not woken at its deadlines",
        Shard,
        "_arm",
        "if deadline is not None and not self._stopping.is_set():",
        "if False:",
        noticed_by=122,
    ),
    Break(
        "a shard does not tell who was heard",
        Shard,
        "_hear",
        "if heard:",
        "if False:",
        noticed_by=7,
    ),
    Break(
        "a merge that has failed is told to nobody",
        Merging,
        "_merge",
        "self._handle(fact.MergeFailed(number, fragment, str(error)))",
        "pass",
        noticed_by=114,
    ),
    Break(
        "everybody hears of a version before the disk has it",
        Merging,
        "_merge",
        "copy = disk.merge(fragment, effect.version, memory)",
        "copy = tensors.merge(fragment)",
        noticed_by=2,
    ),
    Break(
        "an older connection of the same id speaks on",
        Sessions,
        "_is_current",
        "session is not None and session.connection == connection",
        "session is not None",
        noticed_by=7,
    ),
    Break(
        "orders overtake one another",
        Slices,
        "put",
        "self._waiting.append(thing)",
        "self._waiting.appendleft(thing)",
        noticed_by=1,
    ),
    Break(
        "a body is taken in once it is announced, and never once it is here",
        Uploads,
        "_ended",
        "self._take_up(expected)",
        "pass",
    ),
    Break(
        "the whole copy of a version before is offered on under the new one's name",
        Downloads,
        "offer",
        "_view(published.whole), published.digest)",
        "_view(published.whole * 0), published.digest)",
    ),
)

COORDINATOR = (
    Break(
        "whoever asks for an id is thought to be a second process of it",
        CoordinatorHost,
        "_has_a_live_process",
        "return False",
        "return True",
    ),
    Break(
        "orders are carried out before what they rest on is on the disk",
        CoordinatorHost,
        "_carry_out",
        "while self._orders and not self._writing:",
        "while self._orders:",
        noticed_by=77,
    ),
    Break(
        "the coordinator forgets who has joined",
        CoordinatorDisk,
        "append",
        '"".join(f"{line}\\n" for line in lines)',
        '""',
    ),
)

TWO_RANKS = {"ranks": 2, "carriers": 2, "staged": False}

RANKS = (
    Break(
        "a carrier without a part of a fragment keeps what never comes to it",
        Carrier,
        "_keep",
        "if start == stop:",
        "if False:",
        Changes(learners=TWO_RANKS),
        noticed_by=13,
    ),
    Break(
        "a rank writes what it does not have yet",
        RankTensors,
        "carry_out",
        "await runtime().outcome(self._receiving.pop(new))",
        "self._receiving.pop(new)",
        Changes(learners=TWO_RANKS),
        noticed_by=2,
    ),
    Break(
        "a copy is taken of which a carrier's part is wrong",
        CarriedExchange,
        "_fetched",
        "if actual != effect.digest:",
        "if False:",
        Changes(learners=TWO_RANKS, mishaps={"corruption": 0.2}),
        noticed_by=5,
    ),
    Break(
        "the carriers keep nothing of the published copies",
        Carrier,
        "_keep",
        "await self._in_worker(lambda: keep_ranges(folder, self._number, published))",
        "pass",
        Changes(learners=TWO_RANKS),
        noticed_by=5,
    ),
    Break(
        "a checkpoint is deleted from which a learner is about to go on",
        Checkpointer,
        "forget_checkpoints",
        "{*keep, self._reading}",
        "set(keep)",
        Changes(learners=TWO_RANKS),
        noticed_by=37,
    ),
)

SHELLS = (*LEARNERS, *SHARDS, *COORDINATOR, *RANKS)
