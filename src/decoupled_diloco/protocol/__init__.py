"""The protocol: pure state machines that make all decisions.

The package contains one machine per role (`learner_machine`, `syncer_machine`,
`coordinator_machine`, `lease_machine`) and the rules that they follow (`copies`, `rounds`,
`members`, `first_copies`, `leaving`, …). Three features that are not part of the method are in
`features`. All names, messages, events and effects are in `messages`.

The entry point is ``machine.handle(now, event) -> effects``. ``machine.deadline()`` returns the
instant at which a ``Tick`` is due. A machine has no lock: its shell makes one call at a time, from
any thread. A machine changes only its own state and uses no I/O, clock, random number or tensor.
Real processes, the virtual world and the checkers all drive these same classes.
"""

from decoupled_diloco.protocol.coordinator_machine import CoordinatorMachine
from decoupled_diloco.protocol.coordinator_state import CoordinatorState
from decoupled_diloco.protocol.learner_machine import LearnerMachine
from decoupled_diloco.protocol.learner_state import LearnerState
from decoupled_diloco.protocol.machine_options import Options
from decoupled_diloco.protocol.messages import Version
from decoupled_diloco.protocol.syncer_machine import SyncerMachine
from decoupled_diloco.protocol.syncer_state import SyncerState

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
