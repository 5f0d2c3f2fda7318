"""The command line, `ddiloco`, which starts in `decoupled_diloco.__main__`; enter at `main`.

A command is a function of a model (`command_line`): the model's fields are the options, and their
documentation is the help. `shared_options` has the options that several commands share,
`command_groups` the groups of `ddiloco --help`, `runs` the choice of a run. A command reads
options, calls the code that does the work, and prints. Imports of torch wait until a command needs
it. Other distributions add commands by entry points (`extra_commands`).

Exit codes: 0 done; 1 other failures; 2 wrong configuration or usage; 3 protocol; 4 transport;
5 access refused; 6 storage; 7 merge; 8 another process acts for the shard; 130 interrupted.
"""
