"""A learner's own checkpoint: everything that its next life needs to go on where this one was.

A file holds the model (frozen parameters and buffers too), the state of the inner optimizer and of
the user's `Stateful` objects, and of each fragment the version that the parameters were last
aligned with, its published copy, and the steps and tokens trained since. The published copy costs
4 bytes a parameter on the disk and nothing at the step boundary, since it is in host memory
already; in exchange a restart fetches nothing of a fragment that has not changed. With fp32
parameters and AdamW that is 16 bytes a parameter: 4 model, 8 optimizer, 4 published copy. When a
run is over, its result has the weights, and of each learner the launcher keeps the `rest` alone.

Files: ``<number>.safetensors``, numbers ascending; for a checkpoint of the whole run
``<number>.checkpoint-<number in the run>.safetensors``. The file of a learner of several ranks has
no tensors: model and state (`sharded_state`) and published copies (`storage.vector_ranges`) are
beside it, in the folder ``<number>.ranks``, which is complete when the file is there.
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

FORMAT = 5
"""Of a file that has everything in it. No other version's is read."""

FORMAT_OF_RANKS = 6
"""Of a file whose model, state and published copies are beside it."""

OPTIMIZER = "optimizer"
"""The name of the inner optimizer's state among the stateful objects'."""


@dataclass(frozen=True)
class KeptBeside:
    """A published copy or residual [N] that several carriers have kept beside the file."""

    folder: Path
    fragment: int
    size: int
    what: str = PUBLISHED

    def numel(self) -> int:
        """N, as a tensor tells it."""
        return self.size

    def read(self) -> Tensor:
        """The copy, fp32 [N].

        Raises:
            StorageError: It cannot be read.
        """
        return kept_range(self.folder, self.fragment, 0, self.size, self.what)


@dataclass(frozen=True)
class HeldFragment:
    """One fragment at the boundary at which the checkpoint was taken.

    Attributes:
        version: The version that the parameters were last aligned with.
        digest: Of its published copy.
        seal: By which its shard knows that it has published it.
        steps: Inner steps in the parameters and in no version that was held.
        tokens: Tokens of those steps.
        published: The published copy, fp32 [N]; of several ranks what stands in its place.
        residual: Of earlier contributions, to be added up; as ``published``.
    """

    version: Version
    digest: str
    seal: str
    steps: int
    tokens: int
    published: Values
    residual: tuple[Values, ...] = ()


@dataclass(frozen=True)
class LearnerCheckpoint:
    """One learner at one step boundary; all tensors are on the host and never written to again.

    Attributes:
        learner: Its id.
        run: The run's id, from its coordinator; versions mean nothing in another run.
        epoch: The epoch of the process that has written it.
        steps: Own steps, those of earlier lives included.
        tokens: Own tokens, those of earlier lives included.
        discarded_tokens: As in `StepReport`, those of earlier lives included.
        global_step: The run's step as far as the learner knew.
        fragments: All of them, in order; none if the run's weights are to be fetched instead.
        model: The model's `state_dict`; without fragments only what is not in the run's weights.
        state: Name to state of the stateful objects; the inner optimizer's under `OPTIMIZER`.
        run_checkpoint: The number of the run's checkpoint to which it belongs, if any.
        ranks: By how many ranks the model and the state were written; 0: they are in this file.
        beside: The folder in which these have them.
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

    def write(self, path: Path) -> None:
        """Writes it, all of it or nothing.

        Raises:
            ConfigError: Something in `state` cannot be kept.
            StorageError: The file cannot be written. What was there before is untouched.
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
        """What its next life needs if it begins with the run's newest weights.

        Args:
            weights: The names of the model's tensors that those have.
        """
        model = {name: tensor for name, tensor in self.model.items() if name not in weights}
        return replace(self, fragments=(), model=model, run_checkpoint=None)

    @property
    def with_residual(self) -> list[int]:
        """The fragments of which something is left."""
        return [p for p, held in enumerate(self.fragments) if held.residual]

    def kept(self) -> tuple[KeptFragment, ...]:
        """What the state machine is told of the fragments."""
        return tuple(
            KeptFragment(index, held.version, held.steps, held.tokens, held.digest, held.seal)
            for index, held in enumerate(self.fragments)
        )

    @classmethod
    def read(cls, path: Path) -> LearnerCheckpoint:
        """Reads it and checks every byte.

        Raises:
            StorageError: The file is missing, torn, corrupt or of another version.
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
            left = set(record["residuals"])

            def kept(what: str, index: int, told: list[Any]) -> Values:
                if ranks:
                    return KeptBeside(beside_of(path), index, told[5], what)
                return tensors[f"{what}.{index}"]

            fragments = tuple(
                _held(
                    *told[:5],
                    kept(PUBLISHED, index, told),
                    (kept(RESIDUAL, index, told),) if index in left else (),
                )
                for index, told in enumerate(record["fragments"])
            )
            numbers = {name: record[name] for name in _NUMBERS}
            model = unpack(_under("model.", tensors), texts["model"])
            state = unpack(_under("state.", tensors), texts["state"])
        except NOT_JSON as error:
            raise StorageError(f"{path} is no learner's checkpoint: {error!r}") from error
        beside = beside_of(path) if ranks else None
        if beside is not None and not is_folder(beside):
            raise StorageError(f"{path}: the folder beside it, {beside.name}, is missing")
        return cls(
            **numbers, fragments=fragments, model=model, state=state, ranks=ranks, beside=beside
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


_OWN = re.compile(r"\d{8,}(?:\.checkpoint-(\d+))?\.safetensors")
_TORN = re.compile(rf"\.{_OWN.pattern}\.\d+\.part")
_BESIDE = re.compile(r"\d{8,}\.ranks")
"""Names of what `CheckpointFolder` writes; any other file in its folder is somebody else's."""


