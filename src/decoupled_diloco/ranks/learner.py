"""A learner of many ranks: rank 0 takes part in the run, the others follow it.

*Leader.* Rank 0 has the connections and the one `LearnerMachine`. It is one step ahead: at boundary
b it tells the machine of the step that ends at b + 1, and what the machine orders there is the plan
of b + 1, which travels to all ranks while that step is trained. So no step waits for the plan, and
every rank does the same at the same boundary.

*Followers* carry the plans out, and say how many tokens they trained.

Source: rule 18 of the method's description (`docs/how-to/many-gpus.md`).
"""

from __future__ import annotations

import torch

from decoupled_diloco.learner.learner import Learner

__all__ = ["Learner", "kind_of_rank"]


def kind_of_rank() -> type[Learner]:
    """Returns the class for this rank of the program's process group."""
    # Here, because they import much of torch.distributed, which a learner of one rank does not use.
    from decoupled_diloco.ranks.follower import FollowerRank
    from decoupled_diloco.ranks.leader import LeaderRank

    return LeaderRank if torch.distributed.get_rank() == 0 else FollowerRank


Learner.kind_of_rank = kind_of_rank
