"""A run is copied from a store into a free folder, and a store is checked before a run starts."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

pytest.importorskip("obstore", reason="obstore is not installed: pip install -e '.[store]'")

from decoupled_diloco.config import RunConfig, dump_config
from decoupled_diloco.config.resume import load_resumed
from decoupled_diloco.errors import ConfigError, StorageError
from decoupled_diloco.launch.run_mirror import (
    RESTORING,
    copy_newest_state,
    part_of,
    require_store_usable,
    restored_run,
)
from decoupled_diloco.storage import mirror as mirror_module
from decoupled_diloco.storage.mirror import Mirror, Standing
from decoupled_diloco.storage.object_store import Objects


def config_of(folder: Path, store: str) -> RunConfig:
    return RunConfig(run={"max_steps": 8, "folder": folder, "store": store}, syncer={"port": 0})


@pytest.fixture
def store(tmp_path: Path) -> str:
    """The address of a store with one state of a run."""
    address, run = f"file://{tmp_path}/bucket/x", tmp_path / "run"
    for path in ("tape/shard-0.jsonl", "durable/shard-0/00000001.journal"):
        (run / path).parent.mkdir(parents=True, exist_ok=True)
        (run / path).write_text(path)
    (run / "token").write_text("the secret of the run")
    (run / "run.toml").write_text(dump_config(config_of(run, address)))
    Mirror(run, Objects(address), "x").write()
    return address


def test_a_run_is_copied_with_a_new_token_and_continues_at_its_store(
    store: str, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    folder, settings, state = restored_run(store, [f"run.folder={other}", "run.max_steps=9"])
    assert folder == other
    assert (other / "durable/shard-0/00000001.journal").read_text()
    token = other / "token"
    assert token.stat().st_mode & 0o077 == 0
    assert token.read_text() != "the secret of the run"
    assert not (other / RESTORING).exists()
    config = load_resumed(folder, settings)
    assert (config.run.store, config.run.folder, config.run.max_steps) == (store, other, 9)
    require_store_usable(config, resume=True)
    standing = Standing.read(other)
    assert standing is not None
    assert (standing.number, standing.run) == (state.number, state.run)


def test_the_default_folder_is_that_of_the_settings(store: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        restored_run(store, [])
    assert str(caught.value) == (
        f"the run folder {tmp_path}/run already has this run: continue it there (ddiloco train "
        f"--resume {tmp_path}/run), or copy {store} to another folder with --set run.folder=…"
    )
    assert (tmp_path / "run/token").read_text() == "the secret of the run"


def test_an_interrupted_copy_is_repeated(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, restore_file = [f"run.folder={tmp_path / 'other'}"], mirror_module._restore_file

    def fail_at_the_end(objects: Objects, folder: Path, path: str, file: object) -> None:
        if path == "run.toml":
            raise StorageError("the store is unreachable")
        restore_file(objects, folder, path, file)  # type: ignore[arg-type]

    with monkeypatch.context() as patched:
        patched.setattr(mirror_module, "_restore_file", fail_at_the_end)
        with pytest.raises(StorageError):
            restored_run(store, own)
    assert not (tmp_path / "other/run.toml").exists()
    folder, _, _ = restored_run(store, own)
    assert (folder / "run.toml").is_file()


def test_a_folder_with_other_files_is_not_changed(store: str, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.txt").write_text("mine")
    with pytest.raises(ConfigError, match="is not empty and not a run of ddiloco"):
        restored_run(store, [f"run.folder={tmp_path / 'mine'}"])


def test_a_new_run_does_not_use_a_store_with_a_run(store: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="already has a run, 'x' from"):
        require_store_usable(config_of(tmp_path / "new", store), resume=False)


def test_a_resumed_run_does_not_wait_for_a_store_that_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")  # no process listens there
    config = config_of(tmp_path / "run", "s3://bucket/x")
    with caplog.at_level(logging.WARNING):
        require_store_usable(config, resume=True)
    assert "is unreachable" in caplog.text
    assert "the run continues, and the mirror retries" in caplog.text
    with pytest.raises(StorageError, match="is unreachable"):
        require_store_usable(config, resume=False)


def test_a_standby_copies_a_newer_state_and_keeps_a_present_one(store: str, tmp_path: Path) -> None:
    other = tmp_path / "other"
    old = other / "durable/shard-0/00000009.journal"
    old.parent.mkdir(parents=True)
    old.write_text("of an older state")
    config = config_of(other, store)
    copy_newest_state(config, other)
    assert not old.exists()
    assert (other / "durable/shard-0/00000001.journal").is_file()
    assert not (other / "tape").exists(), "each process has its own tapes"
    old.write_text("newer than the state")
    copy_newest_state(config, other)
    assert old.exists()


@pytest.mark.parametrize(
    ("tapes", "part"),
    [
        (["shard-0", "shard-1"], ""),
        (["shard-0-standby", "shard-1"], ""),
        (["shard-10", "shard-2-standby", "learner-0", "mirror"], "shard-2"),
        (["learner-0"], ""),
    ],
)
def test_a_folder_without_shard_0_is_a_part(tmp_path: Path, tapes: list[str], part: str) -> None:
    (tmp_path / "tape").mkdir()
    for name in tapes:
        (tmp_path / f"tape/{name}.jsonl").write_text("")
    assert part_of(tmp_path) == part


def test_a_part_keeps_its_name_if_a_shard_with_a_lower_number_joins_it(tmp_path: Path) -> None:
    (tmp_path / "tape").mkdir()
    for name in ("shard-1", "shard-2"):
        (tmp_path / f"tape/{name}.jsonl").write_text("")
    Standing("file:///x", "run", 1, "writer", part="shard-2").write(tmp_path)
    assert part_of(tmp_path) == "shard-2"
