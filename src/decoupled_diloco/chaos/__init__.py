"""Faults on real processes and links, as a scenario tells them; and the verdict on the tapes."""
