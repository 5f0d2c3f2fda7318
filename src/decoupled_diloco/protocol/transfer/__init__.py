"""State transfer (rule 16): a learner begins with a healthy learner's optimizer state."""
