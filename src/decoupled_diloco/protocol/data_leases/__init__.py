"""Leases of the data: every batch is trained once, as far as that can be known."""
