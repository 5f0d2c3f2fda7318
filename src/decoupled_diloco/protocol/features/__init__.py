"""Features in addition to the method: state transfers, checkpoints and leased data."""
