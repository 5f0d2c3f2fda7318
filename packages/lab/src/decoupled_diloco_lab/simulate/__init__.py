"""Simulate runs with faults: the real processes on virtual machines, in deterministic virtual time.

- `System` is a whole run: the roles and the supervisor of `launch` on a virtual runtime, transport
  and disk. `LearnerSpec` describes a learner.
- `Crowd` runs only the state machines, for thousands of learners.
- `scenario` reads a scenario and `script` carries it out. `simulation` turns it into a whole run
  with the same output files as a real one. `protocol_run` simulates it without real tensors.
"""

from decoupled_diloco_lab.simulate.choices import Choices
from decoupled_diloco_lab.simulate.spec import LearnerSpec

__all__ = ["Choices", "LearnerSpec"]
