"""A step boundary changes real parameters exactly as each mode of rule 7 requires."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from decoupled_diloco import participants
from decoupled_diloco.errors import ConfigError
from decoupled_diloco.learner.parameter_store import HostCopy, ModuleStore
from decoupled_diloco.merge import Fragment
from decoupled_diloco.tape import TapeReader
from integration.real_system import Model, System, Trainer, training, until

Make = Callable[..., System]


@dataclass
class Applied:
    """One change of a fragment, with the state just before."""

    fragment: int
    before: Tensor
    values: Tensor
    after: Tensor
    snapshot: Tensor | None
    published: Tensor | None


@dataclass
class Watching(ModuleStore):
    """A store that records its calls; its arithmetic is the real one."""

    module: Model
    applied: list[Applied] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(self.module)
        self.snapshots: dict[int, Tensor] = {}
        self.published: dict[int, Tensor] = {}

    def snapshot(self, fragment: Fragment) -> HostCopy:
        copy = super().snapshot(fragment)
        self.snapshots[fragment.index] = copy.values().clone()
        return copy

    def overwrite(self, fragment: Fragment, values: Tensor) -> None:
        self._note(fragment, values, lambda: super(Watching, self).overwrite(fragment, values))

    def combine(
        self, fragment: Fragment, values: Tensor, minus: HostCopy | None, keep: float
    ) -> None:
        work = super().combine
        self._note(fragment, values, lambda: work(fragment, values, minus, keep))

    def _now(self, fragment: Fragment) -> Tensor:
        return super().snapshot(fragment).values()

    def _note(self, fragment: Fragment, values: Tensor, work: Callable[[], None]) -> None:
        p, before = fragment.index, self._now(fragment)
        work()
        known = (self.snapshots.get(p), self.published.get(p))
        self.applied.append(Applied(p, before, values.clone(), self._now(fragment), *known))
        self.published[p] = values.clone()


@contextmanager
def watching(monkeypatch: pytest.MonkeyPatch, model: Model) -> Iterator[list[Watching]]:
    """Give the learner that trains this model a store that records what it applies."""
    made: list[Watching] = []

    def store(module: nn.Module) -> ModuleStore:
        if module is not model:
            return ModuleStore(module)
        made.append(Watching(module))
        return made[-1]

    with monkeypatch.context() as patch:
        patch.setattr(participants, "ModuleStore", store)
        yield made


def run(
    make: Make,
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype = torch.float32,
    **sync: Any,
) -> tuple[Any, Any]:
    """Run two learners; return what the first one applied, and its orders."""
    gate = threading.Event()
    system = make(run={"max_steps": 100_000}, sync={"overlap_steps": 2, **sync})
    system.start()
    model = Model(seed=3, dtype=dtype)
    watched = Trainer(system, "learner-0", model, gate=gate)
    other = Trainer(system, "learner-1", Model(seed=4, dtype=dtype), gate=gate)
    with watching(monkeypatch, model) as made, training(watched, other):
        [store] = made
        gate.set()
        until(lambda: len(store.applied) > 20, "copies are applied")
    for trainer in (watched, other):
        trainer.end()
    orders = [
        r for r in TapeReader(system.folder / "tape" / "learner-0.jsonl") if r.type == "Apply"
    ]
    assert [r.data["fragment"] for r in orders] == [a.fragment for a in store.applied]
    return store.applied, orders


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "settings",
    [
        {"apply": {"alignment": "overwrite"}},
        {"apply": {"alignment": "carry", "missed": "rebase"}},
        {"apply": {"alignment": "blend", "blend_alpha": 0.25}},
        {"apply": {"alignment": "carry", "when": "at_overlap"}, "participation": "all"},
        {"apply": {"missed": "rebase"}, "quorum": 2},
    ],
    ids=lambda settings: "-".join(str(value) for value in settings.values()),
)
def test_each_apply_follows_rule_7(
    make: Make,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, Any],
    dtype: torch.dtype,
) -> None:
    applied, orders = run(make, monkeypatch, dtype, **settings)
    rule = settings["apply"]
    alpha = rule.get("blend_alpha", 0.5)
    seen = set()
    for change, order in zip(applied, orders, strict=True):
        mode = order.data["mode"]
        seen.add(mode)
        new, theta = change.values, change.before
        if mode == "overwrite":
            expected = new
        elif mode == "blend":
            expected = (theta * alpha).add(new, alpha=1 - alpha)
        elif mode == "carry":
            assert change.snapshot is not None
            expected = (theta - change.snapshot) + new
        else:
            assert change.published is not None
            # The published copy as the parameters held it: rounded to their dtype.
            expected = (theta - change.published.to(dtype).float()) + new
        exact = expected.to(dtype).float()
        assert torch.equal(change.after, exact), f"{mode}, fragment {change.fragment}"
    assert rule.get("alignment", "overwrite") in seen
    if rule.get("missed") == "rebase" and rule.get("alignment") == "carry":
        kept = [o.data["discarded_tokens"] for o in orders if o.data["mode"] in ("carry", "rebase")]
        assert sum(kept) == 0, "carrying and rebasing discard nothing"


def test_a_learner_that_missed_a_round_rebases(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """One learner is too slow for most rounds; its training is added to the new weights."""
    system = make(
        run={"max_steps": 120},
        sync={"apply": {"missed": "rebase"}, "grace_margin": 0.0, "overlap_steps": 0},
    )
    system.start()
    model = Model(seed=3)
    slow = Trainer(system, "learner-1", model, pause=0.1)
    fast = Trainer(system, "learner-0", Model(seed=4), pause=0.01)
    with watching(monkeypatch, model) as made, training(fast, slow):
        [store] = made
        until(lambda: any(a.published is not None for a in store.applied), "it applies")
        slow.end()
        fast.end()
    orders = [
        r for r in TapeReader(system.folder / "tape" / "learner-1.jsonl") if r.type == "Apply"
    ]
    rebased = [
        (change, order)
        for change, order in zip(store.applied, orders, strict=True)
        if order.data["mode"] == "rebase"
    ]
    assert rebased
    for change, order in rebased:
        assert torch.equal(change.after, (change.before - change.published) + change.values)
        assert order.data["discarded_tokens"] == 0


def test_a_master_copy_that_appears_in_the_first_step_is_rejected(make: Callable[..., Any]) -> None:
    system = make()
    system.start()
    model = Model(dtype=torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with system.learner(model, "learner-0", optimizer=optimizer) as learner:
        weight = model.hidden.weight
        optimizer.state[weight]["master_param"] = weight.detach().float()
        with pytest.raises(ConfigError, match=r"keeps 'hidden\.weight' in fp32 as 'master_param'"):
            learner.step(tokens=1)
        del optimizer.state[weight]["master_param"]
        assert learner.step(tokens=1)
        optimizer.state[weight]["master_param"] = weight.detach().float()
        assert learner.step(tokens=1), "only the first step checks"
