"""The processes of a run on this machine: started, watched, started again, and ended.

Enter at `local`, which is `ddiloco train` and `ddiloco syncer`. It supervises (`supervisor`) what
`roles` and `shard_role` do in processes of their own, which `fork_server` forks. `folder` is the
run folder, `resume` what goes on with one, `command` a user's own program as a learner.
`launch_folder` and `engine` hand a run to a cluster. `doctor` looks before a run.

The launcher has one thread, which polls. A role owns its process: signals, threads, devices. It
meets the others over the transport and the run folder alone.
"""
