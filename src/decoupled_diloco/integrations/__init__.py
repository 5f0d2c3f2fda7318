"""Learners in the training frameworks that people use: each a thin module, and an extra."""
