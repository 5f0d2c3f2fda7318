"""A learner of several ranks: one training job on several devices, one participant of the run.

`party` is where `Learner` enters: rank 0 leads, the others follow. `seat` is a rank's place among
the others: the exchange of documents at a boundary, and the plan that each carries out. `group` and
`surroundings` are how ranks meet; `model`, `redistribute` and `tensors` are what each rank holds of
the parameters; `store` and `checkpoints` turn what rank 0's machine orders into plans; `sync_ranks`
carry fragments to the syncer and back.

Threads of a rank: its training thread, one strand for collectives behind the boundary (`tensors`),
and on a sync rank an event loop with one worker (`sync_ranks`).
"""
