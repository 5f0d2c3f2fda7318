"""Learners in common training frameworks: one thin module and one extra for each.

The entry points are the frameworks' modules: `transformers` (Hugging Face Trainer), `lightning` and
`torchtitan`. Each one uses the framework's hooks, runs on its training thread, and calls `Learner`
as a user's loop would. `callback_base` has the common code. These modules use only public names of
`learner`. They import their framework, which the core never does.
"""
