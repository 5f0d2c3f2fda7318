"""Random worlds: options, links and faults drawn from a seed, and the rules that each must keep."""
