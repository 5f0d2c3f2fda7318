"""A study: methods that train the same model on the same data with the same seeds."""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from decoupled_diloco.config.method import difference_of
from decoupled_diloco.config.settings import suggestion
from decoupled_diloco.config.toml_files import RECIPES
from decoupled_diloco.errors import ConfigError, DilocoError, StorageError
from decoupled_diloco.launch.devices import device_of_process
from decoupled_diloco.launch.on_device import moved, placed
from decoupled_diloco.protocol.coordinator_machine import SCHEDULE_FAILED
from decoupled_diloco.protocol.messages import Failed, Merge, Note
from decoupled_diloco.protocol.rounds import RULE_FAILED
from decoupled_diloco.workloads import Batch
from decoupled_diloco_lab.simulate.spec import LearnerSpec
from decoupled_diloco_lab.simulate.system import System
from decoupled_diloco_lab.simulate.training import virtual_run
from decoupled_diloco_lab.study.functions import (
    Functions,
    Loss,
    MakeBatches,
    MakeModel,
    MakeOptimizer,
    StudyWorkload,
    adamw,
    steady,
    train_plainly,
)
from decoupled_diloco_lab.study.methods import Method, Part, settings_of_recipe
from decoupled_diloco_lab.study.show import curves_svg, print_table, progress
from decoupled_diloco_lab.study.statistics import ALPHA, Equivalence, gaps, interval, tost

REFERENCE = "data-parallel"
"""The reference of all methods: one model, and the learners' batches as one global batch."""

DECOUPLED = "decoupled"
"""The method with its default settings."""

RUNS, TESTS = "runs.jsonl", "tests.jsonl"
"""Files of a folder: finished runs, and equivalence tests with the values of their first call."""

CURVE_POINTS = 100
"""Points of a loss curve."""

GRADIENT_BYTES = 8
"""Bytes per parameter and step of data-parallel training: an fp32 gradient up and one down."""

Row = dict[str, Any]
"""A finished run, as one line of the file."""


