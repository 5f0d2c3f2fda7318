"""Commands that the lab adds to `ddiloco`."""
