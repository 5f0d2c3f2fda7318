"""A run before it is made: which links and settings, and the goodput of a whole cluster."""
