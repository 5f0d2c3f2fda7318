"""The interface of an engine for `ddiloco launch`.

An engine places processes and restarts them; it does not change the protocol of the run. It reads
files: jobs of Slurm, manifests of Kubernetes, actors of Ray. They are in the *launch folder*, next
to the run folder. A user can read and change them before they are submitted:

```
RUN.launch/run.toml   the run's resolved settings
           token      its auth token
           tls/       certificates and keys, if the engine needs copies
           …          files that the engine reads
           jobs.json  the submitted jobs
```
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from decoupled_diloco.config import RunConfig

SETTINGS = "run.toml"
TOKEN = "token"
JOBS = "jobs.json"


@dataclass(frozen=True)
class Job:
    """A submitted job.

    Attributes:
        name: Its role in the run: "syncer", "learner-3", "learners".
        id: The engine's identifier.
    """

    name: str
    id: str


@dataclass(frozen=True)
class JobState:
    """The state of a job, in the engine's terms."""

    name: str
    id: str
    state: str
    where: str = ""  # the machine; empty if it is unknown


class PlacingEngine(Protocol):
    """A cluster manager such as Slurm, Kubernetes or Ray."""

    @property
    def leaves(self) -> tuple[str, ...]:
        """Glob patterns of the files of a launch, except settings and token.

        A new launch removes these files first.
        """

    def require(self, config: RunConfig) -> None:
        """Check whether the engine is available and can provide the requested resources.

        Raises:
            ConfigError: It is not available, or cannot provide them.
        """

    def files(self, config: RunConfig, folder: Path) -> Mapping[str, str]:
        """Return the contents of the files that the engine reads, by name in a launch folder."""

    def copies(self, config: RunConfig) -> Mapping[str, Path]:
        """Return the files to copy into the launch folder, by the copy's name.

        They may be secret: only this user may read the copies, and they are never printed.
        """

    def logs(self, config: RunConfig, folder: Path) -> str:
        """Return where the processes' logs are: a folder, or a command that prints them."""

    def submit(self, config: RunConfig, folder: Path, *, resume: bool = False) -> Sequence[Job]:
        """Submit the files of a launch folder as they are.

        If this machine shares the file system of the run folder, an earlier run in the folder is
        moved aside first. With ``resume``, it is continued instead.

        Raises:
            ConfigError: The engine rejects the files, or cannot continue an earlier run.
        """

    def states(self, jobs: Sequence[Job]) -> Sequence[JobState]:
        """Return the states of the jobs, without those that no longer exist."""

    def stop(self, jobs: Sequence[Job]) -> None:
        """Ask the learners to flush and leave, then end all jobs."""
