"""Runs on virtual machines: the product's own processes in deterministic virtual time, with faults.

- `System` is a whole run: `launch`'s roles and supervisor on the virtual runtime, transport and
  disk; `LearnerSpec` says what a learner is like.
- `Crowd` is the state machines alone, for thousands of learners.
- `scenario` reads what a run is to live through, `script` carries it out, `simulation` makes a
  whole run of it, with everything that a real one leaves; `protocol_run` does without tensors.
- `python -m decoupled_diloco.simulate.worlds` draws worlds at random, and looks whether everything
  holds that must.
"""

from decoupled_diloco.simulate.choices import Choices
from decoupled_diloco.simulate.spec import LearnerSpec

__all__ = ["Choices", "LearnerSpec"]
