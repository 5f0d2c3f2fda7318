"""What places a run's processes on more than one machine, and starts them again."""
