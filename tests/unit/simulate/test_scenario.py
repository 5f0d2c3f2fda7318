"""Scenario files: their meaning, and one clear sentence for each mistake."""

from __future__ import annotations

from pathlib import Path

import pytest

from decoupled_diloco.config import RunConfig
from decoupled_diloco.errors import ConfigError
from decoupled_diloco_lab import SCENARIOS
from decoupled_diloco_lab.chaos.real import require_real
from decoupled_diloco_lab.simulate.choices import Choices
from decoupled_diloco_lab.simulate.protocol_run import ProtocolRun
from decoupled_diloco_lab.simulate.scenario import Scenario, dump_scenario, load_scenario
from decoupled_diloco_lab.simulate.scenario_file import RUN_TABLES, ScenarioFile
from decoupled_diloco_lab.simulate.simulation import specs_of

RUN = """
[run]
max_steps = 100

[sync]
fragments = 4
sync_every = 4
overlap_steps = 1

[syncer]
shards = 2

[workload]
name = "paced"

[workload.options]
step_seconds = 0.5
"""

GROUPS = """
[[learners]]
name = "europe"
count = 2
link = "cable"

[[learners]]
name = "asia"
step_seconds = 2.0
present = false

[[links]]
name = "cable"
latency_seconds = 0.1
up = "8Mbit/s"
shared = true

[[events]]
at_step = 10
kind = "join"
target = "asia"
"""


def load(folder: Path, text: str, **arguments: object) -> Scenario:
    path = folder / "story.toml"
    path.write_text(text)
    return load_scenario(path, **arguments)  # type: ignore[arg-type]


def event(**keys: object) -> str:
    lines = [f"{key} = {value!r}" for key, value in keys.items()]
    return "\n".join(["\n[[events]]", *lines, ""])


def random(**keys: object) -> str:
    return event(**keys).replace("[[events]]", "[[random]]")


def test_groups_become_the_runs_learners_in_order(tmp_path: Path) -> None:
    scenario = load(tmp_path, RUN + GROUPS)
    assert scenario.config.run.learners == 3
    assert [g.name for g in scenario.members.values()] == ["europe", "europe", "asia"]
    assert list(scenario.members) == ["learner-0", "learner-1", "learner-2"]
    assert scenario.links["cable"].up_bytes_per_second == 1e6
    assert scenario.links["cable"].down_bytes_per_second == float("inf")


def test_the_run_has_the_name_of_the_scenario(tmp_path: Path) -> None:
    run = load(tmp_path, RUN + GROUPS).config.run
    assert (run.name, str(run.folder)) == ("story", "runs/story")
    run = load(tmp_path, 'name = "other"\n' + RUN + GROUPS).config.run
    assert (run.name, str(run.folder)) == ("other", "runs/other")
    run = load(tmp_path, RUN, overrides=["run.folder=here"]).config.run
    assert (run.name, str(run.folder)) == ("story", "here")


def test_without_groups_the_workload_sets_the_pace(tmp_path: Path) -> None:
    scenario = load(tmp_path, RUN.replace("0.5", "[1.0, 2.0, 3.0, 4.0]"))
    assert [g.step_seconds for g in scenario.members.values()] == [1.0, 2.0, 3.0, 4.0]
    scenario = load(tmp_path, RUN)
    assert [g.step_seconds for g in scenario.members.values()] == [0.5] * 4


