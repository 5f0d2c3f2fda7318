"""Virtual worlds: the real state machines in deterministic virtual time, faults and checkers.

- `World` is the shell of every machine; `LearnerSpec` says what a learner is like.
- `Bodies` is the tensor side; `NoBodies` carries lineage instead of tensors.
- `Faults` is what befalls the world, `Checker` what must hold all the same.
- `scenario` reads what a run is to live through, `script` carries it out, `simulation` makes a
  whole run of it, with tapes; `protocol_run` does without tensors.
- `python -m decoupled_diloco.simulate.fuzz` draws worlds at random.
"""

from decoupled_diloco.simulate.bodies import Bodies, Body, LearnerBodies, NoBodies, ShardBodies
from decoupled_diloco.simulate.choices import Choices
from decoupled_diloco.simulate.learner_process import LearnerSpec
from decoupled_diloco.simulate.world import Mishaps, World

__all__ = [
    "Bodies",
    "Body",
    "Choices",
    "LearnerBodies",
    "LearnerSpec",
    "Mishaps",
    "NoBodies",
    "ShardBodies",
    "World",
]
