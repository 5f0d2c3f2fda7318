"""Watching a run: the event tape, and everything that only reads it (progress, summary, report)."""