class Study:
    """Compares methods over the same seeds.

    With the same seed, all methods start from the same weights and see the same batches. All
    learners train in this process, on one device, in virtual time: they are the learners and
    shards of a real run. On the CPU, a run repeats bit for bit.

    Args:
        model: Creates the model. The study seeds PyTorch before each call.
        batches: Called as ``batches(learner, learners, seed)``. Returns an iterable of the
            learner's batches, without end: tensors, or tuples, lists or mappings of them. A learner
            that starts again reads them from the start. Learners should get different data.
        loss: Called as ``loss(model, batch)``. Returns the mean loss of the batch, a tensor without
            dimensions.
        evaluation: Returns the held-out batches. The loss of a method is the mean of their losses
            with the final global weights, in evaluation mode.
        learners: Their number M, at least 1, or a description of each (`LearnerSpec`: speed and
            link; the names are learner-0 to learner-M-1). Equal learners all train `steps` steps.
            Learners that are described share M × `steps` batches.
        steps: Steps of each learner, at least 1.
        seeds: Their number, at least 1, or the seeds.
        inner: Returns the inner optimizer of a model. Default: AdamW with a learning rate of 1e-3.
        rate: Returns the factor on the inner learning rate at a step. Default: 1.
        device: "auto", "gpu", "cpu", "cuda", "cuda:1", "xpu" or "mps".
        folder: Where finished runs are kept, one line of ``runs.jsonl`` each. A study with the same
            folder does not repeat them. Default: they are kept in memory only.

    Raises:
        ConfigError: An argument is out of range, or the folder has the runs of another study.

    Attributes:
        seeds: The seeds.
        learners: The number of learners, M.
    """

    def __init__(
        self,
        *,
        model: MakeModel,
        batches: MakeBatches,
        loss: Loss,
        evaluation: Callable[[], Iterable[Batch]],
        learners: int | Sequence[LearnerSpec] = 8,
        steps: int,
        seeds: int | Sequence[int] = 3,
        inner: MakeOptimizer = adamw,
        rate: Callable[[int], float] = steady,
        device: str = "auto",
        folder: str | Path | None = None,
    ) -> None:
        self._specs = () if isinstance(learners, int) else tuple(learners)
        self.learners = learners if isinstance(learners, int) else len(self._specs)
        self.seeds = tuple(range(seeds)) if isinstance(seeds, int) else tuple(seeds)
        self._steps = steps
        for name, count in (
            ("learners", self.learners),
            ("steps", steps),
            ("seeds", len(self.seeds)),
        ):
            if count < 1:
                raise ConfigError(f"{name}={count} is out of range: it must be at least 1")
        self._functions = Functions(model, batches, loss, evaluation, inner, rate)
        config = Method({"learner": {"device": device}}).config(run={"max_steps": 1})
        self._device = device_of_process(config)
        self._rows: dict[tuple[str, int], Row] = {}
        self._folder = None if folder is None else Path(folder)
        if self._folder is not None:
            rows = _read_lines(self._folder / RUNS)
            self._rows = {(row["name"], row["seed"]): row for row in rows}

    def run(
        self,
        name: str,
        *,
        merge: Part | None = None,
        outer: Part | None = None,
        codec: Part | None = None,
        schedule: Part | None = None,
        participation: Part | None = None,
        sync_every: int | None = None,
        quorum: int | None = None,
        grace_margin: float | None = None,
        settings: Mapping[str, Any] | None = None,
        faults: Callable[[System], None] | None = None,
    ) -> list[float]:
        """Train a method with each seed that has no result yet.

        Args:
            name: "data-parallel" is the reference, "decoupled" the method with default settings.
                The name of a recipe, such as "diloco" or "streaming-diloco", has the recipe's
                `[sync]` and `[outer]`. Any other name needs at least one of the other arguments.
            merge: The merge rule; see docs/how-to/own-method.md for functions of each kind.
            outer: The outer optimizer. ``settings`` sets ``outer.lr`` and ``outer.options``.
            codec: The uplink codec; a function returns it.
            schedule: A function that returns `sync_every` during the run.
            participation: The participation rule.
            sync_every: Steps between two syncs of a fragment.
            quorum: Learners that a merge waits for.
            grace_margin: Share of the slack in which a merge waits for more learners.
            settings: More values of a run's file by their dotted keys, such as
                ``{"outer.lr": 1e-3}``.
            faults: Plans faults of each run before it starts: ``system.clockwork.at(30.0,
                system.crash, system.learners["learner-1"])``.

        Returns:
            The loss of each seed.

        Raises:
            ConfigError: The name or a setting is not known, a function fails its trial, or the
                folder has runs of this name with another method.
            DilocoError: A function fails during a run.
        """
        chosen = {
            "merge": merge,
            "outer": outer,
            "codec": codec,
            "schedule": schedule,
            "participation": participation,
        }
        wanted: dict[str, Any] = {
            "sync.sync_every": sync_every,
            "sync.quorum": quorum,
            "sync.grace_margin": grace_margin,
        }
        wanted = {k: v for k, v in wanted.items() if v is not None} | dict(settings or {})
        own = any(each is not None for each in (*chosen.values(), faults)) or bool(wanted)
        if name == REFERENCE and own:
            raise ConfigError(
                f"name={REFERENCE!r} is the reference, which has no settings: choose another name"
            )
        recipes = RECIPES.files().keys() - {REFERENCE}
        if name in recipes:
            wanted = settings_of_recipe(name, self.learners) | wanted
        elif name not in (REFERENCE, DECOUPLED) and not own:
            raise ConfigError(
                f"name={name!r} is not known: {suggestion(name, (REFERENCE, DECOUPLED, *recipes))} "
                "For your own method, pass merge=, outer=, codec= or settings= with it"
            )
        method = Method.make(chosen, wanted, faults)
        source = {
            **self._functions.digests,
            **method.digests,
            **{k: v for k, v in method.tables.items() if v},
            "learners": self.learners if not self._specs else list(map(repr, self._specs)),
            "steps": self._steps,
        }
        source = json.loads(json.dumps(source, default=repr))
        for seed in self.seeds:
            row = self._rows.get((name, seed))
            if row is not None:
                _require_same(name, source, row["source"])
        for number, seed in enumerate(self.seeds):
            if (name, seed) not in self._rows:
                label = f"{name}, seed {number + 1} of {len(self.seeds)}"
                self._keep(self._measured(name, seed, method, label, source))
        return self._losses(name)

    def _measured(
        self, name: str, seed: int, method: Method, label: str, source: dict[str, Any]
    ) -> Row:
        begun = time.perf_counter()
        workload = StudyWorkload(self._functions, seed)
        self._try_out(workload)
        total = self._steps * (1 if name == REFERENCE else self.learners)
        with progress(label, total) as advance, _undisturbed():
            run = self._plain if name == REFERENCE else partial(self._decoupled, name, method)
            found = run(workload, seed, advance)
        return {
            "name": name,
            "seed": seed,
            **found,
            "seconds": round(time.perf_counter() - begun, 3),
            "source": source,
        }

    def _plain(self, workload: StudyWorkload, seed: int, advance: Callable[[], None]) -> Row:
        model = placed(workload.model(), self._device)
        losses: list[torch.Tensor] = []

        def on_step(loss: torch.Tensor) -> None:
            losses.append(loss)
            advance()

        train_plainly(
            workload, model, self._steps, range(self.learners), self.learners, on_step=on_step
        )
        parameters = _parameters(model)
        return {
            "loss": workload.evaluate(model)["loss"],
            "curve": _curve([torch.stack(losses).tolist()]),
            "parameters": parameters,
            "tokens": self._tokens(workload),
            "bytes_per_step": GRADIENT_BYTES * parameters,
        }

    def _try_out(self, workload: StudyWorkload) -> None:
        """Call each function once, so that its error is raised here and not in a learner."""
        model = placed(workload.model(), self._device)
        workload.optimizer(model)
        batch = next(workload.batches(0, self.learners))
        for each in (batch, self._functions.held_out[0]):
            workload.loss(model, moved(each, self._device))

    def _tokens(self, workload: StudyWorkload) -> int:
        """Return the tokens of the reference, if all batches are as large as the first ones."""
        streams = [workload.batches(part, self.learners) for part in range(self.learners)]
        return self._steps * sum(workload.tokens(next(stream)) for stream in streams)

    def _decoupled(
        self, name: str, method: Method, workload: StudyWorkload, seed: int, advance: Any
    ) -> Row:
        budget = {"max_tokens": self._tokens(workload)} if self._specs else {}
        config = method.config(
            run={"learners": self.learners, "seed": seed, **(budget or {"max_steps": self._steps})},
            data={"elastic": False},  # fixed parts, so that all methods get the same batches
            workload={"name": "lab:study"},
        )
        failures: list[str] = []
        stats: dict[int, Any] = {}

        def watch(process: str, now: float, event: Any, effects: Sequence[Any]) -> None:
            if isinstance(event, Failed) and isinstance(event.order, Merge):
                failures.append(f"a merge of {name!r} with seed={seed} failed: {event.reason}")
            for each in effects:
                if isinstance(each, Note) and each.text in (RULE_FAILED, SCHEDULE_FAILED):
                    failures.append(f"{name!r} with seed={seed} failed: {each.why}")

        def on_step(learner: Any) -> None:
            advance()
            for shard in run.system.shards:
                for server in shard.place.servers.values():
                    stats.setdefault(id(server.stats), server.stats)

        with virtual_run(
            config, self._specs, workload=workload, recorder=watch, device=self._device
        ) as run:
            system = run.system
            system.checks, system.on_step = False, on_step
            if method.faults is not None:
                method.faults(system)
            try:
                run.train(stop=lambda: bool(failures))
            except DilocoError as error:
                failures.append(f"{name!r} with seed={seed}: {error}")
            if failures:
                raise DilocoError(failures[0])
            steps = sum(map(len, run.losses.values()))
            moved = sum(each.data_bytes_sent + each.data_bytes_received for each in stats.values())
            model = run.model()
            return {
                "loss": workload.evaluate(model)["loss"],
                "curve": _curve(list(run.losses.values())),
                "parameters": _parameters(model),
                "tokens": run.tokens,
                "bytes_per_step": moved / steps,
            }

    def losses(self, name: str) -> dict[int, float]:
        """Return the loss of each seed of a method.

        Raises:
            ConfigError: The study has no run of this name.
        """
        return dict(zip(self.seeds, self._losses(name), strict=True))

    def _losses(self, name: str) -> list[float]:
        return [row["loss"] for row in self._rows_of(name)]

    def _rows_of(self, name: str) -> list[Row]:
        if name not in self._names:
            known = ", ".join(self._names) or "none"
            raise ConfigError(
                f"name={name!r} has not been run, only {known}: call study.run({name!r}, …) first"
            )
        return [self._rows[name, seed] for seed in self.seeds]

    @property
    def _names(self) -> list[str]:
        """The names of the methods that have run with all seeds, in their order."""
        names = dict.fromkeys(name for name, _ in self._rows)
        return [n for n in names if all((n, seed) in self._rows for seed in self.seeds)]

    def table(self) -> None:
        """Print one line per method: loss, gap to the reference, traffic, time.

        The reference is "data-parallel", or the first method. The interval of the gap is that of
        Student's t over the paired seeds, with 95 %.
        """
        names = self._names
        if not names:
            raise ConfigError("the study has no finished method: call study.run(…) first")
        base = REFERENCE if REFERENCE in names else names[0]
        rows = []
        for name in names:
            own = self._rows_of(name)
            gap = interval(gaps(self._losses(name), self._losses(base)))
            tokens = statistics.fmean(row["tokens"] for row in own)
            steps = self._steps * self.learners
            traffic = statistics.fmean(row["bytes_per_step"] for row in own) * steps / tokens
            seconds = statistics.fmean(row["seconds"] for row in own)
            loss = statistics.fmean(self._losses(name))
            rows.append((name, loss, None if name == base else gap, traffic, seconds))
        print_table(rows, base, len(self.seeds))

    def plot(self, path: str | Path) -> None:
        """Write the training losses of all methods as an SVG, each the mean over the seeds."""
        lines = []
        for name in self._names:
            curves = [row["curve"] for row in self._rows_of(name)]
            count = min(len(curve) for curve in curves)
            mean = [statistics.fmean(curve[i][1] for curve in curves) for i in range(count)]
            lines.append((name, [(curves[0][i][0], mean[i]) for i in range(count)]))
        Path(path).write_text(curves_svg(lines), encoding="utf-8")

    def equivalent(
        self,
        one: str,
        other: str,
        *,
        margin: float,
        sd: float | None = None,
        alpha: float = ALPHA,
    ) -> Equivalence:
        """Test whether the expected losses of two methods differ by less than a margin.

        Two one-sided t tests of the paired gaps (TOST). With a folder, the first call records
        margin, seeds and alpha, so call it before you look at the results.

        Args:
            one: A method.
            other: The method that it is compared with.
            margin: Largest relative difference of the losses that counts as equivalent.
            sd: Standard deviation of the gap for the power; default: the measured one.
            alpha: Largest probability of a wrong "equivalent".

        Raises:
            ConfigError: A method has not run, or the test was recorded with other values.
        """
        losses = self._losses(one), self._losses(other)
        test = {"one": one, "other": other}
        plan = {"margin": margin, "seeds": list(self.seeds), "alpha": alpha}
        self._require_planned(test, plan)
        return tost((one, losses[0]), (other, losses[1]), margin, sd=sd, alpha=alpha)

    def _require_planned(self, test: Row, plan: Row) -> None:
        """Record a test at its first call, and refuse other values later."""
        if self._folder is None:
            return
        path = self._folder / TESTS
        for row in _read_lines(path):
            recorded = {key: row[key] for key in plan}
            if all(row[key] == value for key, value in test.items()):
                if recorded != plan:
                    raise ConfigError(
                        f"the test of {test['one']!r} against {test['other']!r} is recorded in "
                        f"{path} with other values: {difference_of(plan, recorded)}: use those, "
                        "because values chosen after the results make the test invalid"
                    )
                return
        _append_line(path, {**test, **plan})

    def _keep(self, row: Row) -> None:
        self._rows[row["name"], row["seed"]] = row
        if self._folder is not None:
            _append_line(self._folder / RUNS, row)


