"""One process of a run, which exchanges fragments with the syncer while its loop trains.

The public entry point is `decoupled_diloco.participants`; its docstring lists what lives where. Two
threads meet here: the program's *training thread* (`party`, `boundary`, `ending`, `learner_model`,
`parameter_store`) and the *background* (`background`, `connections`, `payloads`, `transfers`),
which has an event loop and one worker. They share one `LearnerMachine` and its tensors (`shared`,
`exchange`) under one lock. The lock is held only for a decision and for the copies of a step
boundary.

This package has no code for other ranks: `ranks` builds on it. Time, randomness, threads and files
come from the runtime, so everything except `process` and `launched` also runs on virtual machines.
"""
