"""What a run needs and comes to before it is made: its links and settings, the goodput of a cluster."""
