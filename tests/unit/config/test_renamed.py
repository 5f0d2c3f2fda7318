"""Earlier names of settings are refused with one sentence: the new name, its table and the fix."""

from __future__ import annotations

from functools import reduce
from pathlib import Path
from typing import Any

import pytest

from decoupled_diloco.config import RunConfig, Settings, load_config
from decoupled_diloco.config.renamed import KEYS, LISTS, TABLES, VALUES, override_for
from decoupled_diloco.errors import ConfigError

FILE = "[run]\nmax_steps = 9\n"


def tables_with(dotted: str, value: object) -> dict[str, Any]:
    """The tables of a file that sets one key."""
    *tables, key = dotted.split(".")
    found: dict[str, Any] = {key: value}
    for table in reversed(tables):
        found = {table: found}
    return {**found, "run": {"max_steps": 9, **found.get("run", {})}}


def refusal(dotted: str, value: object) -> str:
    with pytest.raises(ConfigError) as error:
        RunConfig(**tables_with(dotted, value))
    return str(error.value)


def override_refusal(folder: Path, override: str) -> str:
    (folder / "run.toml").write_text(FILE)
    with pytest.raises(ConfigError) as error:
        load_config(folder / "run.toml", [override])
    return str(error.value)


def model_of(table: str) -> type[Settings]:
    """The settings of a table, by its path."""

    def inner(model: type[Settings], name: str) -> type[Settings]:
        annotation: Any = model.model_fields[name].annotation
        candidates = [annotation, *getattr(annotation, "__args__", ())]
        return next(c for c in candidates if isinstance(c, type) and issubclass(c, Settings))

    return reduce(inner, table.split("."), RunConfig)


@pytest.mark.parametrize("old", KEYS)
def test_an_earlier_key_is_rejected_with_the_present_one(old: str) -> None:
    (table, _, key), (new_table, _, new_key) = old.rpartition("."), KEYS[old].rpartition(".")
    text = refusal(old, "a value")
    if KEYS[old] in LISTS:
        expected = f'{key}="a value" in [{table}] is called {new_key}=["a value"] now: change it'
    elif key == new_key:
        expected = f"{key!r} in [{table}] belongs to [{new_table}] now: move it there"
    elif table == new_table:
        expected = f"{key!r} in [{table}] is called {new_key!r} now: rename it"
    else:
        expected = f"{key!r} in [{table}] is called {new_key!r} in [{new_table}] now: move it there"
    assert text == expected


@pytest.mark.parametrize("old", KEYS)
def test_the_present_key_exists_and_the_earlier_one_does_not(old: str) -> None:
    table, _, key = KEYS[old].rpartition(".")
    assert key in model_of(table).model_fields
    table, _, key = old.rpartition(".")
    field = model_of(table).model_fields.get(key)
    assert field is None or KEYS[old].startswith(f"{old}."), "it is a table now"


@pytest.mark.parametrize("old", KEYS)
def test_an_override_of_an_earlier_key_is_rejected_with_the_present_one(
    old: str, tmp_path: Path
) -> None:
    told = "true" if KEYS[old] == "syncer.standby" else "7"
    assert override_refusal(tmp_path, f"{old}=7") == (
        f"override '{old}=7': {old} is called {KEYS[old]} now: write {KEYS[old]}={told}"
    )


INSIDE = [
    (old.rpartition(".")[2], new.rpartition(".")[0], new.rpartition(".")[2])
    for old, new in KEYS.items()
    if old.rpartition(".")[2] != new.rpartition(".")[2] and new not in LISTS
]


@pytest.mark.parametrize(("key", "table", "new_key"), INSIDE)
def test_an_earlier_key_in_its_present_table_is_rejected_with_the_present_one(
    key: str, table: str, new_key: str
) -> None:
    assert refusal(f"{table}.{key}", "a value") == (
        f"{key!r} in [{table}] is called {new_key!r} now: rename it"
    )


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("period", 3, "'period' at the top of the file is called 'sync_every' in [sync] now"),
        ("budget_steps", 5, "'budget_steps' at the top of the file is called 'max_steps' in [run]"),
        ("merge", "mean", "'merge' at the top of the file is called 'rule' in [sync.merge] now"),
        ("sync_every", 3, "'sync_every' at the top of the file belongs to [sync]"),
        ("quorum", 3, "'quorum' at the top of the file belongs to [sync]: move it there"),
    ],
)
def test_a_key_at_the_top_is_rejected_with_its_table(key: str, value: Any, message: str) -> None:
    text = refusal(key, value)
    assert text.startswith(message)
    assert text.endswith(": move it there")


VALUE_CASES = [(key, old) for key, values in VALUES.items() for old in values if type(old) is str]


@pytest.mark.parametrize(("key", "old"), VALUE_CASES)
def test_an_earlier_value_is_rejected_with_the_present_one(key: str, old: str) -> None:
    table, _, name = key.rpartition(".")
    assert refusal(key, old) == (
        f'{name}="{old}" in [{table}] is called {name}="{VALUES[key][old]}" now: change it'
    )


