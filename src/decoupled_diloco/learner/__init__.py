"""One process that takes part in a run: what exchanges fragments with the syncer beside its loop.

A program enters by `decoupled_diloco.participants`, whose docstring says what lives where. Two
threads meet here: the program's *training thread* (`party`, `boundary`, `ending`, `model`, `store`)
and the *background* (`background`, `connections`, `payloads`, `transfers`), which has an event loop
and one worker. They share one `LearnerMachine` and its tensors (`shared`, `exchange`) under one
lock, which nothing holds for longer than a decision and the boundary's own copies take.

Nothing here knows of other ranks: `ranks` builds on this package. All time, randomness, threads and
files come from the runtime, so all of it but `process` and `launched` runs on virtual machines.
"""
