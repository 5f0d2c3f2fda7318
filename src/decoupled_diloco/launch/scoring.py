"""Score learners by the payloads that the shards record (rule 26).

At one instant, the evaluator keeps a copy of the global weights and their versions, the *point*.
Some periods later, it reads from the shards' tapes which contributions were made from exactly these
versions, and reads their payloads. A learner's gain is the held-out loss at the point minus the
loss at the point plus its share of a merge: its contributions, divided by the number of learners.
All learners are compared at one point on the same data, so gains differ little by chance.

Whole contributions would mislead. A whole one leads far into what is special in the learner's data,
which a merge averages out, so an honest learner with unusual data would seem harmful.

It needs the run folder of the shards, a second copy of the weights, and one evaluation per learner.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from decoupled_diloco.config import RunConfig
from decoupled_diloco.config.method import plan_of
from decoupled_diloco.merge import layout_of, tensors_of
from decoupled_diloco.merge.fragments import parameters_numel
from decoupled_diloco.merge.packing import packed_sizes
from decoupled_diloco.protocol import messages
from decoupled_diloco.protocol.messages import Asking
from decoupled_diloco.syncer.payload_archive import PAYLOADS, read_body
from decoupled_diloco.tape.reader import Follower, tape_files
from decoupled_diloco.workloads import Workload

logger = logging.getLogger(__name__)

FRAGMENTS_MIN = 0.5
"""Share of the fragments from which a learner needs contributions, to be scored."""

Name = tuple[str, int, Asking]
"""Learner, fragment and request of a contribution."""


@dataclass
class Point:
    """The global weights at one instant.

    Attributes:
        step: The global step.
        versions: The version of each fragment.
        values: The model's tensors, in the order of the layout.
    """

    step: int
    versions: tuple[str, ...]
    values: list[Tensor]


@dataclass
class Arrived:
    """A contribution that has arrived.

    Attributes:
        base: The version that it was made from.
        expected: The order that names its payload.
        scale: The factor of the norm gate.
    """

    base: str
    expected: messages.Expect
    scale: float = 1.0


class Scorer:
    """Measures the learners' gains; see `decoupled_diloco.launch.scoring`.

    Args:
        config: The run's settings.
        folder: The run folder of the shards.
        workload: Evaluates the model.
        model: The evaluator's model, which has the global weights between two calls.
    """

    def __init__(
        self, config: RunConfig, folder: Path, workload: Workload, model: torch.nn.Module
    ) -> None:
        layout = layout_of(model)
        self._plan = plan_of(layout, config)
        self._tensors = tensors_of(model, self._plan.layout)
        self._model, self._workload, self._folder = model, workload, folder
        self._shards = config.syncer.shards
        self._steps = config.trust.score_every * config.sync.sync_every
        self._followers: dict[Path, Follower] = {}
        self._expected: dict[Name, messages.Expect] = {}
        self._arrived: dict[Name, Arrived] = {}
        self._point: Point | None = None

    def gains(self, step: int, versions: tuple[str, ...]) -> messages.GainsMeasured | None:
        """Return the gains at the last point, if it is time, and start the next point.

        Args:
            step: The global step of the model's weights.
            versions: The version of each fragment in them.
        """
        point = self._point
        self._read_tapes()
        if point is not None and step < point.step + self._steps:
            return None
        measured = None if point is None else self._measure(point)
        self._arrived = {
            name: each for name, each in self._arrived.items() if each.base == versions[name[1]]
        }
        self._point = Point(step, versions, [t.detach().clone() for t in self._tensors])
        return measured

    def _measure(self, point: Point) -> messages.GainsMeasured | None:
        now = [tensor.detach().clone() for tensor in self._tensors]
        made: dict[str, dict[int, Arrived]] = {}
        for (learner, fragment, _), each in self._arrived.items():
            if each.base == point.versions[fragment]:
                made.setdefault(learner, {})[fragment] = each
        enough = FRAGMENTS_MIN * len(point.versions)
        learners = sorted(name for name, fragments in made.items() if len(fragments) >= enough)
        try:
            self._set(point.values)
            loss = self._workload.evaluate(self._model)["loss"]
            gains = []
            for learner in learners:
                self._set(point.values)
                for fragment, each in made[learner].items():
                    self._add(fragment, each, 1 / len(learners))  # break: whole-contribution-scored
                gains.append((learner, loss - self._workload.evaluate(self._model)["loss"]))
        finally:
            self._set(now)
        return messages.GainsMeasured(point.step, tuple(gains)) if gains else None

    @torch.no_grad()
    def _set(self, values: list[Tensor]) -> None:
        for tensor, own in zip(self._tensors, values, strict=True):
            tensor.copy_(own)

    @torch.no_grad()
    def _add(self, fragment: int, arrived: Arrived, share: float) -> None:
        """Add a share of a contribution to the model's parameters."""
        part, path = self._plan.fragments[fragment], arrived.expected.path
        folder = self._folder / PAYLOADS / f"shard-{fragment % self._shards}"
        body = read_body(folder, path)
        uplink = self._plan.uplink_of(fragment, arrived.expected.codec)
        if body is None or len(body) not in packed_sizes(uplink, part.numel):
            logger.warning("%s cannot be read: it does not count in a score", folder / path)
            return
        change = uplink.decode(torch.frombuffer(body, dtype=torch.uint8), part.numel)
        start, trained = 0, parameters_numel(part, self._plan.layout)
        for piece in part.pieces:
            if start >= trained:  # buffers follow, as values and not as changes
                return
            values = self._tensors[piece.tensor].view(-1)[piece.start : piece.stop]
            values += (share * arrived.scale * change[start : start + piece.numel]).to(values)
            start += piece.numel

    def _read_tapes(self) -> None:
        for value in self._values():
            match value:
                case messages.Expect(_, learner, _, _, fragment, ask):
                    self._expected[learner, fragment, ask] = value
                case messages.BodyArrived():
                    name = (value.learner, value.fragment, value.ask)
                    expected = self._expected.pop(name, None)
                    if expected is not None:
                        self._arrived[name] = Arrived(str(value.base), expected)
                case messages.Unexpect(path):
                    self._forget(path)
                case messages.Fold(fragment, learner, ask, scale=scale):
                    if (learner, fragment, ask) in self._arrived:
                        self._arrived[learner, fragment, ask].scale = scale

    def _forget(self, path: str) -> None:
        for name, each in self._expected.items():
            if each.path == path:
                del self._expected[name]
                return

    def _values(self) -> Iterator[object]:
        """Yield the new facts and orders of all shards."""
        for path in tape_files(self._folder):
            if path.name.startswith("shard-"):
                for record in self._followers.setdefault(path, Follower(path)).poll():
                    if record.kind in ("event", "effect"):
                        yield record.value()
