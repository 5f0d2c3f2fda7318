"""The protocol: pure state machines that decide, and the words they are told in and answer with.

Nothing here does I/O, reads a clock, draws a random number or touches a tensor. Real processes, the
virtual world and the checkers all drive these same classes.
"""

from decoupled_diloco.protocol.coordinator import CoordinatorMachine
from decoupled_diloco.protocol.coordinator_state import CoordinatorState
from decoupled_diloco.protocol.learner import LearnerMachine
from decoupled_diloco.protocol.learner_state import LearnerState
from decoupled_diloco.protocol.options import Options
from decoupled_diloco.protocol.syncer import SyncerMachine
from decoupled_diloco.protocol.syncer_state import SyncerState
from decoupled_diloco.protocol.versions import Version

__all__ = [
    "CoordinatorMachine",
    "CoordinatorState",
    "LearnerMachine",
    "LearnerState",
    "Options",
    "SyncerMachine",
    "SyncerState",
    "Version",
]
