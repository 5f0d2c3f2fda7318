"""`ddiloco stop URL`: parties that may end the run in order, and others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

import encrypted
from decoupled_diloco.cli.main import app
from decoupled_diloco.config.signing_keys import PublicKey
from decoupled_diloco.errors import AccessError
from decoupled_diloco.run_model import read_run
from process.process_runs import (
    config_of,
    local_run,
    logs,
    records,
    wait,
    when,
)
from replay_check import assert_replays

PARTIES = [
    {"name": name, "learners": [f"learner-{i}"], "key": str(PublicKey(name.encode() * 32))}
    for i, name in enumerate("ab")
]


@pytest.mark.smoke
def test_a_party_that_may_stop_the_run_ends_it_with_a_result(tmp_path: Path) -> None:
    tls = tmp_path / "tls"
    encrypted.made(tls, "learner-0", "learner-1", "a")
    folder = tmp_path / "run"
    parties = [{**PARTIES[0], "may_stop": True}, PARTIES[1]]
    config = config_of(
        folder,
        run={"max_steps": 1_000_000},
        tls=encrypted.tables(tls),
        privacy={"members": parties},
    )

    def stop_as(name: str) -> str:
        files = ("--cert", tls / f"{name}.pem", "--key", tls / f"{name}.key")
        options = ("--ca-cert", tls / "authority.pem", *files)
        done = CliRunner().invoke(app, ["stop", run.addresses[0], *map(str, options)])
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        return done.stdout

    def script() -> Iterator[None]:
        yield from when(lambda: run.global_step > 20)
        with pytest.raises(AccessError, match=r"party 'b' may not stop the run: .* and a: ask"):
            stop_as("learner-1")
        assert "a closing round, then the result" in stop_as("a")
        yield

    with local_run(config) as run:
        run.start()
        outcome = wait(run, script())
    assert outcome.finished, logs(folder)
    assert outcome.reason == "a has stopped the run"
    assert outcome.weights is not None
    assert outcome.weights.exists()
    stops = [r.data["by"] for r in records(folder, "coordinator") if r.type == "StopWanted"]
    assert stops == ["a"]
    assert_replays(folder)
    told = [each.text for each in read_run(folder).remarks]
    closing = [text for text in told if "closing rounds" in text]
    assert len(closing) == 1, told
    assert closing[0].startswith("a has stopped the run at step")
    again = CliRunner().invoke(app, ["train", "--resume", str(folder)])
    assert again.exit_code == 0
    assert "already finished" in again.stdout
