"""Start, watch, restart and end the processes of a run on this machine.

Start reading at `local`, which implements `ddiloco train` and `ddiloco syncer`. Its `supervisor`
runs the roles (`roles`, `shard_role`) in separate processes, which `fork_server` forks.
`run_folder` is the run folder, and `resume_run` continues the run in it. `user_program` runs a
user's program as a learner. `launch_folder` and `engine` submit a run to a cluster. `doctor` checks
a machine before a run.

The launcher has one thread, which polls. A role owns its process: signals, threads, devices. Roles
communicate only over the transport and the run folder.
"""
