"""A tape as one party may see it."""

from __future__ import annotations

import json

from decoupled_diloco.tape.restricted import SOMEONE, RestrictedTape


def restricted(own: str, *learners: str) -> RestrictedTape:
    return RestrictedTape(lambda name: name == own, learners)


def line(**data: object) -> bytes:
    return json.dumps({"process": "shard-0", "kind": "event", "data": data}).encode() + b"\n"


def test_records_about_other_learners_are_left_out() -> None:
    view = restricted("a")
    own = line(peer="a", message={"type": "StepReport", "step": 1})
    other = line(peer="b", message={"type": "StepReport", "step": 1})
    assert json.loads(view.lines(other + own)) == json.loads(own)
    order = line(order={"type": "Evict", "learner": "b"})
    assert view.lines(order) == b""


def test_names_of_other_learners_are_left_out_of_lists_and_sentences() -> None:
    view = restricted("a", "b", "b-2")
    shown = json.loads(
        view.lines(
            line(
                learners=["a", "b"],
                took=[["b", 0.5], ["a", 0.7]],
                participants=[{"learner": "b", "state": "folded"}, {"learner": "a"}],
                why="b-2 waits for b and a; b-3 does not",
                by={"b": 1, "a": 2},
            )
        )
    )["data"]
    assert shown == {
        "learners": ["a"],
        "took": [["a", 0.7]],
        "participants": [{"learner": "a"}],
        "why": f"{SOMEONE} waits for {SOMEONE} and a; b-3 does not",
        "by": {"a": 2},
    }


def test_shards_the_coordinator_and_torn_lines() -> None:
    view = restricted("a")
    for peer in ("shard/1", "coordinator"):
        view.lines(line(peer=peer))
    assert view.lines(line(text="shard/1 and coordinator"))
    assert view.lines(b'{"process":"shard-0","data":{"learner":"b') == b""
