"""All errors that can occur in operation, as one class tree.

```
DilocoError
├── ConfigError      the configuration, the command line or the model is wrong; exit code 2
├── ProtocolError    a message or a payload breaks the rules: drop that peer, never the run
├── TransportError   a peer cannot be reached, or the connection was lost
│   ├── AccessError  the peer rejects this process: wrong auth token, or another's learner name
│   ├── NotJoinedError  the run has not admitted this process, so nothing was exchanged
│   └── RunEndedError  no process listens anymore, and the run folder records the run's end
├── StorageError     a file is missing, torn or has another format, or the disk is full
├── MergeError       tensors cannot be merged: wrong size, not finite, no weight
├── MethodError      a custom schedule or participation rule fails; the run continues without it
└── LeaseError       another process leads this shard now: this one exits; exit code 8
```

A message contains the name and value that are wrong, the limit, and the fix. Programmer errors are
`assert`ed and are not in this tree.
"""

from __future__ import annotations


class DilocoError(Exception):
    """Base of every operating error raised by this package."""

    exit_code = 1


class ConfigError(DilocoError, ValueError):
    """A setting, a command-line option or a model is wrong."""

    exit_code = 2


class ProtocolError(DilocoError):
    """A message or payload breaks the protocol; the peer is dropped and the run continues."""

    exit_code = 3


class TransportError(DilocoError, ConnectionError):
    """A peer cannot be reached or the connection was lost."""

    exit_code = 4


class AccessError(TransportError):
    """The peer rejects this process: wrong auth token, or a learner name of another principal."""

    exit_code = 5


class NotJoinedError(TransportError):
    """No run has admitted this process within a timeout, so nothing was exchanged."""


class RunEndedError(TransportError):
    """The syncer cannot be reached because its run has ended."""

    exit_code = 9


class StorageError(DilocoError, OSError):
    """A file is missing, torn, has another format, or cannot be written."""

    exit_code = 6


class MergeError(DilocoError):
    """Tensors cannot be merged."""

    exit_code = 7


class MethodError(DilocoError):
    """A custom schedule or participation rule raises an exception or returns another type."""


class LeaseError(DilocoError):
    """This process no longer leads its shard; after a restart it waits for the leadership lease."""

    exit_code = 8


def a_kind(value: object) -> str:
    """Return the name of a value's type with its article, for a message.

    >>> a_kind("x"), a_kind(5)
    ('a str', 'an int')
    """
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeioAEIO' else 'a'} {name}"


FINAL_EXIT_CODES = (ConfigError.exit_code, RunEndedError.exit_code)
"""Exit codes of errors that a restart would only repeat."""

PREEMPTED_EXIT_CODES = (130, 143, -15)
"""Exit codes of a process that ended because it received SIGTERM: it left in order, its program did
not read the result of `Learner.step`, or it was still starting."""