@pytest.mark.parametrize(
    ("dotted", "value", "message"),
    [
        (
            "sync.participants",
            "own",
            'participants="own" in [sync] is called participation="async" now: change it',
        ),
        (
            "sync.apply",
            "at_tau",
            'apply="at_tau" in [sync] is called when="at_overlap" in [sync.apply] now: move it '
            "there",
        ),
        (
            "syncer.standbys",
            1,
            "standbys=1 in [syncer] is called standby=true now: change it",
        ),
        (
            "syncer.standbys",
            2,
            "standbys=2 in [syncer] is called standby=true now: change it",
        ),
    ],
)
def test_an_earlier_key_with_an_earlier_value_is_one_sentence(
    dotted: str, value: object, message: str
) -> None:
    assert refusal(dotted, value) == message


@pytest.mark.parametrize("old", TABLES)
def test_an_earlier_table_is_rejected_with_the_present_one(old: str) -> None:
    assert refusal(f"{old}.setup", ()) == f"[{old}] is called [{TABLES[old]}] now: rename it"


@pytest.mark.parametrize(
    ("override", "present"),
    [
        ("where.engine=slurm", "launch.backend=slurm"),
        ("where.slurm.partition=spot", "launch.slurm.partition=spot"),
        ("where.kubernetes.sources=", "launch.kubernetes.allowed_networks="),
        ("sync.participants=own", "sync.participation=async"),
        ("syncer.standbys=1", "syncer.standby=true"),
        ("syncer.standbys=2", "syncer.standby=true"),
        ("codec.uplink=int4", "sync.codec.uplink=int4"),
        ("codec=int4", "sync.codec.uplink=int4"),
        ("sync.codec_up=int4", "sync.codec.uplink=int4"),
        ("sync.merge.merge=mean", "sync.merge.rule=mean"),
        ("period=3", "sync.sync_every=3"),
        ("run.log=wandb", "'run.trackers=[\"wandb\"]'"),
        ('run.log=["wandb"]', "'run.trackers=[\"wandb\"]'"),
        ('sync.uplink_codecs=["bf16","int4"]', '\'sync.codec.uplink=["bf16", "int4"]\''),
        ("sync.merge=my rule", "'sync.merge.rule=\"my rule\"'"),
        ('codec={uplink="int4"}', "'sync.codec={uplink = \"int4\"}'"),
        ("data.leased=true", "data.elastic=true"),
        ("data.leases=True", "data.elastic=true"),
        ("sync.merge=mean", "sync.merge.rule=mean"),
        ("sync.period=", "sync.sync_every="),
    ],
)
def test_an_override_of_an_earlier_table_is_rejected_with_the_present_one(
    override: str, present: str, tmp_path: Path
) -> None:
    old, new = override.partition("=")[0], present.strip("'").partition("=")[0]
    assert override_refusal(tmp_path, override) == (
        f"override {override!r}: {old} is called {new} now: write {present}"
    )


def test_an_override_of_a_present_table_is_accepted(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(FILE + '[sync.merge]\nrule = "mean"\n')
    whole = load_config(tmp_path / "run.toml", ['sync.late={policy = "drop"}', "sync.merge="])
    assert (whole.sync.late.policy, whole.sync.merge.rule) == ("drop", "rda")
    assert override_for("sync.quorum", 1) is None


def test_an_override_below_an_earlier_key_is_rejected_with_the_present_one(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(FILE + '[sync]\nmerge = "mean"\n')
    with pytest.raises(ConfigError) as error:
        load_config(tmp_path / "run.toml", ["sync.merge.rule=rda"])
    assert str(error.value) == (
        "'merge' in [sync] is called 'rule' in [sync.merge] now: move it there"
    )


@pytest.mark.parametrize(
    ("dotted", "message"),
    [
        ("sync.uplnk", "unknown key 'uplnk' in [sync]: did you mean 'uplink' in [sync.codec]?"),
        ("sync.uplink", "'uplink' in [sync] belongs to [sync.codec]: move it there"),
        ("sync.codec.rule", "'rule' in [sync.codec] belongs to [sync.merge]: move it there"),
        ("sync.late.quorum", "'quorum' in [sync.late] belongs to [sync]: move it there"),
        (
            "sync.codec.sync_every",
            "'sync_every' in [sync.codec] belongs to [sync] or [sync.adapt]: move it there",
        ),
        (
            "sync.codec.uplik",
            "unknown key 'uplik' in [sync.codec]: did you mean 'uplink'?",
        ),
        (
            "sync.late.zzz",
            "unknown key 'zzz' in [sync.late]: choose one of 'policy', 'max_versions', 'discount', "
            "'discount_of'",
        ),
        ("launch.gpus", "'gpus' in [launch] belongs to [launch.learner]: move it there"),
        (
            "launch.slurm.partitoin",
            "unknown key 'partitoin' in [launch.slurm]: did you mean 'partition'?",
        ),
    ],
)
def test_a_wrong_name_finds_its_table(dotted: str, message: str) -> None:
    assert refusal(dotted, "a value") == message
