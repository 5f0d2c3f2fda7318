"""Reading, overriding and writing a run's TOML file."""

from __future__ import annotations

import re
import tomllib
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from decoupled_diloco.config import RunConfig, Settings, dump_config, load_config
from decoupled_diloco.config.method import (
    options_of,
    plan_of,
    public_text,
    read_public,
    read_settings,
)
from decoupled_diloco.config.toml_files import RECIPES
from decoupled_diloco.errors import ConfigError
from decoupled_diloco.merge import layout_of
from decoupled_diloco.merge.codec import RawCodec, _codecs

MINIMAL = "[run]\nmax_steps = 100\n"


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(MINIMAL)
    return path


def test_defaults_are_the_papers_values_if_published(toml: Path) -> None:
    sync = load_config(toml).sync
    assert (sync.fragments, sync.sync_every, sync.overlap_steps, sync.quorum) == (24, 24, 2, 1)
    assert (sync.participation, sync.wait, sync.merge.rule) == ("active", "never", "rda")
    apply = sync.apply
    assert (apply.when, apply.alignment, apply.missed) == ("on_arrival", "overwrite", "overwrite")


@pytest.mark.parametrize(
    ("override", "table", "key", "value"),
    [
        ("sync.quorum=2", "sync", "quorum", 2),
        ("outer.lr=1", "outer", "lr", 1.0),
        ("sync.merge.rule=mean", "sync.merge", "rule", "mean"),
        ('sync.merge.rule="mean"', "sync.merge", "rule", "mean"),
        ("run.evaluator = false", "run", "evaluator", False),
        ("workload.options.batch_size=3", "workload", "options", {"batch_size": 3}),
        (
            "sync.initial_weights=a/b.safetensors",
            "sync",
            "initial_weights",
            Path("a/b.safetensors"),
        ),
        ('syncer.addresses=["http://a:1"]', "syncer", "addresses", ("http://a:1",)),
    ],
)
def test_overrides_are_toml_values_or_bare_text(
    toml: Path, override: str, table: str, key: str, value: object
) -> None:
    assert attrgetter(f"{table}.{key}")(load_config(toml, [override])) == value


def test_the_last_override_wins(toml: Path) -> None:
    assert load_config(toml, ["run.seed=1", "run.seed=2"]).run.seed == 2


def test_an_empty_override_removes_the_key(toml: Path) -> None:
    config = load_config(toml, ["run.max_steps=", "run.max_tokens=1_000"])
    assert (config.run.max_steps, config.run.max_tokens) == (None, 1000)


def test_the_folder_follows_the_name(toml: Path) -> None:
    assert load_config(toml, ["run.name=a"]).run.folder == Path("runs/a")
    assert load_config(toml, ["run.name=a", "run.folder=b"]).run.folder == Path("b")


@pytest.mark.parametrize(
    ("optimizer", "momentum"), [("nesterov", 0.5), ("sgd", 0.0), ("AdamW", None)]
)
def test_momentum_has_the_optimizers_default(
    toml: Path, optimizer: str, momentum: float | None
) -> None:
    assert load_config(toml, [f"outer.optimizer={optimizer}"]).outer.momentum == momentum


@pytest.mark.parametrize("override", ["", "=1", "run", "run.=1", ".x=1"])
def test_malformed_overrides_are_reported(toml: Path, override: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(toml, [override])
    assert str(error.value) == f"override {override!r} is not of the form table.key=value"


def test_an_override_below_a_value_is_reported(toml: Path) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(toml, ["run.max_steps.x=1"])
    assert str(error.value) == (
        "override 'run.max_steps.x=1' does not fit: run.max_steps is not a table"
    )


def test_a_missing_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no\.toml does not exist: pass the path"):
        load_config(tmp_path / "no.toml")


def test_a_path_with_the_character_nul_is_reported() -> None:
    with pytest.raises(ConfigError, match="is not a path: take the character NUL out"):
        load_config("a\0b.toml")


def test_a_folder_is_reported(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"is a folder: pass the path of a TOML file, such as .*run\.toml"
    ):
        load_config(tmp_path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"[run", "not valid TOML: "),
        (b"[run]\n\xff", "is not UTF-8 text: save it as UTF-8, because byte 7 does not fit"),
        (b"\xef\xbb\xbf[run]", "begins with a byte order mark: save it as UTF-8 without"),
        ("[run]".encode("utf-16"), "is UTF-16 text: save it as UTF-8 without"),
        (b"", "is empty: write the settings of a run, at least "),
    ],
)
def test_a_broken_file_is_reported(toml: Path, content: bytes, words: str) -> None:
    toml.write_bytes(content)
    with pytest.raises(ConfigError, match=words):
        load_config(toml)