def test_the_run_may_be_a_file_or_a_shipped_recipe(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(RUN + '\n[[faults]]\nat = 0.5\nkill = "learner-1"\n')
    scenario = load(tmp_path, 'run = "mine.toml"\nset = ["sync.sync_every=8"]\n')
    assert scenario.config.sync.sync_every == 8
    assert [(h.kind, h.at_share, h.for_seconds) for h in scenario.happenings] == [
        ("kill", 0.5, 0.5)
    ]
    recipe = load(tmp_path, 'run = "diloco"\nset = ["run.max_steps=7"]\n')
    assert recipe.config.sync.wait == "at_overlap"
    assert recipe.config.run.max_steps == 7


def test_the_command_line_overrides_the_scenario(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(RUN)
    (tmp_path / "other.toml").write_text(RUN.replace("sync_every = 4", "sync_every = 6"))
    text = 'run = "mine.toml"\nset = ["outer.lr=0.5", "sync.overlap_steps=2"]\nseed = 3\n'
    scenario = load(
        tmp_path, text, run=tmp_path / "other.toml", overrides=["sync.overlap_steps=3"], seed=9
    )
    assert scenario.config.sync.sync_every == 6
    assert scenario.config.outer.lr == 0.5
    assert scenario.config.sync.overlap_steps == 3
    assert (scenario.seed, scenario.config.run.seed) == (9, 9)
    assert load(tmp_path, text).seed == 3


def test_targets_resolve_to_processes(tmp_path: Path) -> None:
    names = ["learner-1", "europe", "cable", "learners", "shard-0", "shard-1", "coordinator"]
    text = RUN + GROUPS + "".join(event(at_seconds=5.0, kind="pause", target=n) for n in names)
    targets = {h.target.name: h.target.processes for h in load(tmp_path, text).happenings[1:]}
    all_learners = ("learner-0", "learner-1", "learner-2")
    assert targets == {
        "learner-1": ("learner-1",),
        "europe": ("learner-0", "learner-1"),
        "cable": ("learner-0", "learner-1"),
        "learners": all_learners,
        "shard-0": ("shard-0", "coordinator"),
        "shard-1": ("shard-1",),
        "coordinator": ("coordinator",),
    }


def test_random_faults_hit_learners_one_by_one_but_a_link_as_a_whole(tmp_path: Path) -> None:
    common = {"mean_seconds_between": 5.0, "repair_seconds": 1.0}
    text = RUN + GROUPS
    text += random(kind="kill", targets=["europe"], **common)
    text += random(kind="cut", targets=["cable"], **common)
    found = [(r.settings.kind, r.target.processes) for r in load(tmp_path, text).recurrences]
    assert found == [
        ("kill", ("learner-0",)),
        ("kill", ("learner-1",)),
        ("cut", ("learner-0", "learner-1")),
    ]


def test_a_dumped_scenario_is_equivalent(tmp_path: Path) -> None:
    text = RUN + GROUPS + event(at_seconds=3.0, kind="slow", target="europe", factor=2.0)
    text += random(
        kind="throttle",
        targets=["cable"],
        mean_seconds_between=9.0,
        repair_seconds=1.0,
        factor=3.0,
    )
    before = load(tmp_path, text, seed=4)
    after = load(tmp_path, dump_scenario(before))
    for part in ("config", "members", "links", "happenings", "recurrences", "seed"):
        assert getattr(after, part) == getattr(before, part), part


@pytest.mark.parametrize("name", sorted(SCENARIOS.files()))
def test_a_shipped_scenario_loads_and_names_its_command(name: str) -> None:
    path = SCENARIOS.files()[name]
    scenario = load_scenario(path)
    assert scenario.config.run.name == name
    assert path.read_text().startswith("# ")
    commands = (f"ddiloco simulate {name}", f"ddiloco chaos {name}")
    assert any(command in path.read_text() for command in commands)
    assert load_scenario(path, seed=5).config.run.seed == 5


def test_all_scenarios_are_shipped() -> None:
    assert set(SCENARIOS.files()) >= {
        "evening-rush",
        "flaky-link",
        "mixed-speeds",
        "phones",
        "region-drops-out",
        "scavenged-second-half",
        "thousands",
    }


KILL = {"kind": "kill", "target": "learner-1"}

MISTAKES = [
    (
        "\n[[event]]\nkind='kill'\n",
        "unknown table 'event': did you mean 'events'?",
    ),
    (
        event(kind="kil", target="learner-1", at_step=5),
        "kind='kil' in [[events]] is not known: did you mean 'kill'?",
    ),
    (
        event(kind="kill", target="learner-7", at_step=5),
        "target='learner-7' of kind='kill' in [[events]] is not a valid target: did you mean "
        "'learner-",
    ),
    (
        event(kind="kill", target="atlantis", at_step=5),
        "is not a valid target: choose one of 'learner-0'",
    ),
    (
        event(**KILL, at_step=5, at_seconds=5.0),
        "kind='kill' target='learner-1' in [[events]] has two starts: set one of at_seconds and "
        "at_step",
    ),
    (event(**KILL), "in [[events]] has no start: set one of at_seconds and at_step"),
    (
        event(**KILL, at_seconds=-1.0),
        "at_seconds=-1.0 in [[events]] is out of range: it must be at least 0",
    ),
    (
        event(**KILL, at_step=5, for_seconds=-2.0),
        "for_seconds=-2.0 in [[events]] is out of range: it must be greater than 0",
    ),
    (
        event(**KILL, at_step=5, for_seconds=2.0, until_step=8),
        "has two ends: set one of for_seconds and until_step",
    ),
    (
        event(**KILL, at_step=5, until_step=5),
        "would end at until_step=5, before it begins at at_step=5: raise until_step",
    ),
    (
        event(**KILL, at_step=100),
        "at_step=100 in [[events]] must be below max_steps=100: lower at_step, or raise max_steps",
    ),
    (
        event(**KILL, at_step=5, factor=2.0),
        "factor=2.0 in [[events]] would be ignored with kind='kill': take factor out",
    ),
    (
        event(kind="slow", target="europe", at_step=5),
        "lacks 'factor': add it, for example factor = 4 for 4 times slower",
    ),
    (
        event(kind="slow", target="shard-0", at_step=5, factor=2.0),
        "is not a learner: use a learner or a group of learners",
    ),
    (
        event(kind="throttle", target="asia", at_step=5, factor=2.0),
        "has no bandwidth limit: set link for its learners to an entry of [[links]] with up or "
        "down",
    ),
    (
        event(kind="break", target="asia", at_step=5, for_seconds=2.0),
        "for_seconds=2.0 in [[events]] would be ignored with kind='break'",
    ),
    (
        event(kind="join", target="learner-0", at_step=5),
        "kind='join' of learner-0 in [[events]] would be ignored, because it is present already: "
        "set present=false in its group of [[learners]], or let it leave before",
    ),
    (
        event(kind="leave", target="asia", at_step=5),
        "kind='leave' of learner-2 at 5 in [[events]] would be ignored, because it is not present "
        "then: let it join before",
    ),
    (
        event(kind="leave", target="europe", at_step=5)
        + event(kind="kill", target="learner-0", at_step=9),
        "kind='kill' of learner-0 at 9 in [[events]] would be ignored",
    ),
    (
        "\n[[learners]]\npresent = false\n",
        "learner-3 is not present at the start and never joins: add an event with kind='join' for "
        "it to [[events]]",
    ),
    (
        '\n[[learners]]\nlink = "cabel"\n',
        "link='cabel' in [[learners]] is not a valid link: did you mean 'cable'?",
    ),
    ("\n[[learners]]\ncount = 0\n", "count=0 in [[learners]] is out of range"),
    ("\n[[learners]]\nspeed = 2\n", "unknown key 'speed' in [[learners]]"),
    (
        '\n[[learners]]\nname = "cable"\n',
        "two [[learners]] or [[links]] have the name 'cable': rename one of them",
    ),
    (
        '\n[[learners]]\nname = "learner-0"\n',
        "the name 'learner-0' is reserved: choose another",
    ),
    (
        '\n[[links]]\nname = "x"\nup = "10Mb"\n',
        "in [[links]], '10Mb' is not a valid bandwidth: write a number above 0 and a unit, such as "
        "'10Mbit/s' or '1.5 MB/s'",
    ),
    (
        '\n[[links]]\nname = "x"\nshared = true\n',
        "shared=True in [[links]] would be ignored without up and down",
    ),
    (
        random(kind="kill", targets=["nobody"], mean_seconds_between=1.0, repair_seconds=1.0),
        "'nobody' in targets of kind='kill' in [[random]] is not a valid target",
    ),
    (
        random(kind="join", targets=["asia"], mean_seconds_between=1.0, repair_seconds=1.0),
        "kind='join' in [[random]] is not known",
    ),
    (
        random(kind="kill", targets=["europe"], mean_seconds_between=1.0),
        "in [[random]] lacks 'repair_seconds': add its mean duration",
    ),
]


@pytest.mark.parametrize(("text", "message"), MISTAKES)
def test_each_mistake_has_a_one_line_error(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, RUN + GROUPS + text)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_unknown_presence_is_not_rejected(tmp_path: Path) -> None:
    """An event that ends on the other scale leaves it open whether the learner is present."""
    leave = event(kind="leave", target="europe", at_seconds=5.0, until_step=50)
    again = event(kind="leave", target="europe", at_seconds=90.0)
    assert len(load(tmp_path, RUN + GROUPS + leave + again).happenings) == 3
    back = event(kind="leave", target="europe", at_seconds=5.0, for_seconds=10.0)
    assert len(load(tmp_path, RUN + GROUPS + back + again).happenings) == 3


WHOLE_MISTAKES = [
    ("seed = 1\n", "names no run: pass one on the command line"),
    ("run = 3\n", "run=3 is neither a quoted path nor a table"),
    ('run = "none.toml"\n', "none.toml does not exist"),
    ('run = "nonesuch"\n', "'nonesuch' is neither a file nor a shipped recipe"),
    ('run = "diloco"\n[sync]\nsync_every = 3\n', "[sync] with run='diloco' would be ignored"),
    ('set = ["a.b=1"]\n' + RUN, "set cannot be combined with a [run] table"),
    (
        RUN.replace("[run]", "[run]\nlearners = 5") + GROUPS,
        "run.learners=5, but the [[learners]] of the scenario add up to 3: remove run.learners",
    ),
    (
        "until_seconds = 9.0\n" + RUN + GROUPS + event(**KILL, at_seconds=9.0),
        "at_seconds=9 in [[events]] must be below until_seconds=9: lower at_seconds, or raise "
        "until_seconds",
    ),
    (
        RUN.replace("step_seconds = 0.5", "step_seconds = [0.5]"),
        "step_seconds in [workload.options] has 1 entries for 4 learners",
    ),
]


@pytest.mark.parametrize(("text", "message"), WHOLE_MISTAKES)
def test_a_file_that_is_not_a_valid_scenario(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    assert message in str(caught.value)


def test_a_missing_scenario_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="pass the path of a scenario's TOML file"):
        load_scenario(tmp_path / "none.toml")


def test_targets_may_be_all_shards_and_the_evaluator(tmp_path: Path) -> None:
    names = ["shards", "evaluator"]
    text = RUN + "".join(event(at_seconds=5.0, kind="kill", target=n) for n in names)
    targets = [h.target for h in load(tmp_path, text).happenings]
    assert targets[0].members == (("shard-0", "coordinator"), ("shard-1",))
    assert targets[1].members == (("evaluator",),)
    with pytest.raises(ConfigError, match="is not a valid target"):
        load(tmp_path, text.replace("[run]", "[run]\nevaluator = false"))


@pytest.mark.parametrize(
    ("choose", "count"), [("one", 1), ("minority", 1), ("majority", 3), ("all", 4)]
)
def test_a_random_choice_hits_the_right_number_of_a_group(
    tmp_path: Path, choose: str, count: int
) -> None:
    text = RUN + event(at_seconds=5.0, kind="kill", target="learners", choose=choose)
    (happening,) = load(tmp_path, text).happenings
    struck = {happening.target.some(happening.choose, Choices(seed)) for seed in range(50)}
    assert {len(target.processes) for target in struck} == {count}
    assert len(struck) == (1 if count == 4 else 4)
    chosen = [target.processes for target in struck]
    assert all(list(names) == sorted(names) for names in chosen), "in the order of the group"


def test_shard_0_and_the_coordinator_are_chosen_together(tmp_path: Path) -> None:
    text = RUN + event(at_seconds=5.0, kind="kill", target="shards", choose="one")
    (happening,) = load(tmp_path, text).happenings
    struck = {happening.target.some("one", Choices(seed)).processes for seed in range(30)}
    assert struck == {("shard-0", "coordinator"), ("shard-1",)}


def test_a_group_may_fail_together_at_random(tmp_path: Path) -> None:
    common = {"kind": "kill", "mean_seconds_between": 5.0, "repair_seconds": 1.0}
    text = RUN + random(targets=["learners"], choose="majority", **common)
    (recurrence,) = load(tmp_path, text).recurrences
    choices = recurrence.choices(7)
    at, over_at, happening = recurrence.next(choices, 100.0) or (0.0, 0.0, None)
    assert 100.0 < at < over_at
    assert happening is not None
    assert len(happening.target.processes) == 3
    again = recurrence.next(recurrence.choices(7), 100.0)
    assert again == (at, over_at, happening), "the seed determines it"


def test_repairs_may_be_heavy_tailed(tmp_path: Path) -> None:
    common = {"kind": "kill", "mean_seconds_between": 5.0, "repair_seconds": 2.0}
    text = RUN + random(targets=["shards"], repair="exponentiated-weibull", **common)
    with pytest.raises(ConfigError, match="lacks 'repair_shapes'"):
        load(tmp_path, text)
    for recurrence in load(tmp_path, text + "repair_shapes = [2.0, 0.5]").recurrences:
        upcoming = recurrence.next(recurrence.choices(1), 0.0)
        assert upcoming is not None
        assert upcoming[2].for_seconds == upcoming[1] - upcoming[0] > 0


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"kind": "loss"},
            "lacks 'share': add it, for example share = 0.01 for 1 % of the link's traffic",
        ),
        ({"kind": "delay"}, "lacks 'delay_seconds'"),
        ({"kind": "clock-jump"}, "lacks 'jump_seconds'"),
        ({"kind": "kill", "share": 0.5}, "share=0.5 in .* would be ignored with kind='kill'"),
        ({"kind": "pause", "direction": "up"}, "would be ignored with kind='pause'"),
        ({"kind": "restart", "for_seconds": 3.0}, "would be ignored with kind='restart'"),
        ({"kind": "disk-full"}, "has no separate disk: use a shard"),
        ({"kind": "loss", "share": 0.1, "target": "shard-0"}, "is not a learner"),
    ],
)
def test_each_kind_has_its_own_keys(tmp_path: Path, keys: dict[str, object], message: str) -> None:
    keys = {"target": "learner-0", "at_seconds": 5.0, **keys}
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, RUN + event(**keys))


