"""`make gpu` without a GPU: its parts at tiny sizes, and what it makes of what they find."""

from __future__ import annotations

import doctest
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Self

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
CPU = torch.device("cpu")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The script as a module."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    yield __import__("gpu")
    for name in ("gpu", "gpu_parts", "evidence", "runs"):
        sys.modules.pop(name, None)


@pytest.fixture
def parts(gpu: ModuleType) -> ModuleType:
    return sys.modules["gpu_parts"]


class Applying:
    """In the place of a learner: at each step a fragment is applied."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._steps = 0
        self._versions = [0] * 24
        self._callback: Callable[[tuple[str, ...]], None] = lambda names: None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def on_weights_updated(self, callback: Callable[[tuple[str, ...]], None]) -> None:
        self._callback = callback
        callback(("weight",))

    @property
    def versions(self) -> tuple[str, ...]:
        return tuple(map(str, self._versions))

    def step(self, *, tokens: int) -> bool:
        assert tokens
        self._versions[self._steps % 24] += 1
        self._callback((f"{self._steps % 24}.weight",))
        self._steps += 1
        return True


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_in_one_line_and_passes(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu.py"])
    gpu.main()
    assert capsys.readouterr().out == "no CUDA device: nothing to check or to measure\n"


def test_the_doctests(parts: ModuleType) -> None:
    assert doctest.testmod(parts).failed == 0


def test_the_parts_fit_into_ten_minutes(gpu: ModuleType) -> None:
    planned = gpu.parts_for(8)
    assert sum(part.seconds for part in planned) < 0.75 * gpu.TOTAL_SECONDS < 600
    learners = {(part.size, part.dtype) for part in planned if part.is_learner}
    assert learners == {(s, d) for s in ("0.1B", "0.5B", "1.5B") for d in ("bf16", "fp32")}
    assert [part.ranks for part in planned if part.ranks] == [8]
    assert not any(gpu.lacking(part, 80e9, 128e9) for part in planned), "on an H100"
    left_out = {part.name: why for part in planned if (why := gpu.lacking(part, 24e9, 32e9))}
    assert left_out.keys() == {"0.5B, fp32", "1.5B, bf16", "1.5B, fp32"}
    reason = "it needs about 34 GB of device memory, this machine has 24 GB"
    assert left_out["1.5B, bf16"] == reason


def test_a_learner_s_part(
    gpu: ModuleType, parts: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "Learner", Applying)
    part = gpu.Part("tiny, bf16", "learner", 2.0, 10.0, "tiny", "bf16")
    raw = parts.LearnerPart(part, CPU, tmp_path).measure("nowhere")
    raw = json.loads(json.dumps(raw))
    assert gpu.claims_of(part, raw, "cpu") == []
    shown = gpu.summarise(part, raw)
    assert shown["fragments applied while measured"] == len(raw["inside"]) >= 12
    assert 0 < shown["inside step(), ms"]["median"] < shown["step, ms"]
    table = gpu_table({part.name: shown})
    assert table.count("|") == table.splitlines()[0].count("|") * 3


def gpu_table(result: dict[str, Any]) -> str:
    """As the page has it."""
    tables = __import__("result_tables")
    found: str = tables.gpu(result)
    return found


def test_an_unknown_part_is_refused(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--rehearse", "--only", "tests", "trains"])
    with pytest.raises(SystemExit):
        gpu.main()
    assert "--only trains: choose from 'tests', 'paths', 'product'" in capsys.readouterr().err


def test_the_comparison(gpu: ModuleType, parts: ModuleType) -> None:
    raw = parts.comparison(CPU, tiny=True)
    assert raw.keys() == {"data-parallel", "alone", "decoupled"}
    assert all(4 < row["loss"] < 7 for row in raw.values())
    part = gpu.Part("comparison", "comparison", 80.0, 120.0)
    losses = {"data-parallel": 1.4, "decoupled": 1.7, "alone": 1.6}
    found = gpu.claims_of(part, {name: {"loss": loss} for name, loss in losses.items()}, "cuda")
    assert found == ["loss=1.7000 is not below one learner's 1.6000"]
    raw["decoupled"]["loss"] = float("nan")
    assert gpu.claims_of(part, raw, "cuda") == ["the loss of decoupled is not finite"]


GOOD: dict[str, Any] = {
    "attached": [0.1, 0.1, 0.1],
    "detached": [0.1, 0.1, 0.1],
    "inside": [0.001],
    "applied while measured": 3,
    "fragments before": 24,
    "during a sleeping kernel": {
        "steps": [{"seconds": 0.001, "returned before its end": True}],
        "applied": 1,
    },
    "fragment bytes": 10**8,
    "device bytes": [10**9, 12 * 10**8],
    "trace": {
        "kernels": 1.0,
        "copies": 0.1,
        "during kernels": 0.09,
        "from or to pinned memory": 0.1,
        "on a separate stream": 0.1,
    },
}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({}, None),
        ({"attached": [0.1, 0.12, 0.12]}, "83.3 % of the tokens per second"),
        ({"applied while measured": 0}, "no fragment was applied during the measurement"),
        (
            {
                "during a sleeping kernel": {
                    "steps": [{"seconds": 0.1, "returned before its end": False}],
                    "applied": 1,
                }
            },
            "1 of 1 calls of step() waited for earlier work of the device",
        ),
        ({"device bytes": [0, 10**9]}, "1000 MB more device memory, at most 467 MB are claimed"),
        ({"trace": {}}, "the profiler recorded no copies"),
        (
            {"trace": GOOD["trace"] | {"during kernels": 0.04}},
            "40 % of the copies' time is during kernels, but at least 50 % are claimed",
        ),
        (
            {"trace": GOOD["trace"] | {"from or to pinned memory": 0.05}},
            "50 % of the copies' time is from or to pinned memory, but at least 99 % are claimed",
        ),
        (
            {"trace": GOOD["trace"] | {"on a separate stream": 0.0}},
            "0 % of the copies' time is on a separate stream, but at least 99 % are claimed",
        ),
    ],
)
def test_a_claim_that_does_not_hold_is_named(
    gpu: ModuleType, change: dict[str, Any], told: str | None
) -> None:
    found = gpu.claims_of_learner(GOOD | change, True)
    assert len(found) == (told is not None), found
    assert told is None or found[0].startswith(told), found


def test_every_rank_has_to_show_it(gpu: ModuleType) -> None:
    part = gpu.Part("x", "learner", 1.0, 9.0, "tiny", "bf16", 2)
    other = GOOD | {"applied while measured": 0}
    found = gpu.claims_of(part, GOOD | {"other ranks": [GOOD, other]}, "cuda")
    problem = "rank 2: no fragment was applied during the measurement, so it shows nothing"
    assert found == [problem]


def test_a_part_that_fails_or_hangs_is_named_and_the_next_one_runs(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    commands = {
        "fails": [[sys.executable, "-c", "raise SystemExit(3)"], ["sleep", "60"]],
        "hangs": [["sh", "-c", "sleep 60 & wait"]],
        "ends": [["true"]],
    }

    def run(part: Any, limit: float, folder: Path, device: str) -> Any:
        gpu.finished(commands[part.name], limit, folder, as_ranks=part.name == "fails")
        return {}

    monkeypatch.setattr(gpu, "run", run)
    monkeypatch.setattr(gpu, "RESULTS", tmp_path)
    limits = {"fails": 10.0, "hangs": 0.3, "ends": 10.0}
    told = [gpu.Part(name, "tests", 0.1, limit) for name, limit in limits.items()]
    _, result, problems = gpu.run_all([*told, gpu.Part("late", "tests", 900, 900)], "cpu", 60.0)
    assert problems[:2] == [
        "fails: exit codes [3, None]",
        "hangs: it did not end within 0 s",
    ]
    assert problems[2].startswith("late: not measured, ")
    assert len(problems) == 3
    assert result["ends"] == "passed"


def test_what_a_part_fails_of_is_told(gpu: ModuleType, parts: ModuleType, tmp_path: Path) -> None:
    part = gpu.Part("x", "learner", 1.0, 9.0, "unknown", "bf16")
    with pytest.raises(KeyError):
        parts.run_part(part, tmp_path, "cpu", "nowhere")
    with pytest.raises(gpu.Failed, match=re.escape("exit codes [1]: KeyError: 'unknown'")):
        gpu.finished([["false"]], 10.0, tmp_path)
