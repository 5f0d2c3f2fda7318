"""Going on with a run in its folder after all of its processes have ended.

Nothing is begun anew: every process takes up its newest durable state (shards their checkpoints and
journals, the coordinator its file, learners their own checkpoints), epochs and terms are raised as
after any restart, and tapes are appended to.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from decoupled_diloco.config import RunConfig
from decoupled_diloco.config.method import public_text, read_public
from decoupled_diloco.errors import ConfigError
from decoupled_diloco.observe.tape import TapeReader
from decoupled_diloco.protocol.coordinator import Phase
from decoupled_diloco.syncer.coordinator import read_state
from decoupled_diloco.syncer.result import RESULT


@dataclass(frozen=True)
class Standing:
    """How far a run has come, by what is in its folder.

    Attributes:
        phase: The coordinator's; ``None``: nobody has joined yet.
        faults: How many of the run's faults have been.
        weights: The result, if there is one.
    """

    phase: Phase | None
    faults: int
    weights: Path | None

    @property
    def is_finished(self) -> bool:
        """Whether nothing is left to do."""
        return self.phase == "finished" and self.weights is not None


def standing_of(folder: Path, config: RunConfig) -> Standing:
    """Reads how far the run in a folder has come, given the settings it is to go on with.

    Raises:
        StorageError: The coordinator's state cannot be read.
        ConfigError: It is of a run with other settings, or shards keep nothing.
    """
    kept = read_state(folder, read_public(public_text(config)))
    if kept is not None and not config.syncer.durable:
        raise ConfigError(
            f"the run in {folder} kept nothing, because syncer.durable is false: begin a new one"
        )
    launcher = folder / "tape" / "launcher.jsonl"
    faults = 0
    if launcher.exists():
        faults = sum(record.type == "FaultInjected" for record in TapeReader(launcher))
    weights = folder / RESULT
    phase = None if kept is None else kept.phase
    return Standing(phase, faults, weights if weights.exists() else None)
