"""What `ddiloco launch` asks of an engine.

An engine places processes and starts them again; the protocol of the run stays ours. What it is
given are files: jobs of Slurm, manifests of Kubernetes, actors of Ray. They lie in the *launch
folder*, beside the run folder, where they may be read and changed before they are submitted:

```
RUN.launch/run.toml   the run's settings, resolved
           token      its secret
           tls/       certificates and keys, where the engine has to have copies
           …          what the engine reads
           jobs.json  what was submitted
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
    """Something that was submitted.

    Attributes:
        name: What it is in the run: "syncer", "learner-3", "learners".
        id: What the engine calls it.
    """

    name: str
    id: str


@dataclass(frozen=True)
class JobState:
    """How a job is, in the engine's own words."""

    name: str
    id: str
    state: str
    where: str = ""  # the machine, as far as it is known


class PlacingEngine(Protocol):
    """Slurm, Kubernetes, Ray and their like."""

    @property
    def leaves(self) -> tuple[str, ...]:
        """Patterns of what a launch leaves in its folder, beside settings and secret.

        A new launch removes these files first.
        """

    def require(self, config: RunConfig) -> None:
        """Finds out whether the engine is here and can ever give what the run asks for.

        Raises:
            ConfigError: it is not, or can not.
        """

    def files(self, config: RunConfig, folder: Path) -> Mapping[str, str]:
        """The files that it reads, by name, for a launch folder."""

    def copies(self, config: RunConfig) -> Mapping[str, Path]:
        """Files that it needs a copy of in the launch folder, by the copy's name.

        They may be secret: they are for this user's eyes only, and never shown.
        """

    def logs(self, config: RunConfig, folder: Path) -> str:
        """Where the processes' logs are: a folder, or the command that shows them."""

    def submit(self, config: RunConfig, folder: Path, *, resume: bool = False) -> Sequence[Job]:
        """Submits the files of a launch folder as they are.

        Where the run folder is on a file system that this machine shares, an earlier run in it is
        moved aside first, or gone on with.

        Raises:
            ConfigError: it refuses them, or does not go on with an earlier run.
        """

    def states(self, jobs: Sequence[Job]) -> Sequence[JobState]:
        """How the jobs are; those that are gone are left out."""

    def stop(self, jobs: Sequence[Job]) -> None:
        """Has the learners hand in what they have, and ends all."""
