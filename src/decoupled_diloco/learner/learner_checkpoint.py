"""A learner's own checkpoint: everything that its next incarnation needs to continue from it.

A file holds the model (with frozen parameters and buffers), and the states of the inner optimizer
and of the user's `Stateful` objects. For each fragment it holds the version that the parameters
were last aligned with, its published copy, and the steps and tokens trained since. The published
copy takes 4 bytes per parameter on the disk. It costs no time at the step boundary, since it is
already in host memory, and a restart need not fetch a fragment that has not changed. With fp32
parameters and AdamW a file has 16 bytes per parameter: 4 model, 8 optimizer, 4 published copy. When
a run is over, its result has the weights, and the launcher keeps only the `rest` of each learner.

Files: ``<number>.safetensors``, numbers ascending; for a checkpoint of the whole run
``<number>.checkpoint-<number in the run>.safetensors``. The file of a multi-rank learner has no
tensors. Its model and state (`sharded_state`) and its published copies (`storage.vector_ranges`)
are beside the file, in the folder ``<number>.ranks``. That folder is complete when the file exists.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from decoupled_diloco.errors import StorageError
from decoupled_diloco.learner.parameter_store import Values
from decoupled_diloco.protocol.messages import KeptFragment, Version
from decoupled_diloco.runtime import runtime
from decoupled_diloco.storage.files import NOT_JSON, is_folder, names_in
from decoupled_diloco.storage.states import pack, unpack
from decoupled_diloco.storage.vector_ranges import PUBLISHED, RESIDUAL, kept_range, summed
from decoupled_diloco.storage.weight_files import load_sealed, save_sealed

logger = logging.getLogger(__name__)

FORMAT = 7
"""Format of a file that has everything in it; other versions are not read."""

FORMAT_OF_RANKS = 8
"""Format of a file whose model, state and published copies are beside it."""

OPTIMIZER = "optimizer"
"""Name of the inner optimizer's state among the states of the stateful objects."""


@dataclass(frozen=True)
class KeptBeside:
    """A published copy or residual [N] that several sync ranks have written beside the file."""

    folder: Path
    fragment: int
    size: int
    what: str = PUBLISHED

    def numel(self) -> int:
        """Return N, as `Tensor.numel` does."""
        return self.size

    def read(self) -> Tensor:
        """Return the copy, fp32 [N].

        Raises:
            StorageError: It cannot be read.
        """
        return kept_range(self.folder, self.fragment, 0, self.size, self.what)


@dataclass(frozen=True)
class HeldFragment:
    """One fragment at the boundary at which the checkpoint was taken.

    Attributes:
        version: The version that the parameters were last aligned with.
        digest: Digest of its published copy.
        seal: Proof for its shard that the shard has published this version.
        steps: Inner steps that are in the parameters but not in a version that was held.
        tokens: Tokens of those steps.
        published: The published copy, fp32 [N]; with several ranks, a handle to it.
        residual: Residuals of earlier contributions, whose sum counts; each as ``published``.
        again: How many contributions from this version a device's shard has folded.
    """

    version: Version
    digest: str
    seal: str
    steps: int
    tokens: int
    published: Values
    residual: tuple[Values, ...] = ()
    again: int = 0


