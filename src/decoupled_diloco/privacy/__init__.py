"""Differential privacy at the level of learners (rule 25): arithmetic without a run.

`dp` clips contributions and draws the noise of a merge. `accountant` computes what the merges in
which a learner takes part reveal about it. The state machines only count these merges.
"""
