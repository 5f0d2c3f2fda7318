"""Workloads of the lab: a mixture of experts, vision and speech."""
