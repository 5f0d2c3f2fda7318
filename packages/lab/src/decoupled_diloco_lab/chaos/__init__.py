"""Inject a scenario's faults into real processes and links, then judge the tapes."""
