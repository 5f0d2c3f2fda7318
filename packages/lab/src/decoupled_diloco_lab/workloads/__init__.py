"""Workloads of the lab: a mixture of experts and a vision transformer."""
