"""Simulation of whole clusters: what failures cost a run of up to millions of chips.

`chip_learner` simulates one learner: chips fail, slices leave and return, and the learner pauses to
change its size. `systems` combines the learners of one system. Every allocated chip-microsecond is
accounted for exactly, as useful or under one cause.
"""
