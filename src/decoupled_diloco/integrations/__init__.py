"""Learners in the training frameworks that people use: each a thin module, and an extra.

Enter at the framework's module: `transformers` (Hugging Face Trainer), `lightning`, `torchtitan`.
Each is the framework's own kind of hook, runs on its training thread, and calls `Learner` as a
user's loop would: `callback_base` has what all of them do. They may use only what is public in
`learner`, and import their framework, which the core never does.
"""
