"""The metrics of a learner in a custom loop are scraped and logged."""

from __future__ import annotations

import logging
import re
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from decoupled_diloco import Learner, Observability
from decoupled_diloco.errors import ConfigError, TransportError
from decoupled_diloco.monitor.metric_table import LEARNER, PROCESS
from integration.real_system import Model, System, scraped

Make = Callable[..., System]


def test_a_learner_is_scraped_and_logged(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    system = make(run={"learners": 1, "max_steps": 1000})
    system.start()
    learner = Learner(
        Model(),
        system.addresses,
        name="mine",
        observability=Observability(
            tracker=f"tensorboard:{tmp_path / 'log'}", metrics_address="127.0.0.1:0"
        ),
    )
    (url,) = re.findall(r"mine: metrics at (\S+)", caplog.text)
    before = scraped(url)
    assert "ddiloco_learner_loss" not in before, "no loss was reported yet"
    for step in range(5):
        assert learner.step(3.0 - step, tokens=8)
    found = scraped(url)
    assert found["ddiloco_learner_steps_total"] == 5
    assert found["ddiloco_learner_tokens_total"] == 40
    assert found["ddiloco_learner_loss"] == -1.0
    assert found["ddiloco_learner_step_overhead_seconds_count"] == 5
    assert found["ddiloco_learner_connected_shards"] == 1
    assert found["ddiloco_learner_sent_bytes_totalcontrol"] > 0
    shown = {name.removesuffix("control").removesuffix("data") for name in found}
    later = {
        "ddiloco_learner_applied_timestamp_seconds",  # once a version is applied
        "ddiloco_certificate_expiry_timestamp_seconds",  # connections are not encrypted
    }
    assert shown | later == {n for each in LEARNER for n in each.series} | set(PROCESS) | later
    learner.close()
    with pytest.raises(OSError):
        scraped(url)

    read = EventAccumulator(str(tmp_path / "log"))
    read.Reload()
    assert next((e.step, e.value) for e in read.Scalars("loss")) == (1, 3.0)
    assert read.Scalars("diloco/tokens")[0].value == 8


def test_a_port_in_use_is_reported_and_leaves_nothing_open(make: Make) -> None:
    system = make(run={"learners": 1})
    system.start()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        reported = Observability(metrics_address=f"127.0.0.1:{port}")
        with pytest.raises(TransportError, match=str(port)):
            Learner(Model(), system.addresses, name="mine", observability=reported)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            {"metrics_address": "9400"},
            "metrics_address='9400' is not a valid address: write 'host:port'",
        ),
        ({"metrics_address": "0.0.0.0:9400"}, "cannot be used without an auth token"),
        ({"tracker": "csv"}, "tracker='csv' is not a valid tracker: write 'tensorboard', 'wandb'"),
    ],
)
def test_invalid_options_are_reported_before_the_join(
    arguments: dict[str, str], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        Learner(
            Model(), "http://127.0.0.1:1", name="mine", observability=Observability(**arguments)
        )
