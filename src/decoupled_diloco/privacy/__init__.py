"""Privacy of contributions (rules 24 and 25): arithmetic without a run.

`secure_sum` and `keys` compute the masks of secure sums and open the sums. `dp` clips contributions
and draws the noise of a merge. `accountant` computes what the merges in which a learner takes part
reveal about it. The state machines only pass messages on and count merges.
"""