class CheckpointFolder:
    """The checkpoints of one learner.

    Those that belong to the run's are kept until `forget_checkpoints`; of the others the newest
    ``keep``.

    Args:
        path: Made at the first `save`.
        keep: How many ordinary ones to keep, at least 1; two, so that one may turn out corrupt.

    Attributes:
        problems: What could not be read, in words.
    """

    def __init__(self, path: str | Path, keep: int = 2) -> None:
        assert keep >= 1, f"keep={keep}"
        self.path = Path(path)
        self.keep = keep
        self.problems: list[str] = []
        self._begun: set[int] = set()

    def save(self, checkpoint: LearnerCheckpoint) -> Path:
        """Writes a checkpoint as the newest, then deletes what is no longer needed.

        Raises:
            ConfigError: Something in its state cannot be kept.
            StorageError: It cannot be written. What was there is untouched.
        """
        for torn in names_in(self.path):
            if _TORN.fullmatch(torn.name):  # an earlier life was killed while it wrote
                _delete(torn)
        number = self._next_number()
        if checkpoint.beside is not None:
            number = _number(checkpoint.beside)
        of_run = checkpoint.run_checkpoint
        mark = "" if of_run is None else f".checkpoint-{of_run}"
        path = self.path / f"{number:08d}{mark}.safetensors"
        checkpoint.write(path)
        # break: run-checkpoint-deleted
        ordinary = [file for file in self._files() if run_checkpoint_of(file) is None]
        for old in ordinary[: -self.keep]:
            _delete(old)
        return path

    def next_beside(self) -> Path:
        """Where several ranks write the model and the state of the next checkpoint."""
        kept = {_number(path) for path in self._files()} | self._begun
        for folder in names_in(self.path):
            if _BESIDE.fullmatch(folder.name) and _number(folder) not in kept:
                runtime().disk.remove_folder(folder)  # an earlier life was killed while it wrote
        self._begun.add(number := self._next_number())
        return self.path / f"{number:08d}.ranks"

    def _next_number(self) -> int:
        return max({0, *self._begun, *map(_number, self._files())}) + 1

    def newest(self) -> LearnerCheckpoint | None:
        """The newest checkpoint that is whole; others are named in `problems`."""
        return self._first_whole(list(reversed(self._files())))

    def forget_checkpoints(self, unneeded: Callable[[int], bool]) -> None:
        """Deletes those to which nobody will go back."""
        for file in self._files():
            number = run_checkpoint_of(file)
            if number is not None and unneeded(number):
                _delete(file)

    def _first_whole(self, files: list[Path]) -> LearnerCheckpoint | None:
        for path in files:
            try:
                return LearnerCheckpoint.read(path)
            except StorageError as error:
                problem = f"{error}: the one before it is used"
                self.problems.append(problem)
                logger.warning("%s", problem)
        return None

    def _files(self) -> list[Path]:
        """The checkpoints, ascending by number."""
        found = names_in(self.path)
        return sorted((path for path in found if _OWN.fullmatch(path.name)), key=_number)


def run_checkpoint_of(path: Path) -> int | None:
    """The checkpoint of the run to which a learner's file belongs.

    >>> run_checkpoint_of(Path("00000012.checkpoint-4.safetensors"))
    4
    """
    found = _OWN.fullmatch(path.name)
    return int(found[1]) if found is not None and found[1] else None


def beside_of(path: Path) -> Path:
    """The folder of a file's model and state, if several ranks have written them.

    >>> beside_of(Path("00000012.checkpoint-4.safetensors")).name
    '00000012.ranks'
    """
    return path.with_name(f"{path.name.split('.')[0]}.ranks")


def _number(path: Path) -> int:
    return int(path.name.split(".")[0])


def _delete(path: Path) -> None:
    with contextlib.suppress(OSError):  # tried again at the next checkpoint
        runtime().disk.remove(path)
        if runtime().disk.is_folder(beside_of(path)):
            runtime().disk.remove_folder(beside_of(path))
