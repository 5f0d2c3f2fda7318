"""A multi-rank learner: one training job on several devices, which is one participant of the run.

- `rank_party`: the entry point for `Learner`. Rank 0 leads, the other ranks follow.
- `rank_process`: what all ranks do alike. They exchange documents at a boundary and execute the
  same plan.
- `group`, `rank_context`: how ranks communicate with each other and with the syncer.
- `rank_model`, `redistribute`, `tensors`: which parameters each rank holds, and how they move.
- `rank_store`, `rank_checkpoints`: turn the orders of rank 0's machine into plans.
- `sync_ranks`: move fragments to the syncer and back.

Threads of a rank: its training thread, and one strand for background collectives (`tensors`). A
sync rank other than rank 0 also has an event loop with one worker (`sync_ranks`).
"""
