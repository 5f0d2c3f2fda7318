"""The state of a run, folded from its event tape record by record: the only fold of the tape.

Modules:

- `fold_records`: `RunModel`, and the functions that read a whole tape or follow a growing one
- `facts`: the state of the model, as plain data
- `learners`, `shards`: the fold of each kind of process
- `ledger`: the tokens of one incarnation of a learner
- `absences`, `accounts`: outages and accounts, computed from a whole tape
- `data_usage`: the data ledger
- `phrases`: phrases that all outputs share

Start with `RunModel.take` for a growing tape and `read_run` for a whole one. A model belongs to one
thread and uses no clock, file or network, except that `read_run` and `FollowedRun` read tapes.
`show`, `monitor`, `chaos` and the commands read models; only the folds change them.
"""

from __future__ import annotations

from decoupled_diloco.run_model.fold_records import FollowedRun, RunModel, read_run, run_of

__all__ = ["FollowedRun", "RunModel", "read_run", "run_of"]
