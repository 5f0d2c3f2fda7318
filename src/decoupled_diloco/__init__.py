"""Decoupled DiLoCo for PyTorch: learners that never wait, and a syncer that merges what it can get."""

__version__ = "0.1.0"