def test_every_kind_survives_a_dump_and_a_load(tmp_path: Path) -> None:
    text = RUN + "".join(
        event(at_seconds=5.0, target="learner-1", **keys)
        for keys in (
            {"kind": "restart"},
            {"kind": "loss", "share": 0.1, "for_seconds": 3.0},
            {"kind": "cut", "direction": "up"},
            {"kind": "clock-jump", "jump_seconds": 9.0},
        )
    )
    text += random(kind="break", targets=["learners"], mean_seconds_between=5.0)
    first = load(tmp_path, text)
    assert load(tmp_path, dump_scenario(first)).happenings == first.happenings


def test_a_standby_may_be_a_target_where_one_exists(tmp_path: Path) -> None:
    text = RUN + event(at_seconds=5.0, kind="kill", target="shard-1-standby")
    with pytest.raises(ConfigError, match="is not a valid target"):
        load(tmp_path, text)
    scenario = load(tmp_path, text, overrides=["syncer.standby=true"])
    assert scenario.happenings[0].target.processes == ("shard-1-standby",)


def test_a_random_choice_may_hit_a_learner_that_is_absent(tmp_path: Path) -> None:
    kill = {"kind": "kill", "target": "learners", "for_seconds": 9.0}
    text = RUN + "".join(event(at_seconds=at, choose="one", **kill) for at in (5.0, 6.0))
    assert len(load(tmp_path, text).happenings) == 2
    with pytest.raises(ConfigError, match="it is not present then"):
        load(tmp_path, text.replace("choose = 'one'\n", ""))


