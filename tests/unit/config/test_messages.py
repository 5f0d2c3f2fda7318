"""Each mistake in a configuration is one exact sentence: the value, the limit and the fix."""

from __future__ import annotations

from typing import Any

import pytest

from decoupled_diloco.config import RunConfig, SyncSettings
from decoupled_diloco.config.method import public_text, read_public
from decoupled_diloco.errors import ConfigError


def build(**tables: Any) -> RunConfig:
    return RunConfig(**{"run": {"max_steps": 100}, **tables})


def run(**settings: Any) -> dict[str, Any]:
    return {"run": {"max_steps": 100, **settings}}


def fault(**settings: Any) -> dict[str, Any]:
    return {"faults": [{"at": 0.5, "kill": "learner-1", **settings}]}


ASYNC = {"participation": "async", "grace_margin": 0.0, "apply": {"missed": "rebase"}}


def sites(*entries: dict[str, Any]) -> dict[str, Any]:
    """Return a run of four learners with these sites."""
    return {"run": {"max_steps": 100, "learners": 4}, "sites": list(entries)}


CASES: list[tuple[dict[str, Any], str]] = [
    (
        {"sync": {"moments": {"every": 0}}},
        "every=0 in [sync.moments] is out of range: it must be at least 1",
    ),
    (
        {"sync": {"moments": {"codec": "int4"}}},
        "codec='int4' in [sync.moments] cannot be combined with 'exp_avg_sq' in names, because a "
        "divisor that is rounded to 0 makes a step far too long: set codec='bf16', or "
        "names=['exp_avg|momentum_buffer']",
    ),
    (
        {"sync": {"moments": {"names": ["exp_avg|"]}}},
        "names has 'exp_avg|' in [sync.moments], which is not a valid key of a state: write keys, "
        "separated by '|'",
    ),
    (
        {"sync": {"moments": {}}, "learner": {"ranks": 2}},
        "ranks=2 of learner-0 in [learner] cannot be combined with [sync.moments], which needs "
        "learners with one rank: set ranks=1, or take [sync.moments] out",
    ),
    (
        {"sync": {"moments": {}}, "privacy": {"secure_sums": True}},
        "[sync.moments] cannot be combined with secure_sums=true in [privacy], because moments "
        "have no bound for its fixed point: take one of them out",
    ),
    ({"sync": {"quorom": 1}}, "unknown key 'quorom' in [sync]: did you mean 'quorum'?"),
    (
        sites({"name": "a", "learners": []}),
        "learners=[] in [[sites]] must list at least one learner, each once: for example "
        "learners = [0, 1]",
    ),
    (
        sites({"name": "a", "learners": [4]}),
        "learner 4 of site 'a' in [[sites]] is out of range: with learners=4 in [run] it must be "
        "from 0 to 3",
    ),
    (
        sites({"name": "a", "learners": [0, 1]}, {"name": "b", "learners": [1]}),
        "learner 1 is at site 'a' and at site 'b' in [[sites]]: list it once",
    ),
    (
        sites({"name": "a", "learners": [0]}, {"name": "a", "learners": [1]}),
        "name='a' occurs twice in [[sites]]: give each site its own name",
    ),
    (
        sites({"name": "a", "learners": [0], "upstream": "b"}, {"name": "b", "learners": [1]}),
        "upstream='b' of site 'a' in [[sites]] names no site above it: list that site first, or "
        "leave upstream out to dial the shards",
    ),
    (
        {**sites({"name": "a", "learners": [0]}), "sync": {"merge": {"rule": "median"}}},
        "rule='median' in [sync.merge] cannot be combined with [[sites]], because a relay sends "
        "sums and not single contributions: choose 'rda' or 'mean'",
    ),
    (
        {"trust": {"act": "show"}, "run": {"max_steps": 100, "evaluator": False}},
        "act='show' in [trust] needs the built-in evaluator, which scores the learners: set "
        "evaluator=true in [run] without evaluate_command, or leave act out",
    ),
    (
        {
            "trust": {"act": "show"},
            "run": {"max_steps": 100, "learners": 4},
            "sync": {
                "merge": {
                    "rule": "mean",
                    "weighting": "uniform",
                    "norm_gate": 0,
                    "buffers": "local",
                }
            },
            "privacy": {
                "dp": {"clip": 1.0, "noise_multiplier": 2.0, "epsilon_max": 50.0, "delta": 1e-3}
            },
        },
        "act='show' in [trust] cannot be combined with [privacy.dp], because a score needs single "
        "contributions: leave one of them out",
    ),
    (
        {**sites({"name": "a", "learners": [0]}), "trust": {"act": "show"}},
        "act='show' in [trust] cannot be combined with [[sites]], because a relay sends sums and "
        "not single contributions: leave one of them out",
    ),
    (
        {"trust": {"act": "exclude"}, "run": {"max_steps": 100, "learners": 2}},
        "act='exclude' in [trust] needs at least 3 learners, but learners=2 in [run]: a score "
        "compares with the median learner: set act='show'",
    ),
    (
        {"trust": {"act": "weigh"}, "sync": ASYNC, "run": {"max_steps": 100, "learners": 4}},
        "act='weigh' in [trust] cannot be combined with participation='async', which merges "
        "contributions one by one, so that a weight has no effect: set act='exclude'",
    ),
    (
        {
            "trust": {"act": "exclude"},
            "sync": {"quorum": 4},
            "run": {"max_steps": 100, "learners": 4},
        },
        "quorum=4 in [sync] exceeds 3: act='exclude' in [trust] may exclude 1 of 4 learners, and "
        "the run would then stall: lower quorum, or set act='weigh'",
    ),
    (
        {"trust": {"score_every": 2}},
        "score_every=2 in [trust] would be ignored with act='off': take score_every out",
    ),
    (
        {"sync": {"merge": {"rule": "trimmed-mean", "trim": 0.5}}},
        "trim=0.5 in [sync.merge] is out of range: it must be less than 0.5",
    ),
    (
        {"sync": {"merge": {"rule": "median", "trim": 0.1}}},
        "trim=0.1 in [sync.merge] would be ignored with rule='median': take trim out",
    ),
    (
        sites({"name": "a", "learners": [0], "nodes": {"zone": "a"}})
        | {"launch": {"backend": "slurm"}},
        "nodes={'zone': 'a'} of site 'a' in [[sites]] would be ignored on Slurm, which has no "
        'labels: write directives = ["--constraint=…"]',
    ),
    (
        sites({"name": "a", "learners": [0], "directives": ["-p x"]})
        | {"launch": {"backend": "ray"}},
        "directives=['-p x'] of site 'a' in [[sites]] would be ignored with backend=\"ray\" in "
        '[launch]: write nodes = {LABEL = "VALUE"}',
    ),
    ({"synch": {}}, "unknown table 'synch': did you mean 'sync'?"),
    ({"run": "x.toml"}, "run='x.toml' is not a table: write it as one"),
    ({"sync": 3}, "sync=3 is not a table: write it as one"),
    ({"outer": [1]}, "outer=[1] is not a table: write it as one"),
    ({"faults": ["learner-0"]}, "faults='learner-0' is not a table: write it as one"),
    ({"works": 1}, "unknown key 'works': did you mean 'workload'?"),
    (
        {"learner": {"zzz": 1}},
        "unknown key 'zzz' in [learner]: choose one of 'command', 'disconnect_seconds', "
        "'checkpoint_interval_seconds', 'metrics_address', 'flush_seconds', 'max_failures', "
        "'max_preemptions', 'threads', 'device', 'precision', 'party_key', 'ranks', "
        "'parallelism', 'sync_ranks'",
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
        "ranks=2 in [learner] cannot be combined with elastic=true in [data], which is for "
        "learners with one process: set elastic=false",
    ),
    (
        {"learner": {"ranks": [1, 2]}, "data": {"elastic": False}},
        "ranks in [learner] lists 2, but learners=4: write one for all, or one for each",
    ),
    (
        {"learner": {"ranks": 2, "parallelism": ["tp"]}, "data": {"elastic": False}},
        "parallelism in [learner] lists 1, but learners=4: write one for all, or one for each",
    ),
    (
        {"learner": {"ranks": 2, "parallelism": "plain"}, "data": {"elastic": False}},
        "parallelism='plain' in [learner] is for one rank, but learner-0 has ranks=2: choose "
        "'ddp', 'fsdp' or 'tp', or set one rank",
    ),
    (
        {
            "learner": {"ranks": [2, 2, 2, 1], "parallelism": ["tp", "ddp", "fsdp", "tp"]},
            "data": {"elastic": False},
        },
        "parallelism='tp' in [learner] would be ignored for learner-3, which has ranks=1: "
        "write 'plain', or set more ranks",
    ),
    (
        {"learner": {"ranks": 2, "sync_ranks": 3}, "data": {"elastic": False}},
        "sync_ranks=3 in [learner] is out of range for learner-0, which has ranks=2: choose 1 "
        "to 2, 'hosts' or 'all'",
    ),
    (
        {"run": {}},
        "[run] has no budget, so the run would never end: set max_steps or max_tokens",
    ),
    (run(learners=0), "learners=0 in [run] is out of range: it must be at least 1"),
    (run(seed=-1), "seed=-1 in [run] is out of range: it must be at least 0"),
    (run(max_tokens=0), "max_tokens=0 in [run] is out of range: it must be at least 1"),
    (run(seed=1.5), "seed=1.5 in [run] is not a whole number: write it as one"),
    (run(seed=True), "seed=True in [run] is not a whole number: write it as one"),
    (run(name=7), "name=7 in [run] is not text in quotes: write it as one"),
    (run(evaluator="yes"), "evaluator='yes' in [run] is not true or false: write true or false"),
    (
        run(name=""),
        "name='' in [run] is empty: use letters, digits, '.', '_' and '-', and begin with a "
        "letter or a digit",
    ),
    (
        run(imports=["a b"]),
        "imports='a b' in [run] has a character that does not fit: write the name of a module, "
        "such as my_package.codecs",
    ),
    (
        run(folder="s3://bucket/run"),
        "folder='s3:/bucket/run' in [run] is a URL: use a local or mounted folder; [run] store "
        "mirrors a run to an object store",
    ),
    (
        run(store="s5://bucket/x"),
        "store='s5://bucket/x' is not an object store: use one of s3://, gs://, az://, file://, "
        "memory://",
    ),
    (run(store="s3:///x"), "store='s3:///x' has no bucket: write s3://BUCKET/PREFIX"),
    (
        run(store="s3://key:secret@bucket/x"),
        "store='s3://***@bucket/x' has a user name, password or query: set the credentials in the "
        "environment (AWS_…, GOOGLE_…, AZURE_…), or give the machine a role",
    ),
    (
        run(store="s3://bucket/x?aws_secret_access_key=secret"),
        "store='s3://bucket/x' has a user name, password or query: set the credentials in the "
        "environment (AWS_…, GOOGLE_…, AZURE_…), or give the machine a role",
    ),
    (
        run(store="file://here/x"),
        "store='file://here/x' is not an absolute path: write file:///FOLDER",
    ),
    (
        run(store="s3://bucket/a/../b"),
        "store='s3://bucket/a/../b' has '..' in its path: take it out",
    ),
    (
        run(store="memory://x"),
        "store='memory://x' in [run] would end with the process that mirrors the run: use "
        "file:///FOLDER",
    ),
    (
        run(store_interval_seconds=5.0),
        "store_interval_seconds=5.0 in [run] would be ignored without store: take "
        "store_interval_seconds out",
    ),
    (
        run() | {"syncer": {"lease_store": "s3://b/x"}},
        "lease_store='s3://b/x' in [syncer] would be ignored with standby=false: take lease_store "
        "out",
    ),
    (
        run() | {"syncer": {"lease_store": "s3://b/x", "standby": True, "lease_seconds": 1.0}},
        "lease_seconds=1.0 in [syncer] is too short for lease_store: it must be at least 2.0, "
        "because each renewal is a request",
    ),
    (
        run() | {"syncer": {"lease_store": "gs://b/x", "standby": True, "lease_seconds": 3.0}},
        "lease_seconds=3.0 in [syncer] is too short for lease_store: it must be at least 4.0, "
        "because each renewal is a request, and GCS accepts one write of an object per second",
    ),
    (
        run(store="s3://b/r")
        | {"syncer": {"lease_store": "s3://b/x", "standby": True, "shards": 2}},
        "lease_store in [syncer] cannot be combined with shards=2 and store in [run], because a "
        "standby would copy the state of all shards over that of one that runs: set shards=1, or "
        "share the run folder and take lease_store out",
    ),
    (run(folder="a\0b"), "folder='a\\x00b' in [run] has the character NUL: take it out"),
    (run(trackers=["a\0"]), "trackers=('a\\x00',) in [run] has the character NUL: take it out"),
    ({"syncer": {"host": ""}}, "host='' in [syncer] is empty: write a text, or take host out"),
    (
        {"learner": {"sync_ranks": "host"}},
        "sync_ranks='host' in [learner] is not known: did you mean 'hosts'?",
    ),
    (
        {"learner": {"sync_ranks": 1.5}},
        "sync_ranks=1.5 in [learner] is not known: write a whole number, or 'hosts' or 'all'",
    ),
    (
        {"sync": {"adapt": {"sync_every": [1, 2, 3]}}},
        "sync_every=[1, 2, 3] in [sync.adapt] is too long: it takes 2 values at most",
    ),
    (
        {"outer": {"by_fragment": [{"fragments": []}]}},
        "fragments=[] in [[outer.by_fragment]] is too short: it needs 1 value or more",
    ),
    (
        run(evaluator=False, evaluate_interval_seconds=5.0),
        "evaluate_interval_seconds=5.0 in [run] would be ignored with evaluator=false: take "
        "evaluate_interval_seconds out",
    ),
    (
        run(name="a/b"),
        "name='a/b' in [run] has a character that does not fit: "
        "use letters, digits, '.', '_' and '-', and begin with a letter or a digit",
    ),
    (
        {"sync": {"quorum": 5}},
        "quorum=5 in [sync] exceeds learners=4 in [run]: lower quorum or start more learners",
    ),
    ({"sync": {"fragments": 0}}, "fragments=0 in [sync] is out of range: it must be at least 1"),
    (
        {"sync": {"overlap_steps": 24}},
        "overlap_steps=24 in [sync] is not below sync_every=24: a fragment would be sent again "
        "before its merged value is due: lower overlap_steps or raise sync_every",
    ),
    (
        {"sync": {"adapt": {}}},
        "[sync.adapt] has no limits: set sync_every = [smallest, largest], overlap_steps, or both",
    ),
    (
        {"sync": {"adapt": {"sync_every": [24]}}},
        "sync_every=[24] in [sync.adapt] is too short: it needs 2 values or more",
    ),
    (
        {"sync": {"adapt": {"sync_every": [48, 24]}}},
        "sync_every=[48, 24] in [sync.adapt] is out of range: write the smallest value, at "
        "least 1, and then the largest",
    ),
    (
        {"sync": {"adapt": {"sync_every": [48, 96]}}},
        "sync_every=24 in [sync] is out of range: [sync.adapt] allows 48 to 96, and the run "
        "starts with this value: change one of them",
    ),
    (
        {"sync": {"sync_every": 2, "overlap_steps": 1, "adapt": {"sync_every": [1, 96]}}},
        "overlap_steps=[1, 1] in [sync.adapt] is not below sync_every=[1, 96]: a fragment "
        "would be sent again before its merged value is due: lower the smallest overlap_steps "
        "or raise the smallest sync_every",
    ),
    (
        {"sync": {"adapt": {"sync_every": [24, 96]}, "wait": "at_overlap"}},
        "[sync.adapt] cannot be combined with wait='at_overlap' in [sync], which keeps H and τ "
        "fixed: take one of them out",
    ),
    (
        {
            "sync": {
                "fragments": 2,
                "partition": {"phases": [0, 1]},
                "adapt": {"sync_every": [24, 96]},
            }
        },
        "[sync.adapt] cannot be combined with phases in [sync.partition], because another "
        "period spreads the fragments evenly: take one of them out",
    ),
    (
        {"sync": {"overlap_steps": 30, "wait": "at_overlap", "apply": {"when": "at_overlap"}}},
        "overlap_steps=30 in [sync] is not below sync_every=24: a fragment would be sent again "
        "before its merged value is due: lower overlap_steps or raise sync_every",
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
        {"sync": {"apply": {"blend_alpha": 0.3}}},
        "blend_alpha=0.3 in [sync.apply] would be ignored with alignment='overwrite': take "
        "blend_alpha out",
    ),
    (
        {
            "sync": {
                "merge": {"weighting": "uniform", "counter_cap_periods": 2},
                "apply": {"missed": "rebase"},
            }
        },
        "counter_cap_periods=2 in [sync.merge] would be ignored with weighting='uniform' and "
        "missed='rebase': take counter_cap_periods out",
    ),
    (
        {"sync": {"participation": "async", "apply": {"missed": "rebase"}}},
        "grace_margin=0.8 in [sync] cannot be combined with participation='async', which "
        "merges what has arrived: set grace_margin=0.0",
    ),
    (
        {"sync": {"participation": "async", "grace_margin": 0.0, "late": {"policy": "drop"}}},
        "policy='drop' in [sync.late] cannot be combined with participation='async', which "
        "merges what has arrived: set policy='next'",
    ),
    (
        {"sync": {"participation": "async", "grace_margin": 0.0}},
        "missed='overwrite' in [sync.apply] cannot be combined with participation='async', "
        "which merges what has arrived: set missed='rebase'",
    ),
    (
        {
            "sync": {
                "participation": "async",
                "grace_margin": 0.0,
                "apply": {"missed": "rebase"},
                "adapt": {"sync_every": [8, 48]},
            }
        },
        "[sync.adapt] cannot be combined with participation='async', which merges what has "
        "arrived: take it out",
    ),
    (
        {"sync": {**ASYNC, "devices": {"history": 0}}},
        "history=0 in [sync.devices] is out of range: it must be at least 1",
    ),
    (
        {"sync": {**ASYNC, "devices": {"cohort": 5}}},
        "cohort=5 in [sync.devices] exceeds learners=4 in [run]: lower cohort or raise learners, "
        "the number of devices",
    ),
    (
        {"sync": {**ASYNC, "devices": {"cohort": 0}}},
        "cohort=0 in [sync.devices] is out of range: it must be at least 1",
    ),
    (
        {"sync": {**ASYNC, "devices": {"cohort": 2, "visit_seconds": 0.0}}},
        "visit_seconds=0.0 in [sync.devices] is out of range: it must be greater than 0.0",
    ),
    (
        {"sync": {**ASYNC, "devices": {"visit_seconds": 60.0}}},
        "visit_seconds=60.0 in [sync.devices] would be ignored without cohort: take "
        "visit_seconds out",
    ),
    (
        {"sync": {"devices": {}}},
        "[sync.devices] cannot be combined with participation='active', because a device is not "
        "there at each round: set participation='async'",
    ),
    (
        {"sync": {**ASYNC, "late": {"max_versions": 8}, "devices": {}}},
        "max_versions=8 in [sync.late] would be ignored with [sync.devices], whose history "
        "replaces it: take max_versions out",
    ),
    (
        {"sync": {**ASYNC, "late": {"policy": "drop"}, "devices": {"history": 8}}},
        "history=8 in [sync.devices] would be ignored with policy='drop', which merges only what "
        "is based on the newest version: take history out",
    ),
    (
        {"sync": {**ASYNC, "late": {"policy": "drop"}, "quorum": 3, "devices": {"cohort": 2}}},
        "cohort=2 in [sync.devices] is below quorum=3 with policy='drop', so no version would "
        "ever be merged: raise cohort or lower quorum",
    ),
    (
        {"sync": {**ASYNC, "devices": {}}},
        "elastic=true in [data] cannot be combined with [sync.devices], because each device has "
        "its own data: set elastic=false",
    ),
    (
        {
            "sync": {**ASYNC, "devices": {}},
            "learner": {"ranks": 2},
            "data": {"elastic": False},
        },
        "ranks=2 in [learner] cannot be combined with [sync.devices], because a device is one "
        "process: set ranks=1",
    ),
    (
        {"sync": {"late": {"discount": 1.5}}},
        "discount=1.5 in [sync.late] is out of range: it must be greater than 0 and at most 1, or "
        "'polynomial'",
    ),
    (
        {"sync": {"late": {"discount": "poly"}}},
        "discount='poly' in [sync.late] is not valid: write a number greater than 0 and at most 1, "
        "or 'polynomial'",
    ),
    (
        {"sync": {"late": {"discount_of": "change"}}},
        "discount_of='change' in [sync.late] would be ignored with discount=1.0: take discount_of "
        "out",
    ),
    (
        {"sync": {"merge": {"rule": "rad"}}},
        "rule='rad' in [sync.merge] is not known: did you mean 'rda'? (A custom rule is "
        "written as 'module:function'.)",
    ),
    (
        {"sync": {"codec": {"uplink": ["int4", "bf16"]}}},
        "uplink=['int4', 'bf16'] in [sync.codec] has int4 (4.125), bf16 (16) bits per element: "
        "put the most exact codec first, and each following one with fewer bits",
    ),
    (
        {"sync": {"codec": {"uplink": []}}},
        "uplink=[] in [sync.codec] is empty: name one codec or several",
    ),
    (
        {"sync": {"codec": {"uplink": "int4", "error_feedback": False, "feedback_decay": 0.5}}},
        "feedback_decay=0.5 in [sync.codec] would be ignored without error feedback: take "
        "feedback_decay out",
    ),
    (
        {"sync": {"codec": {"uplink": "bf16", "error_feedback": True}}},
        "error_feedback=True in [sync.codec] would be ignored with uplink='bf16', which leaves out "
        "too little: take error_feedback out",
    ),
    (
        {"sync": {"codec": {"uplink": "zip"}}},
        "uplink='zip' in [sync.codec]: codec 'zip' is unknown: did you mean 'topk'? "
        "Known codecs: fp32, bf16, int8, int4, fp4-e3m0, int2, topk, topk-<k>. (For a custom codec "
        "write 'module:function', or register it in a module of run.imports.)",
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
    (
        {"outer": {"average": 0}},
        "average=0 in [outer] is out of range: it must be greater than 0.0",
    ),
    ({"outer": {"average": 1}}, "average=1 in [outer] is out of range: it must be less than 1.0"),
    ({"outer": {"momentum": 1}}, "momentum=1 in [outer] is out of range: it must be less than 1.0"),
    (
        {"outer": {"lr": float("nan")}},
        "lr=nan in [outer] is not a finite number: write it as one",
    ),
    (
        {"syncer": {"shards": 25}},
        "shards=25 in [syncer] exceeds fragments=24 in [sync], so a shard would own nothing: "
        "lower shards or raise fragments",
    ),
    (
        {"syncer": {"port": 65536}},
        "port=65536 in [syncer] is out of range: it must be at most 65535",
    ),
    (
        {"syncer": {"port": 65535, "shards": 2}},
        "port=65535 in [syncer] with shards=2 needs ports up to 65536, but 65535 is the last: "
        "lower port",
    ),
    (
        {"syncer": {"shards": 2, "addresses": ["http://a:1"]}},
        "addresses in [syncer] has 1 entries, but shards=2: write one address per shard",
    ),
    (
        {"syncer": {"addresses": ["a:1"]}},
        "address 'a:1' in [syncer] is not a URL: "
        "write it as 'http://host:port', for example 'http://a:1'",
    ),
    (
        {"learner": {"disconnect_seconds": 0}},
        "disconnect_seconds=0 in [learner] is out of range: it must be greater than 0.0",
    ),
    (
        fault(kill="learner-9"),
        "kill='learner-9' in [[faults]] is not a learner: did you mean 'learner-3'?",
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
        "kill='learner-1' at=0.7 in [[faults]] would be ignored, because learner-1 is dead "
        "since at=0.2: set restart=true there or take this entry out",
    ),
    ({"sync": 3}, "sync=3 is not a table: write it as one"),
    ({"faults": 3}, "faults=3 is not a list: write it as one"),
    (
        {"sync": {"partition": {"map": [["a"], ["*"]]}, "fragments": 3}},
        "fragments=3 in [sync] differs from the 2 lists of map in [sync.partition]: take "
        "fragments out",
    ),
    (
        {"sync": {"partition": {"map": 3}}},
        "map=3 in [sync.partition] is not a list: write it as one",
    ),
    (
        {"sync": {"partition": {"map": [["*"]], "scheme": "tensor"}}},
        "scheme='tensor' in [sync.partition] would be ignored with a map: take scheme out",
    ),
    (
        {"sync": {"partition": {"phases": [1]}}},
        "phases in [sync.partition] has 1 entries, but fragments=24: write one for each "
        "fragment, or none",
    ),
    (
        {"sync": {"fragments": 1, "partition": {"phases": [24]}}},
        "phases in [sync.partition] has 24, which is out of range: it must be from 0 to "
        "sync_every - 1 = 23",
    ),
    (
        {"outer": {"by_fragment": [{"fragments": [99], "lr": 0.1}]}},
        "fragment 99 in [[outer.by_fragment]] is out of range: with fragments=24 it must be from "
        "0 to 23",
    ),
    (
        {"outer": {"by_fragment": [{"fragments": [1], "lr": 0.1}, {"fragments": [1], "lr": 0.2}]}},
        "fragment 1 is in two entries of [[outer.by_fragment]]: remove it from one",
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


def test_a_fragment_inherits_the_outer_settings() -> None:
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
def test_the_optimizer_of_a_fragment_is_tried(optimizer: str) -> None:
    with pytest.raises(ConfigError, match=rf"^\[outer\] cannot be used: .*'{optimizer}'"):
        build(outer={"by_fragment": [{"fragments": [1], "optimizer": optimizer}]})


def test_a_map_determines_the_number_of_fragments() -> None:
    config = build(sync={"partition": {"map": [["a"], ["*"]], "phases": [3, 3]}})
    assert (config.sync.fragments, config.sync.partition.phases) == (2, (3, 3))
    assert read_public(public_text(config)).sync == config.sync


def test_a_file_without_a_run_table_is_reported() -> None:
    with pytest.raises(ConfigError, match=r"^the file lacks 'run': add it$"):
        RunConfig()


def test_all_mistakes_of_a_table_are_reported_together() -> None:
    with pytest.raises(ConfigError) as error:
        SyncSettings(quorom=1, sync_every=0)
    assert str(error.value).splitlines() == [
        "sync_every=0 in [sync] is out of range: it must be at least 1",
        "unknown key 'quorom' in [sync]: did you mean 'quorum'?",
    ]


@pytest.mark.parametrize(
    "tables",
    [
        {"sync": {"sync_every": 1, "overlap_steps": 0, "fragments": 1}},
        {"sync": {"quorum": 4}},
        {"syncer": {"port": 0, "shards": 24}},
        {"syncer": {"port": 65535}},
        {"sync": {"apply": {"alignment": "blend", "blend_alpha": 0.3}}},
        {"outer": {"options": {}}},
        {"faults": [{"at": 0.2, "kill": "learner-1"}, {"at": 0.7, "kill": "learner-1"}]},
    ],
)
def test_limits_are_inclusive(tables: dict[str, Any]) -> None:
    build(**tables)
