"""Real tensors in a virtual world: the same arithmetic as the real processes, in virtual time.

`TensorBodies` puts `LearnerTensors` and `ShardTensors`, which the real shells use, behind the seam
of `bodies`. Everything is one process and one thread, so a run is bit-exact by its seed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from decoupled_diloco.errors import MergeError
from decoupled_diloco.learner.exchange import LearnerTensors, verified
from decoupled_diloco.learner.store import ModuleStore
from decoupled_diloco.merge import digest, parameters_numel
from decoupled_diloco.merge.blocks import squares_of
from decoupled_diloco.merge.plan import MergePlan
from decoupled_diloco.protocol.effects import Fold
from decoupled_diloco.protocol.versions import Version
from decoupled_diloco.simulate.bodies import Body
from decoupled_diloco.syncer.fragments import FragmentTensors, PublishedCopy, ShardTensors


class Trainee(Protocol):
    """A model with its loop: what one learner process trains."""

    @property
    def model(self) -> nn.Module:
        """The model; its parameters are synchronised in place."""

    def step(self) -> int:
        """One inner step; returns its tokens."""


@dataclass
class TensorBodies:
    """Real tensors for every process of a world.

    Attributes:
        plan: The run's layout, cut, codecs and merge method.
        trainee: Makes what a learner trains, from its name and epoch.
        blend_alpha: α of ``alignment="blend"``.
        initial: Initial values of each fragment (fp32 [N]), for worlds with weights from a file.
    """

    plan: MergePlan
    trainee: Callable[[str, int], Trainee]
    blend_alpha: float = 0.5
    initial: tuple[Tensor, ...] = ()

    def learner(self, name: str, epoch: int, tokens_per_step: int) -> TensorLearner:
        """See `Bodies.learner`; the tokens of a step are the trainee's own."""
        return TensorLearner(self.plan, self.trainee(name, epoch), self.blend_alpha)

    def shard(self, shard: int, owned: tuple[int, ...]) -> TensorShard:
        """See `Bodies.shard`."""
        return TensorShard(ShardTensors(self.plan, owned), self.initial)


class TensorLearner:
    """The tensors of one learner process."""

    def __init__(self, plan: MergePlan, trainee: Trainee, blend_alpha: float) -> None:
        self.trainee = trainee
        self.plan = plan
        self.tensors = LearnerTensors(plan, ModuleStore(trainee.model), blend_alpha)

    def step(self) -> int:
        """See `LearnerBodies.step`."""
        return self.trainee.step()

    def snapshot(self, fragment: int, base: Version, step: int) -> None:
        """See `LearnerBodies.snapshot`."""
        self.tensors.snapshot(fragment)

    def encode(self, fragment: int, base: Version, steps: int, tokens: int, codec: str) -> Body:
        """See `LearnerBodies.encode`."""
        body, text = self.tensors.capture(fragment).encode(codec)
        return Body(body, body.numel(), text)

    def copy(self, fragment: int, version: Version | None) -> Body:
        """See `LearnerBodies.copy`."""
        values, text = self.tensors.whole(fragment, published=version is not None)
        return Body(values, 4 * values.numel(), text)

    def stage(
        self, fragment: int, version: Version, body: Body, *, whole: bool, digest: str
    ) -> bool:
        """See `LearnerBodies.stage`."""
        try:
            if whole:
                values = verified(body.payload, fragment, digest)
            else:
                values = self.tensors.next_values(fragment, body.payload, digest)
        except MergeError:
            return False
        self.tensors.stage(fragment, values)
        return True

    def apply(self, fragment: int, version: Version, mode: str, discarded_tokens: int) -> None:
        """See `LearnerBodies.apply`."""
        assert mode in ("overwrite", "carry", "rebase", "blend")
        self.tensors.apply(fragment, mode)  # type: ignore[arg-type]

    def relabel(self, fragment: int, version: Version) -> None:
        """See `LearnerBodies.relabel`; the values stay."""


class TensorShard:
    """The tensors of one shard process."""

    def __init__(self, tensors: ShardTensors, initial: tuple[Tensor, ...]) -> None:
        self.tensors = tensors
        self.initial = initial
        self.versions: dict[int, Version] = {}
        self.copies: dict[int, PublishedCopy] = {}

    def load(self, fragment: int) -> str:
        """See `ShardBodies.load`."""
        return self.tensors.install(fragment, self.initial[fragment].clone())

    def receive_copy(self, fragment: int, body: Body) -> str:
        """See `ShardBodies.receive_copy`."""
        return self.tensors.install(fragment, body.payload.clone())

    def install(self, fragment: int, version: Version) -> str:
        """See `ShardBodies.install`."""
        self.versions[fragment] = version
        self.copies.pop(fragment, None)
        return digest(self.tensors.whole(fragment))

    def norm(self, fragment: int, body: Body) -> float:
        """See `ShardBodies.norm`."""
        plan = self.tensors.plan
        part = plan.fragments[fragment]
        decoded = plan.codec_of(fragment, plan.uplink).decode(body.payload, part.numel)
        return math.sqrt(squares_of(decoded[: parameters_numel(part, plan.layout)]))

    def keep(self, fragment: int) -> FragmentTensors:
        """See `ShardBodies.keep`; a step makes new tensors, so these stay as they are."""
        return self.tensors.fragments[fragment]

    def recover(self, fragment: int, kept: FragmentTensors) -> str:
        """See `ShardBodies.recover`."""
        self.tensors.fragments[fragment] = kept
        return digest(kept.published)

    def fold(self, order: Fold, body: Body) -> None:
        """See `ShardBodies.fold`."""
        fragment, ask = order.fragment, order.ask
        self.tensors.verify(fragment, ask, body.payload, body.digest)
        self.tensors.fold(fragment, ask, order.steps, order.tokens, order.scale, order.discount)

    def forget_folded(self, fragment: int) -> None:
        """See `ShardBodies.forget_folded`."""
        self.tensors.forget_folded(fragment)

    def merge(self, fragment: int, version: Version, base: Version) -> str:
        """See `ShardBodies.merge`."""
        published = self.tensors.merge(fragment)
        self.versions[fragment], self.copies[fragment] = version, published
        return published.digest

    def difference(self, fragment: int, version: Version) -> Body | None:
        """See `ShardBodies.difference`."""
        published = self.copies.get(fragment)
        if published is None or self.versions.get(fragment) != version:
            return None
        return Body(published.difference, published.difference.numel(), published.digest)

    def whole(self, fragment: int, version: Version) -> Body | None:
        """See `ShardBodies.whole`."""
        if self.versions.get(fragment) != version:
            return None
        values = self.tensors.whole(fragment)
        return Body(values, 4 * values.numel(), digest(values))


def global_weights(shards: list[TensorShard], plan: MergePlan) -> list[Tensor]:
    """The published copies of every fragment, fp32, in the order of the layout's tensors."""
    flat = [torch.empty(spec.numel, dtype=torch.float32) for spec in plan.layout.tensors]
    for shard in shards:
        for fragment, entry in shard.tensors.fragments.items():
            start = 0
            for piece in plan.fragments[fragment].pieces:
                values = entry.published[start : start + piece.numel]
                flat[piece.tensor][piece.start : piece.stop] = values
                start += piece.numel
    shapes = [spec.shape for spec in plan.layout.tensors]
    return [tensor.view(shape) for tensor, shape in zip(flat, shapes, strict=True)]