FULL = """
[run]
name = "full"
folder = "elsewhere"
seed = 7
learners = 3
max_steps = 10
max_tokens = 20
evaluator = false
[sync]
initial_weights = "w.safetensors"
[sync.apply]
alignment = "blend"
blend_alpha = 0.25
[sync.merge]
weighting = "uniform"
[outer]
optimizer = "AdamW"
options = { betas = [0.9, 0.99], weight_decay = 0.0 }
[syncer]
shards = 2
addresses = ["http://a:1", "https://b:2"]
token_file = "secret"
[learner]
disconnect_seconds = 3.5
[workload]
name = "my:own"
options = { nested = { deep = [1, 2.5, "x", true] } }
[[faults]]
at = 0.5
kill = "learner-2"
restart = false
[[faults]]
at = 0
kill = "learner-0"
"""


@pytest.mark.parametrize("content", [MINIMAL, FULL])
def test_a_dumped_configuration_loads_as_the_same_one(toml: Path, content: str) -> None:
    toml.write_text(content)
    config = load_config(toml)
    toml.write_text(dump_config(config))
    assert load_config(toml) == config
    assert load_config(toml).public() == config.public()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_valid_configuration_survives_the_round_trip(data: st.DataObject) -> None:
    draw = data.draw
    learners, fragments = draw(st.integers(1, 16)), draw(st.integers(1, 64))
    period = draw(st.integers(1, 500))
    alignment = draw(st.sampled_from(["overwrite", "carry", "blend"]))
    apply: dict[str, object] = {"alignment": alignment}
    if alignment == "blend":
        apply["blend_alpha"] = draw(st.floats(0, 1))
    sync: dict[str, object] = {
        "fragments": fragments,
        "sync_every": period,
        "overlap_steps": draw(st.integers(0, period - 1)),
        "quorum": draw(st.integers(1, learners)),
        "grace_margin": draw(st.floats(0, 1, exclude_max=True)),
        "apply": apply,
        "wait": draw(st.sampled_from(["never", "at_overlap"])),
        "merge": {"weighting": draw(st.sampled_from(["tokens", "uniform"]))},
    }
    config = RunConfig(
        run={
            "name": draw(st.from_regex(r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,20}\Z")),
            "learners": learners,
            "max_steps": draw(st.integers(1, 10**9)),
            "evaluator": draw(st.booleans()),
        },
        sync=sync,
        outer={
            "optimizer": draw(st.sampled_from(["nesterov", "sgd", "Adam"])),
            "lr": draw(st.floats(1e-9, 1e9)),
        },
        syncer={"shards": draw(st.integers(1, min(fragments, 100)))},
        faults=[
            {"at": draw(st.floats(0, 1, exclude_max=True)), "kill": f"learner-{index}"}
            for index in range(draw(st.integers(0, learners)))
        ],
    )
    assert RunConfig(**tomllib.loads(dump_config(config))) == config


def test_public_settings_contain_what_learners_must_agree_on(toml: Path) -> None:
    config = load_config(toml)
    public = config.public()
    assert public["sync"]["quorum"] == 1
    assert public["workload"] == {"name": "gpt", "options": {"seed": 0, "total_steps": 100}}
    for mine in ["syncer.port=1", "run.folder=x", "run.evaluator=false", "learner.threads=2"]:
        assert load_config(toml, [mine]).public() == public
    for shared in ["sync.sync_every=25", "run.seed=1", "outer.lr=1", "workload.options.layers=1"]:
        assert load_config(toml, [shared]).public() != public


@pytest.mark.parametrize("own", [[], ["sync.apply.alignment=blend", "outer.optimizer=AdamW"]])
def test_public_settings_are_read_back_into_the_same_model(toml: Path, own: list[str]) -> None:
    config = load_config(toml, [*own, "syncer.shards=3", "sync.initial_weights=w", "run.seed=9"])
    theirs = read_public(public_text(config))
    assert theirs.public() == config.public()
    assert theirs.outer == config.outer
    assert theirs.sync.initial_weights is None
    assert options_of(theirs) == options_of(config)


def test_settings_on_a_tape_of_an_earlier_version_are_read(toml: Path) -> None:
    public = load_config(toml, ["sync.sync_every=48"]).public()
    del public["sync"]["late"], public["data"]
    assert read_settings({**public, "digest": "abc"}).sync.sync_every == 48


def test_the_workload_gets_seed_and_schedule_length_from_the_run(toml: Path) -> None:
    assert load_config(toml).workload_options() == {"seed": 0, "total_steps": 100}
    own = load_config(toml, ["workload.options.total_steps=7", "run.seed=3"])
    assert own.workload_options() == {"seed": 3, "total_steps": 7}
    tokens = load_config(toml, ["run.max_steps=", "run.max_tokens=5"])
    assert tokens.workload_options() == {"seed": 0}


def test_settings_are_frozen(toml: Path) -> None:
    with pytest.raises(Exception, match="frozen"):
        load_config(toml).run.seed = 1  # type: ignore[misc]


def test_every_setting_is_documented() -> None:
    from decoupled_diloco.workloads.paced import PacedOptions

    def check(model: type[Settings]) -> None:
        for name, field in model.model_fields.items():
            assert field.description, f"{model.__name__}.{name}"
            if isinstance(field.annotation, type) and issubclass(field.annotation, Settings):
                check(field.annotation)

    check(RunConfig)
    check(PacedOptions)


def test_a_registered_codec_can_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    sync = {"codec": {"uplink": "half"}, "fragments": 1, "sync_every": 4}
    tables: Any = {"run": {"max_steps": 1}, "sync": sync}
    with pytest.raises(ConfigError, match="codec 'half' is unknown: did you mean"):
        RunConfig(**tables)
    monkeypatch.setitem(_codecs, "half", RawCodec("half", torch.float16))
    config = RunConfig(**tables)
    assert config.sync.codec.uplink == "half"
    plan = plan_of(layout_of(torch.nn.Linear(8, 8)), read_public(public_text(config)))
    assert plan.uplink.name == "half"


@pytest.mark.parametrize(
    "text",
    [
        'run = "quickstart"\n',
        MINIMAL + "[[learners]]\ncount = 2\n",
        'name = "a"\nseed = 1\n[run]\n',
    ],
)
def test_a_scenario_is_distinguished_from_a_run(toml: Path, text: str) -> None:
    toml.write_text(text)
    with pytest.raises(ConfigError, match=f"is a scenario, not a run: ddiloco simulate {toml}"):
        load_config(toml)


def test_a_run_that_is_not_a_table_is_reported_before_overrides(toml: Path) -> None:
    toml.write_text("run = 3\n")
    with pytest.raises(ConfigError, match=r"run=3 in .* is not a table: write it as one"):
        load_config(toml, ["run.seed=1"])


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"optimizer": "adamw"}, "'adamw' is unknown: did you mean 'AdamW'?"),
        (
            {"optimizer": "AdamW", "options": {"weight_decoy": 0.1}},
            "'AdamW' does not take weight_decoy: remove it",
        ),
        ({"optimizer": "LBFGS"}, "'LBFGS' cannot step on a flat vector"),
    ],
)
def test_a_torch_optimizer_is_tried_before_the_run_starts(
    settings: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError) as error:
        RunConfig(run={"max_steps": 1}, outer=settings)
    assert str(error.value).startswith(f"[outer] cannot be used: outer optimizer {sentence}")


@pytest.mark.parametrize(
    ("name", "meant"),
    [("quickstrt", "quickstart"), ("Quickstart", "quickstart"), ("home_lab", "homelab")],
)
def test_a_misspelt_recipe_is_refused_with_the_one_that_was_meant(name: str, meant: str) -> None:
    with pytest.raises(ConfigError) as error:
        RECIPES.find(name)
    assert str(error.value) == (
        f"{name!r} is neither a file nor a shipped recipe: did you mean {meant!r}?"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[learners]\ncount = 2\n", "unknown table 'learners': did you mean 'learner'?"),
        ("[[learners]]\ncount = 2\n", "is a scenario, not a run"),
    ],
)
def test_a_table_named_learners_is_not_the_list_of_a_scenario(
    text: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / "run.toml").write_text("[run]\nmax_steps = 9\n" + text)
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_config(tmp_path / "run.toml")
