"""Files that survive a crash: weights, checkpoints, journals."""
