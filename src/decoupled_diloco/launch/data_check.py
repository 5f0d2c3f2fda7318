"""Whether learners can train what the settings say, found out before anything starts."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from decoupled_diloco.config import RunConfig
from decoupled_diloco.errors import ConfigError, DilocoError
from decoupled_diloco.workloads import Batch, Workload
from decoupled_diloco.workloads.data_partitions import WorkloadPartitions
from decoupled_diloco.workloads.rank_split import require_divisible
from decoupled_diloco.workloads.workload import Placed


def require_data(workload: Workload, config: RunConfig) -> int:
    """Draws a batch of the first part and of the last: of what is lent out, or is fixed.

    Where parts differ, these are the extremes.

    Returns:
        Tokens of a batch.

    Raises:
        ConfigError: A part has no batch, or the model cannot be cut over the ranks of a learner;
            says why.
    """
    require_divisible(workload, config)
    name, learners = config.required_workload.name, config.run.learners
    if not config.data.elastic:
        return _first_tokens(workload, name, learners, lambda n: workload.batches(n, learners))
    if isinstance(workload, Placed):
        workload.take_place(0, learners)
    try:
        data = WorkloadPartitions(workload, config.data.partitions)
    except DilocoError:
        raise
    except Exception as problem:  # A workload may be anybody's code.
        text = f"workload {name!r} gives no data: {type(problem).__name__}: {problem}"
        raise ConfigError(text) from problem
    return _first_tokens(workload, name, data.partitions, lambda n: data.iter_partition(n, 0, 0))


def _first_tokens(
    workload: Workload, name: str, parts: int, batches: Callable[[int], Iterable[Batch]]
) -> int:
    tokens = 0
    for part in sorted({0, parts - 1}):
        try:
            tokens = max(tokens, workload.tokens(next(iter(batches(part)))))
        except DilocoError:
            raise
        except StopIteration:
            raise ConfigError(f"{_which(name, part, parts)}: its batches end at once") from None
        except Exception as problem:  # A workload may be anybody's code.
            text = f"{_which(name, part, parts)}: {type(problem).__name__}: {problem}"
            raise ConfigError(text) from problem
    return tokens


def _which(name: str, part: int, parts: int) -> str:
    return f"workload {name!r} gives no batch for part {part} of {parts}"
