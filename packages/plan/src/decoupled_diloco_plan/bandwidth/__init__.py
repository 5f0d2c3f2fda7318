"""Which link, which settings: utilisation, traffic, memory and cost of a run before it is made."""
