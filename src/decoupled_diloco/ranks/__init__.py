"""A learner of many ranks: one training job on several devices, one participant of the run."""
