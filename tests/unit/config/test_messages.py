"""Each mistake in a configuration is told in one exact sentence: what, the limit, the way out."""

from __future__ import annotations

from typing import Any

import pytest

from decoupled_diloco.config import RunConfig, SyncSettings
from decoupled_diloco.config.method import public_text, read_public
from decoupled_diloco.errors import ConfigError


def build(**tables: Any) -> RunConfig:
    return RunConfig(**{"run": {"budget_steps": 100}, **tables})


def run(**settings: Any) -> dict[str, Any]:
    return {"run": {"budget_steps": 100, **settings}}


def fault(**settings: Any) -> dict[str, Any]:
    return {"faults": [{"at": 0.5, "kill": "learner-1", **settings}]}


CASES: list[tuple[dict[str, Any], str]] = [
    ({"sync": {"quorom": 1}}, "unknown key 'quorom' in [sync]: did you mean 'quorum'?"),
    ({"synch": {}}, "unknown table 'synch': did you mean 'sync'?"),
    ({"run": "x.toml"}, "run='x.toml' is not a table: write it as one"),
    ({"sync": 3}, "sync=3 is not a table: write it as one"),
    ({"outer": [1]}, "outer=[1] is not a table: write it as one"),
    ({"faults": ["learner-0"]}, "faults='learner-0' is not a table: write it as one"),
    ({"works": 1}, "unknown key 'works': did you mean 'workload'?"),
    (
        {"learner": {"zzz": 1}},
        "unknown key 'zzz' in [learner]: choose one of 'command', 'give_up_seconds', "
        "'checkpoint_every_seconds', 'listen', 'metrics', 'hand_in_seconds', 'threads', 'device', "
        "'precision', 'ranks', 'parallelism', 'carriers'",
    ),
    (
        {"learner": {"ranks": 0}},
        "ranks=0 in [learner] is out of range: it must be at least 1 for each learner",
    ),
    (
        {"learner": {"ranks": [2, "x"]}},
        "ranks='x' in [learner] is not a whole number: write it as one",
    ),
    (
        {"learner": {"ranks": 2, "parallelism": "fdsp"}},
        "parallelism='fdsp' in [learner] is not known: did you mean 'fsdp'?",
    ),
    (
        {"learner": {"ranks": 2, "parallelism": ["fdsp"]}},
        "parallelism='fdsp' in [learner] is not known: did you mean 'fsdp'?",
    ),
    (
        {"learner": {"parallelism": "tp"}},
        "parallelism='tp' in [learner] would be ignored with ranks=1: take parallelism out",
    ),
    (
        {"learner": {"ranks": 2}},
        "ranks=2 in [learner] does not go with leases=true in [data]: leased data are for learners "
        "of one process: set data.leases=false",
    ),
    (
        {"learner": {"ranks": 2, "listen": "10.0.0.1:0"}},
        "listen='10.0.0.1:0' in [learner] does not go with ranks=2: a learner of several ranks "
        "gives its state to nobody: leave listen out",
    ),
    (
        {"learner": {"ranks": [1, 2]}, "data": {"leases": False}},
        "ranks in [learner] lists 2, but learners=4: give one for all, or one for each",
    ),
    (
        {"learner": {"ranks": 2, "parallelism": ["tp"]}, "data": {"leases": False}},
        "parallelism in [learner] lists 1, but learners=4: give one for all, or one for each",
    ),
    (
        {"learner": {"ranks": 2, "parallelism": "plain"}, "data": {"leases": False}},
        "parallelism='plain' in [learner] is for one rank, but learner-0 has ranks=2: choose "
        "'ddp', 'fsdp' or 'tp', or give it one rank",
    ),
    (
        {
            "learner": {"ranks": [2, 2, 2, 1], "parallelism": ["tp", "ddp", "fsdp", "tp"]},
            "data": {"leases": False},
        },
        "parallelism='tp' in [learner] would be ignored for learner-3, which has ranks=1: write "
        "'plain', or give it more ranks",
    ),
    (
        {"learner": {"ranks": 2, "carriers": 3}, "data": {"leases": False}},
        "carriers=3 in [learner] is out of range for learner-0, which has ranks=2: choose 1 to 2, "
        "'hosts' or 'all'",
    ),
    (
        {"run": {}},
        "[run] has no budget, so the run would never end: set budget_steps or budget_tokens",
    ),
    (run(learners=0), "learners=0 in [run] is out of range: it must be at least 1"),
    (run(seed=-1), "seed=-1 in [run] is out of range: it must be at least 0"),
    (run(budget_tokens=0), "budget_tokens=0 in [run] is out of range: it must be at least 1"),
    (run(seed=1.5), "seed=1.5 in [run] is not a whole number: write it as one"),
    (run(seed=True), "seed=True in [run] is not a whole number: write it as one"),
    (run(name=7), "name=7 in [run] is not text in quotes: write it as one"),
    (run(evaluator="yes"), "evaluator='yes' in [run] is not true or false: write it as one"),
    (
        run(evaluator=False, evaluate_every_seconds=5.0),
        "evaluate_every_seconds=5.0 in [run] would be ignored with evaluator=false: "
        "take evaluate_every_seconds out",
    ),
    (
        run(name="a/b"),
        "name='a/b' in [run] has a character that does not fit: "
        "it must match ^[A-Za-z0-9][A-Za-z0-9._-]*$",
    ),
    (
        {"sync": {"quorum": 5}},
        "quorum=5 exceeds learners=4: lower quorum or start more learners",
    ),
    ({"sync": {"fragments": 0}}, "fragments=0 in [sync] is out of range: it must be at least 1"),
    (
        {"sync": {"overlap": 24}},
        "overlap=24 is not below period=24: a fragment would be sent again before its merged value "
        "is due: lower overlap or raise period",
    ),
    (
        {"sync": {"adapt": {}}},
        "[sync.adapt] lacks limits: give period = [least, greatest], overlap, or both",
    ),
    (
        {"sync": {"adapt": {"period": [24]}}},
        "period=[24] in [sync.adapt] is too short: it needs 2 values or more",
    ),
    (
        {"sync": {"adapt": {"period": [48, 24]}}},
        "period=[48, 24] in [sync.adapt] is out of range: give the least, 1 or more, and then the "
        "greatest",
    ),
    (
        {"sync": {"adapt": {"period": [48, 96]}}},
        "period=24 in [sync] is out of range: [sync.adapt] allows 48 to 96, and the run begins "
        "with it",
    ),
    (
        {"sync": {"period": 2, "overlap": 1, "adapt": {"period": [1, 96]}}},
        "overlap=[1, 1] in [sync.adapt] is not below period=[1, 96]: a fragment would be sent "
        "again before its merged value is due: lower the least overlap or raise the least period",
    ),
    (
        {"sync": {"adapt": {"period": [24, 96]}, "wait": "at_overlap"}},
        "[sync.adapt] does not go with wait='at_overlap': who waits has H and τ as they are set; "
        "take one of them out",
    ),
    (
        {"sync": {"fragments": 2, "phases": [0, 1], "adapt": {"period": [24, 96]}}},
        "[sync.adapt] does not go with phases: with another period fragments are spread evenly; "
        "take one of them out",
    ),
    (
        {"sync": {"overlap": 30, "wait": "at_overlap", "apply": "at_tau"}},
        "overlap=30 is not below period=24: a fragment would be sent again before its merged value "
        "is due: lower overlap or raise period",
    ),
    (
        {"sync": {"grace_margin": 1}},
        "grace_margin=1 in [sync] is out of range: it must be less than 1.0",
    ),
    (
        {"sync": {"grace_margin": -0.1}},
        "grace_margin=-0.1 in [sync] is out of range: it must be at least 0.0",
    ),
    (
        {"sync": {"blend_alpha": 0.3}},
        "blend_alpha=0.3 in [sync] would be ignored with alignment='overwrite': "
        "take blend_alpha out",
    ),
    (
        {"sync": {"weighting": "uniform", "missed": "rebase", "counter_cap_periods": 2}},
        "counter_cap_periods=2 in [sync] would be ignored with weighting='uniform' and "
        "missed='rebase': take counter_cap_periods out",
    ),
    (
        {"sync": {"participants": "own", "missed": "rebase"}},
        "grace_margin=0.8 in [sync] does not go with participants='own', which merges each "
        "contribution as it comes: set grace_margin = 0.0",
    ),
    (
        {"sync": {"participants": "own", "grace_margin": 0.0, "quorum": 2}},
        "quorum=2 in [sync] does not go with participants='own', which merges each contribution "
        "as it comes: set quorum = 1",
    ),
    (
        {"sync": {"participants": "own", "grace_margin": 0.0}},
        "missed='overwrite' in [sync] does not go with participants='own', which merges each "
        "contribution as it comes: set missed = 'rebase'",
    ),
    (
        {
            "sync": {
                "participants": "own",
                "grace_margin": 0.0,
                "missed": "rebase",
                "adapt": {"period": [8, 48]},
            }
        },
        "[sync.adapt] does not go with participants='own', which merges each contribution as it "
        "comes: take it out",
    ),
    (
        {"sync": {"merge": "rad"}},
        "merge='rad' in [sync] is not known: did you mean 'rda'? (A custom rule is written as "
        "'module:function'.)",
    ),
    (
        {"sync": {"uplink_codecs": ["int4", "bf16"]}},
        "uplink_codecs in [sync] have int4 (4.125), bf16 (16) bits: put the most exact first, and "
        "each one after it with fewer bits",
    ),
    (
        {"sync": {"uplink_codecs": ["bf16", "int4"], "uplink_codec": "int8"}},
        "uplink_codec='int8' in [sync] would be ignored with uplink_codecs: take uplink_codec out",
    ),
    (
        {"sync": {"feedback_decay": 0.5}},
        "feedback_decay=0.5 in [sync] would be ignored without error feedback: take "
        "feedback_decay out",
    ),
    (
        {"sync": {"uplink_codec": "zip"}},
        "uplink_codec='zip' in [sync]: codec 'zip' is unknown: did you mean 'topk'? "
        "Known are fp32, bf16, int8, int4, fp4-e3m0, int2, topk, topk-<k>. (Name your own as "
        "'module:function', or have a module in run.imports register it.)",
    ),
    (
        {"outer": {"optimizer": "nestrov"}},
        "optimizer='nestrov' in [outer] is not known: did you mean 'nesterov'?",
    ),
    (
        {"outer": {"optimizer": "AdamW", "momentum": 0.9}},
        "momentum=0.9 in [outer] would be ignored with optimizer='AdamW': take momentum out",
    ),
    (
        {"outer": {"options": {"weight_decay": 0.1}}},
        "options={'weight_decay': 0.1} in [outer] would be ignored with optimizer='nesterov': "
        "take options out",
    ),
    ({"outer": {"lr": 0}}, "lr=0 in [outer] is out of range: it must be greater than 0.0"),
    ({"outer": {"momentum": 1}}, "momentum=1 in [outer] is out of range: it must be less than 1.0"),
    (
        {"outer": {"lr": float("nan")}},
        "lr=nan in [outer] is not a finite number: write it as one",
    ),
    (
        {"syncer": {"shards": 25}},
        "shards=25 exceeds fragments=24: a shard would own nothing: "
        "lower shards or raise fragments",
    ),
    (
        {"syncer": {"port": 65536}},
        "port=65536 in [syncer] is out of range: it must be at most 65535",
    ),
    (
        {"syncer": {"port": 65535, "shards": 2}},
        "port=65535 with shards=2 needs ports up to 65536, but 65535 is the last: lower port",
    ),
    (
        {"syncer": {"shards": 2, "addresses": ["http://a:1"]}},
        "addresses has 1 entries, but shards=2: give one address per shard",
    ),
    (
        {"syncer": {"addresses": ["a:1"]}},
        "address 'a:1' in [syncer] is not a URL: "
        "write it as 'http://host:port', for example 'http://a:1'",
    ),
    (
        {"learner": {"give_up_seconds": 0}},
        "give_up_seconds=0 in [learner] is out of range: it must be greater than 0.0",
    ),
    (
        fault(kill="learner-9"),
        "kill='learner-9' in [[faults]] names no learner: did you mean 'learner-3'?",
    ),
    (fault(at=1.5), "at=1.5 in [[faults]] is out of range: it must be less than 1.0"),
    (fault(at=-0.1), "at=-0.1 in [[faults]] is out of range: it must be at least 0.0"),
    ({"faults": [{"at": 0.1}]}, "[[faults]] lacks 'kill': add it"),
    (
        {
            "faults": [
                {"at": 0.7, "kill": "learner-1"},
                {"at": 0.2, "kill": "learner-1", "restart": False},
            ]
        },
        "kill='learner-1' at=0.7 in [[faults]] would be ignored, because it is dead since at=0.2: "
        "set restart=true there or take it out",
    ),
    ({"sync": 3}, "sync=3 is not a table: write it as one"),
    ({"faults": 3}, "faults=3 is not a list: write it as one"),
    (
        {"sync": {"fragment_map": [["a"], ["*"]], "fragments": 3}},
        "fragments=3 in [sync], and fragment_map has 2 lists: take fragments out",
    ),
    ({"sync": {"fragment_map": 3}}, "fragment_map=3 in [sync] is not a list: write it as one"),
    (
        {"sync": {"fragment_map": [["*"]], "partition": "tensor"}},
        "partition='tensor' in [sync] would be ignored with a fragment_map: take partition out",
    ),
    (
        {"sync": {"phases": [1]}},
        "phases in [sync] has 1 entries, but fragments=24: give one for each fragment, or none",
    ),
    (
        {"sync": {"fragments": 1, "phases": [24]}},
        "phases in [sync] has 24, which is out of range: it must be from 0 to period - 1 = 23",
    ),
    (
        {"outer": {"by_fragment": [{"fragments": [99], "lr": 0.1}]}},
        "fragment 99 in [[outer.by_fragment]] is out of range: with fragments=24 it must be from "
        "0 to 23",
    ),
    (
        {"outer": {"by_fragment": [{"fragments": [1], "lr": 0.1}, {"fragments": [1], "lr": 0.2}]}},
        "fragment 1 is in two entries of [[outer.by_fragment]]: take it out of one",
    ),
    (
        {"outer": {"by_fragment": [{"fragments": [1], "lr": -1}]}},
        "lr=-1 in [[outer.by_fragment]] is out of range: it must be greater than 0.0",
    ),
]


