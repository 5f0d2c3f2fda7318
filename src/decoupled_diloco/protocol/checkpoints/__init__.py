"""Checkpoints of the whole run: consistent, and taken without a pause."""
