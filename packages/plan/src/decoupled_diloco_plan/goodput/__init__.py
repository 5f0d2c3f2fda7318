"""What failures cost a run of up to millions of chips: a simulation of whole clusters.

A *life* is what happens to one learner: chips fail, slices leave and come back, and the learner
stands while it changes its size. A *system* says what the lives of several learners are together.
Every chip-microsecond that is allocated is accounted for exactly, as useful or under one cause.
"""
