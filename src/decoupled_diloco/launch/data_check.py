"""Check before a run starts that each learner has data."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from decoupled_diloco.config import RunConfig
from decoupled_diloco.errors import ConfigError, DilocoError
from decoupled_diloco.workloads import Batch, Workload
from decoupled_diloco.workloads.data_partitions import WorkloadPartitions
from decoupled_diloco.workloads.rank_split import require_divisible
from decoupled_diloco.workloads.workload import Placed


def require_data(workload: Workload, config: RunConfig) -> int:
    """Draw a batch of the first and of the last partition, which differ most if partitions differ.

    With `data.elastic`, partitions are leased to learners; otherwise each learner has one.

    Returns:
        The number of tokens in the larger batch.

    Raises:
        ConfigError: A partition has no batch, or the model cannot be divided among the ranks of a
            learner.
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
    except Exception as problem:  # a user's workload may raise anything
        text = f"workload {name!r} has no data: {type(problem).__name__}: {problem}"
        raise ConfigError(text) from problem
    return _first_tokens(workload, name, data.partitions, lambda n: data.iter_partition(n, 0, 0))


def _first_tokens(
    workload: Workload, name: str, partitions: int, batches: Callable[[int], Iterable[Batch]]
) -> int:
    tokens = 0
    for index in sorted({0, partitions - 1}):
        failure = f"workload {name!r} has no batch for partition {index} of {partitions}"
        try:
            tokens = max(tokens, workload.tokens(next(iter(batches(index)))))
        except DilocoError:
            raise
        except StopIteration:
            raise ConfigError(f"{failure}: its iterator is empty") from None
        except Exception as problem:  # a user's workload may raise anything
            text = f"{failure}: {type(problem).__name__}: {problem}"
            raise ConfigError(text) from problem
    return tokens
