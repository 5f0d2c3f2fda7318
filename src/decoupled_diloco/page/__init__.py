"""The live page of a run, which shard 0 of the syncer serves to browsers."""
