"""Everything that can go wrong in operation, as one tree.

```
Error
├── ConfigError      the configuration, the command line or the model is wrong; exit code 2
├── ProtocolError    a message or a body breaks the rules: drop that peer, never the run
├── TransportError   a peer cannot be reached, or the connection was lost
│   ├── AccessError  the peer refuses us: wrong token, another principal's learner id
│   └── RunEndedError  nothing listens any more, and the run folder records the run's end
├── StorageError     a file is missing, torn, of another version, or the disk is full
├── MergeError       tensors that cannot be merged: wrong size, not finite, no weight
└── LeaseError       another process acts for this shard now: this one ends; exit code 8
```

A message says what is wrong with names and values, the limit, and the way out. Programmer errors
are `assert`ed and are not in this tree.
"""

from __future__ import annotations


class Error(Exception):
    """Base of every operating error raised by this package."""

    exit_code = 1


class ConfigError(Error):
    """A setting, a command-line option or a model does not fit."""

    exit_code = 2


class ProtocolError(Error):
    """A message or body that breaks the protocol; the peer is dropped, the run goes on."""

    exit_code = 3


class TransportError(Error):
    """A peer cannot be reached or the connection was lost."""

    exit_code = 4


class AccessError(TransportError):
    """The peer answered and refuses us: wrong token, or a learner id bound to somebody else."""

    exit_code = 5


class RunEndedError(TransportError):
    """The syncer cannot be reached because its run has ended."""

    exit_code = 9


class StorageError(Error):
    """A file is missing, torn, of another version, or cannot be written."""

    exit_code = 6


class MergeError(Error):
    """Tensors that cannot be merged."""

    exit_code = 7


class LeaseError(Error):
    """This process may no longer act for its shard; started again, it waits for its turn."""

    exit_code = 8


FINAL_EXIT_CODES = (ConfigError.exit_code, RunEndedError.exit_code)
"""With these a process ends that would end the same way if it were started again."""