def test_a_scenario_may_contain_every_table_of_a_run() -> None:
    tables = {field.alias or name for name, field in RunConfig.model_fields.items()}
    assert tables <= set(RUN_TABLES) <= set(ScenarioFile.model_fields)


DEVICES = "\n[devices]\nonline = 0.05\n"
VISITS = """
[sync]
fragments = 1
participation = "async"
grace_margin = 0.0

[sync.apply]
missed = "rebase"

[sync.devices]

[data]
elastic = false
"""


def devices(lines: str = "", budget: str = "max_tokens = 1000", visits: str = VISITS) -> str:
    return f'[run]\n{budget}\n{visits}\n[workload]\nname = "paced"\n{DEVICES}{lines}'


def test_each_device_draws_the_rate_of_its_link(tmp_path: Path) -> None:
    text = devices('link = ["1Mbit/s", "50Mbit/s"]\n[[learners]]\ncount = 200\n')
    rates = [each.up_bytes_per_second for each in specs_of(load(tmp_path, text))]
    assert rates == [each.down_bytes_per_second for each in specs_of(load(tmp_path, text))]
    assert 125e3 <= min(rates) < 200e3
    assert 4e6 < max(rates) <= 6.25e6
    assert sorted(rates)[100] == pytest.approx(125e3 * 50**0.5, rel=0.2), "log-uniform"
    other = specs_of(load(tmp_path, text, seed=1))
    assert [each.up_bytes_per_second for each in other] != rates


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (devices("steps = 0"), "steps=0 in [devices] is out of range: it must be at least 1"),
        (
            devices().replace("0.05", "0.0"),
            "online=0.0 in [devices] is out of range: it must be greater than 0",
        ),
        (
            devices('link = ["2Mbit/s", "1Mbit/s"]'),
            "link=['2Mbit/s', '1Mbit/s'] in [devices] is not a range: write the lower bandwidth "
            "first",
        ),
        (devices('link = ["1Mbit/s", "fast"]'), "in [devices], 'fast' is not a valid bandwidth"),
        (
            devices(visits=""),
            "the scenario has [devices], but its run has no [sync.devices], so contributions from "
            "older versions would be lost: add [sync.devices] to the run, or remove [devices]",
        ),
        (
            devices(budget="max_steps = 100"),
            "max_steps=100 cannot be combined with [devices], because devices have no common step: "
            "set max_tokens instead",
        ),
        (
            devices(
                'link = ["1Mbit/s", "2Mbit/s"]\n[[learners]]\nlink = "dsl"\n[[links]]\n'
                'name = "dsl"\nup = "1Mbit/s"\n'
            ),
            "up and down of the link 'dsl' would be ignored, because [devices] has link: remove "
            "one of them",
        ),
        (
            devices(event(kind="kill", target="learner-0", at_seconds=5.0)),
            "[devices] cannot be combined with [[events]], [[random]] or [[faults]]",
        ),
    ],
)
def test_mistakes_in_devices(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_devices_are_simulated_with_tensors_only(tmp_path: Path) -> None:
    scenario = load(tmp_path, devices())
    with pytest.raises(ConfigError, match="would be ignored with --protocol-only"):
        ProtocolRun(scenario)
    with pytest.raises(ConfigError, match="would be ignored by real processes"):
        require_real(scenario)
