"""The syncer: shard processes that merge fragments; one of them hosts the coordinator."""
