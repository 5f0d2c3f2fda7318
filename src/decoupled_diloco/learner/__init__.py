"""The learner: one's own training loop, and what exchanges fragments with the syncer beside it."""