@dataclass(frozen=True)
class LearnerCheckpoint:
    """One learner at one step boundary; all tensors are on the host and never written to again.

    Attributes:
        learner: The learner's id.
        run: The run's id, from its coordinator. Versions are valid only in their run.
        epoch: The incarnation of the process that wrote it.
        steps: Steps of this learner, including earlier incarnations.
        tokens: Tokens of this learner, including earlier incarnations.
        discarded_tokens: As in `StepReport`, including earlier incarnations.
        global_step: The newest step of the run that the learner had received.
        fragments: All fragments, in order; empty if the run's weights are to be fetched instead.
        model: The model's `state_dict`; without fragments, only what the run's weights lack.
        state: Name to state of the stateful objects; the inner optimizer's is `OPTIMIZER`.
        run_checkpoint: The number of the run's checkpoint to which it belongs, if any.
        ranks: Number of ranks that wrote the model and the state; 0: they are in this file.
        beside: The folder that these ranks wrote; ``None`` if ``ranks`` is 0.
        alone: Steps and tokens that a device has trained since its last visit.
    """

    learner: str
    run: str
    epoch: int
    steps: int
    tokens: int
    discarded_tokens: int
    global_step: int
    fragments: tuple[HeldFragment, ...]
    model: Mapping[str, Tensor]
    state: Mapping[str, Any] = field(default_factory=dict)
    run_checkpoint: int | None = None
    ranks: int = 0
    beside: Path | None = None
    alone: tuple[int, int] = (0, 0)

    def write(self, path: Path) -> None:
        """Write the file atomically.

        Raises:
            ConfigError: A value in `state` cannot be saved.
            StorageError: The file cannot be written. An existing file is unchanged.
        """
        model, model_text = pack(dict(self.model))
        state, state_text = pack(dict(self.state))
        tensors = {f"model.{name}": tensor for name, tensor in model.items()}
        tensors |= {f"state.{name}": tensor for name, tensor in state.items()}
        if not self.ranks:
            tensors |= {f"{PUBLISHED}.{p}": held.published for p, held in enumerate(self.fragments)}
            tensors |= {
                f"{RESIDUAL}.{p}": summed(self.fragments[p].residual) for p in self.with_residual
            }
        record = {name: getattr(self, name) for name in _NUMBERS} | {
            "format": FORMAT_OF_RANKS if self.ranks else FORMAT,
            "ranks": self.ranks,
            "residuals": self.with_residual,  # break: checkpoint-without-residuals
            "again": [held.again for held in self.fragments],
            "alone": list(self.alone),
            "fragments": [
                [str(held.version), held.digest, held.seal, held.steps, held.tokens]
                + [held.published.numel()] * bool(self.ranks)
                for held in self.fragments
            ],
        }
        texts = {"record": json.dumps(record), "model": model_text, "state": state_text}
        save_sealed(
            path, {name: t.detach().cpu().contiguous() for name, t in tensors.items()}, texts
        )

    def rest(self, weights: Container[str]) -> LearnerCheckpoint:
        """Return what the next incarnation needs if it begins with the run's newest weights.

        Args:
            weights: Names of the model's tensors that are among those weights.
        """
        model = {name: tensor for name, tensor in self.model.items() if name not in weights}
        return replace(self, fragments=(), model=model, run_checkpoint=None)

    @property
    def with_residual(self) -> list[int]:
        """Indices of the fragments that have a residual."""
        return [p for p, held in enumerate(self.fragments) if held.residual]

    def kept(self) -> tuple[KeptFragment, ...]:
        """Return what the state machine receives about the fragments."""
        return tuple(
            KeptFragment(
                index, held.version, held.steps, held.tokens, held.digest, held.seal, held.again
            )
            for index, held in enumerate(self.fragments)
        )

    @classmethod
    def read(cls, path: Path) -> LearnerCheckpoint:
        """Read a file and verify every byte.

        Raises:
            StorageError: The file is missing, torn, corrupt or has another format, or the folder
                beside it is missing.
        """
        tensors, texts = load_sealed(path)
        try:
            record = json.loads(texts["record"])
            if record["format"] not in (FORMAT, FORMAT_OF_RANKS):
                raise StorageError(
                    f"{path} has format {record['format']}, but this version reads {FORMAT} and "
                    f"{FORMAT_OF_RANKS} only: continue with the decoupled-diloco that wrote it"
                )
            ranks = int(record["ranks"])
            left, again = set(record["residuals"]), record["again"]
            steps_alone, tokens_alone = map(int, record["alone"])

            def kept(what: str, index: int, fields: list[Any]) -> Values:
                if ranks:
                    return KeptBeside(beside_of(path), index, fields[5], what)
                return tensors[f"{what}.{index}"]

            fragments = tuple(
                _held(
                    *fields[:5],
                    kept(PUBLISHED, index, fields),
                    (kept(RESIDUAL, index, fields),) if index in left else (),
                    int(again[index]),
                )
                for index, fields in enumerate(record["fragments"])
            )
            numbers = {name: record[name] for name in _NUMBERS}
            model = unpack(_under("model.", tensors), texts["model"])
            state = unpack(_under("state.", tensors), texts["state"])
        except NOT_JSON as error:
            raise StorageError(
                f"{path} is not a valid learner checkpoint ({error!r}): delete it"
            ) from error
        beside = beside_of(path) if ranks else None
        if beside is not None and not is_folder(beside):
            raise StorageError(
                f"{path}: the folder {beside.name} beside it is missing: restore the folder, or "
                "delete the file"
            )
        alone = (steps_alone, tokens_alone)
        return cls(
            **numbers,
            fragments=fragments,
            model=model,
            state=state,
            ranks=ranks,
            beside=beside,
            alone=alone,
        )


def _held(version: str, digest: str, seal: str, *rest: Any) -> HeldFragment:
    return HeldFragment(Version.read(version), digest, seal, *rest)


_NUMBERS = (
    "learner",
    "run",
    "epoch",
    "steps",
    "tokens",
    "discarded_tokens",
    "global_step",
    "run_checkpoint",
)


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}


