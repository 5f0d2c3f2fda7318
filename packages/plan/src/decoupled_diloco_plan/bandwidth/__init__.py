"""Prediction of utilization, traffic, memory and cost of a run from its links and settings."""
