"""Missing data are reported before a run starts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from decoupled_diloco.config import RunConfig
from decoupled_diloco.config.run import SiteSettings
from decoupled_diloco.errors import ConfigError
from decoupled_diloco.launch.data_check import require_data
from decoupled_diloco.launch.doctor.examine import Examined, examine
from decoupled_diloco.launch.local import LocalRun
from decoupled_diloco.workloads import load_workload

SMALL = {"corpus_bytes_max": 20_000}


@pytest.fixture(autouse=True)
def patient_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow more time: on a busy machine, the first optimizer's imports may take longer."""
    for name in ("MODEL_SECONDS", "DATA_SECONDS"):
        monkeypatch.setitem(examine.__globals__, name, 60.0)


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("vit", {"batch_size": 1000}, r"batch_size=1000 exceeds the 479 images of partition 0 of 3"),
    ("paced", {**SMALL, "step_seconds": [0.1, 0.2]}, "has 2 numbers, but there are 3 learners"),
    ("gpt", {**SMALL, "context": 8000}, "partition 0 of 3 has 6666 bytes of text, fewer than"),
]


def config_of(folder: Path, name: str, options: dict[str, Any]) -> RunConfig:
    return RunConfig(
        run={"folder": folder, "learners": 3, "max_steps": 8},
        sync={"quorum": 1},
        syncer={"port": 0},
        data={"elastic": False},
        workload={"name": name, "options": options},
    )


@pytest.mark.parametrize(("name", "options", "sentence"), WRONG)
def test_the_launcher_rejects_missing_data_before_it_creates_a_folder(
    tmp_path: Path, name: str, options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        LocalRun(config_of(tmp_path / "run", name, options))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("name", "options", "sentence"), WRONG[:2])
def test_the_doctor_reports_missing_data(
    tmp_path: Path, name: str, options: dict[str, Any], sentence: str
) -> None:
    case = Examined(config_of(tmp_path / "run", name, options), (), None, 0.0)
    (found,) = [each for each in examine(case) if each.check == "data"]
    assert found.level == "error"
    assert sentence.removeprefix("partition 0 of 3 ") in found.text


def test_leased_data_require_only_one_window(tmp_path: Path) -> None:
    """Data that are too few for a fixed partition per learner may be enough for leases."""
    tables = {"run": {"folder": tmp_path / "run", "max_steps": 8}, "syncer": {"port": 0}}
    options = {"corpus_bytes_max": 20_000}
    for context, sentence in ((8000, ""), (30_000, "has 20000 bytes, fewer than context=30000")):
        workload = load_workload("gpt", {**options, "context": context, "batch_size": 1})
        config = RunConfig(**tables, workload={"name": "gpt"})
        if not sentence:
            assert require_data(workload, config) == 8000
            continue
        with pytest.raises(ConfigError, match=sentence):
            require_data(workload, config)


def test_the_doctor_reports_the_size_of_a_batch(tmp_path: Path) -> None:
    case = Examined(config_of(tmp_path / "run", "paced", SMALL), (), None, 0.0)
    (found,) = [each for each in examine(case) if each.check == "data"]
    assert (found.level, found.text) == ("ok", "each learner has batches of 256 tokens")


def test_a_syncer_requires_no_data(tmp_path: Path) -> None:
    """Its machine may not have the data of learners elsewhere."""
    run = LocalRun(config_of(tmp_path / "run", "vit", {"batch_size": 1000}), learners=False)
    run.close()


class Own:
    """A user's workload, with batches only."""

    def __init__(self, batches: Iterator[object]) -> None:
        self._batches = batches

    def batches(self, part: int, parts: int, start: int = 0) -> Iterator[object]:
        return self._batches

    def tokens(self, batch: object) -> int:
        return 1


def test_exceptions_of_user_code_become_one_sentence() -> None:
    def fails() -> Iterator[object]:
        yield open("/none")  # noqa: PTH123, SIM115

    config = config_of(Path("run"), "own:make", {})
    workload: Any = Own(fails())
    with pytest.raises(ConfigError, match=r"'own:make' has no batch for partition 0 of 3: File"):
        require_data(workload, config)
    workload = Own(iter(()))
    with pytest.raises(ConfigError, match=r"for partition 0 of 3: its iterator is empty"):
        require_data(workload, config)
    assert require_data(load_workload("paced", SMALL), config) == 256


def test_a_relay_for_one_learner_is_reported(tmp_path: Path) -> None:
    def found(*sites: dict[str, Any]) -> list[str]:
        config = config_of(tmp_path, "paced", SMALL).model_copy(
            update={"sites": tuple(SiteSettings(**site) for site in sites)}
        )
        case = Examined(config, (), None, time.monotonic())
        return [each.text for each in examine(case) if each.check == "sites"]

    lone = {"name": "site-a", "learners": [0]}
    assert found(lone) == ["a relay for one learner saves no bytes: site-a"]
    assert found({"name": "site-a", "learners": [0, 1]}) == []
    before = {"name": "site-b", "learners": [1, 2], "upstream": "site-a"}
    assert found(lone, before) == [], "its relay also serves those behind it"