def _require_same(name: str, source: Row, recorded: Row) -> None:
    difference = difference_of(source, recorded)
    if difference:
        raise ConfigError(
            f"name={name!r} was run with another source: {difference}: choose another name "
            "or folder, or delete the lines of this name"
        )


def _parameters(model: nn.Module) -> int:
    return sum(each.numel() for each in model.parameters() if each.requires_grad)


def _curve(losses: Sequence[Sequence[float]]) -> list[tuple[int, float]]:
    """Return at most `CURVE_POINTS` pairs of step and loss, the mean over learners and steps."""
    count = max(map(len, losses))
    means = [statistics.fmean(own[i] for own in losses if i < len(own)) for i in range(count)]
    width = math.ceil(count / CURVE_POINTS)
    groups = [means[start : start + width] for start in range(0, count, width)]
    return [(min(count, (i + 1) * width), statistics.fmean(g)) for i, g in enumerate(groups)]


def _append_line(path: Path, row: Row) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def _read_lines(path: Path) -> list[Row]:
    """Return the rows of a file; remove a last line that a killed process left incomplete."""
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8")
    complete = text[: text.rfind("\n") + 1]
    if complete != text:
        path.write_text(complete, encoding="utf-8")
    try:
        return [json.loads(line) for line in complete.splitlines()]
    except ValueError as error:
        raise StorageError(f"{path} is not a file of a study: {error}: delete it") from error


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Keep the program's random numbers and number of threads, which a virtual run changes."""
    threads = torch.get_num_threads()
    try:
        with torch.random.fork_rng():
            torch.set_num_threads(1)
            yield
    finally:
        torch.set_num_threads(threads)