OWN = re.compile(r"\d{8,}(?:\.checkpoint-(\d+))?\.safetensors")
_TORN = re.compile(rf"\.{OWN.pattern}\.\d+\.part")
_BESIDE = re.compile(r"\d{8,}\.ranks")
"""Names that `CheckpointFolder` writes; it does not touch other files in its folder."""


class CheckpointFolder:
    """The checkpoints of one learner.

    Checkpoints that belong to a checkpoint of the run are kept until `forget_checkpoints`. Of the
    ordinary ones, the newest ``keep`` are kept.

    Args:
        path: The folder; created at the first `save`.
        keep: Number of ordinary checkpoints to keep, at least 1; with 2, one may be corrupt.

    Attributes:
        problems: A message for each file that could not be read.
    """

    def __init__(self, path: str | Path, keep: int = 2) -> None:
        assert keep >= 1, f"keep={keep}"
        self.path = Path(path)
        self.keep = keep
        self.problems: list[str] = []
        self._begun: set[int] = set()

    def save(self, checkpoint: LearnerCheckpoint) -> Path:
        """Write a checkpoint as the newest one, then delete those that are no longer needed.

        Raises:
            ConfigError: A value in its state cannot be saved.
            StorageError: It cannot be written. The existing files are unchanged.
        """
        for torn in names_in(self.path):
            if _TORN.fullmatch(torn.name):  # an earlier incarnation was killed while writing
                delete_file(torn)
        number = self._next_number()
        if checkpoint.beside is not None:
            number = number_of(checkpoint.beside)
        of_run = checkpoint.run_checkpoint
        mark = "" if of_run is None else f".checkpoint-{of_run}"
        path = self.path / f"{number:08d}{mark}.safetensors"
        checkpoint.write(path)
        # break: run-checkpoint-deleted
        ordinary = [file for file in self._files() if run_checkpoint_of(file) is None]
        for old in ordinary[: -self.keep]:
            delete_file(old)
        return path

    def next_beside(self) -> Path:
        """Return the folder in which several ranks write the next checkpoint's model and state."""
        kept = {number_of(path) for path in self._files()} | self._begun
        for folder in names_in(self.path):
            if _BESIDE.fullmatch(folder.name) and number_of(folder) not in kept:
                # An earlier incarnation was killed before it wrote the file.
                runtime().disk.remove_folder(folder)
        self._begun.add(number := self._next_number())
        return self.path / f"{number:08d}.ranks"

    def _next_number(self) -> int:
        return max({0, *self._begun, *map(number_of, self._files())}) + 1

    def newest(self) -> LearnerCheckpoint | None:
        """Return the newest whole checkpoint, if any, and add those that are not to `problems`."""
        return self._first_whole(list(reversed(self._files())))

    def forget_checkpoints(self, unneeded: Callable[[int], bool]) -> None:
        """Delete the parts of unneeded checkpoints of the run, given the checkpoint's number."""
        for file in self._files():
            number = run_checkpoint_of(file)
            if number is not None and unneeded(number):
                delete_file(file)

    def _first_whole(self, files: list[Path]) -> LearnerCheckpoint | None:
        for path in files:
            try:
                return LearnerCheckpoint.read(path)
            except StorageError as error:
                problem = f"{error}; the one before it is used"
                self.problems.append(problem)
                logger.warning("%s", problem)
        return None

    def _files(self) -> list[Path]:
        """Return the checkpoints, ascending by number."""
        found = names_in(self.path)
        return sorted((path for path in found if OWN.fullmatch(path.name)), key=number_of)


def run_checkpoint_of(path: Path) -> int | None:
    """Return the number of the run's checkpoint to which a learner's file belongs, if any.

    >>> run_checkpoint_of(Path("00000012.checkpoint-4.safetensors"))
    4
    """
    found = OWN.fullmatch(path.name)
    return int(found[1]) if found is not None and found[1] else None


def beside_of(path: Path) -> Path:
    """Return the folder of a file's model and state, if several ranks wrote them.

    >>> beside_of(Path("00000012.checkpoint-4.safetensors")).name
    '00000012.ranks'
    """
    return path.with_name(f"{path.name.split('.')[0]}.ranks")


def number_of(path: Path) -> int:
    """Return the number of a checkpoint's file or folder."""
    return int(path.name.split(".")[0])


def delete_file(path: Path) -> None:
    """Delete a checkpoint and the folder beside it, if possible."""
    with contextlib.suppress(OSError):  # the next checkpoint tries again
        runtime().disk.remove(path)
        if runtime().disk.is_folder(beside_of(path)):
            runtime().disk.remove_folder(beside_of(path))
