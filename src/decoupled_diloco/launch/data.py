"""Whether each learner's part of the data has a batch, found out before anything starts."""

from __future__ import annotations

from decoupled_diloco.errors import ConfigError, Error
from decoupled_diloco.workloads import Workload


def require_batches(workload: Workload, name: str, parts: int) -> int:
    """Draws a batch of the first part and of the last; where parts differ, these are the extremes.

    Args:
        workload: Asked for the batches; it has no model of it.
        name: The workload's name, for the message.
        parts: Learners of the run, at least 1.

    Returns:
        Tokens of a batch.

    Raises:
        ConfigError: A part has no batch; says why.
    """
    tokens = 0
    for part in sorted({0, parts - 1}):
        try:
            tokens = workload.tokens(next(iter(workload.batches(part, parts))))
        except Error:
            raise
        except StopIteration:
            raise ConfigError(f"{_which(name, part, parts)}: its batches end at once") from None
        except Exception as problem:  # A workload may be anybody's code.
            text = f"{_which(name, part, parts)}: {type(problem).__name__}: {problem}"
            raise ConfigError(text) from problem
    return tokens


def _which(name: str, part: int, parts: int) -> str:
    return f"workload {name!r} gives no batch for part {part} of {parts}"