@pytest.mark.parametrize(("tables", "sentence"), CASES, ids=[sentence for _, sentence in CASES])
def test_message(tables: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        build(**tables)
    assert str(error.value) == sentence
    assert error.value.__cause__ is None


def test_what_a_fragment_does_not_say_is_as_for_all() -> None:
    config = build(
        outer={
            "lr": 0.5,
            "momentum": 0.25,
            "by_fragment": [
                {"fragments": [1, 2], "lr": 0.1},
                {"fragments": [3], "optimizer": "AdamW", "options": {"weight_decay": 0.5}},
                {"fragments": [4], "optimizer": "sgd"},
            ],
        }
    )
    own = config.outer.of_fragments()
    assert set(own) == {1, 2, 3, 4}
    assert (own[1].optimizer, own[1].lr, own[1].momentum) == ("nesterov", 0.1, 0.25)
    assert (own[3].lr, own[3].momentum, own[3].options) == (0.5, None, {"weight_decay": 0.5})
    assert own[4].momentum == 0, "another optimizer has its own defaults"


@pytest.mark.parametrize("optimizer", ["adam", "LBFGS"])
def test_a_fragment_s_optimizer_is_tried_out(optimizer: str) -> None:
    with pytest.raises(ConfigError, match=rf"^\[outer\] cannot be used: .*'{optimizer}'"):
        build(outer={"by_fragment": [{"fragments": [1], "optimizer": optimizer}]})


def test_a_map_counts_the_fragments() -> None:
    config = build(sync={"fragment_map": [["a"], ["*"]], "phases": [3, 3]})
    assert (config.sync.fragments, config.sync.phases) == (2, (3, 3))
    assert read_public(public_text(config)).sync == config.sync


def test_a_file_without_a_run_table_is_told() -> None:
    with pytest.raises(ConfigError, match=r"^the file lacks 'run': add it$"):
        RunConfig()


def test_all_mistakes_of_a_table_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        SyncSettings(quorom=1, period=0)
    assert str(error.value).splitlines() == [
        "period=0 in [sync] is out of range: it must be at least 1",
        "unknown key 'quorom' in [sync]: did you mean 'quorum'?",
    ]


@pytest.mark.parametrize(
    "tables",
    [
        {"sync": {"period": 1, "overlap": 0, "fragments": 1}},
        {"sync": {"quorum": 4}},
        {"syncer": {"port": 0, "shards": 24}},
        {"syncer": {"port": 65535}},
        {"sync": {"alignment": "blend", "blend_alpha": 0.3}},
        {"outer": {"options": {}}},
        {"faults": [{"at": 0.2, "kill": "learner-1"}, {"at": 0.7, "kill": "learner-1"}]},
    ],
)
def test_the_edge_of_what_is_allowed(tables: dict[str, Any]) -> None:
    build(**tables)
