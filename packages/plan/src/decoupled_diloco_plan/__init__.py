"""Capacity planning: the links and settings that a run needs, and the goodput of a cluster."""
