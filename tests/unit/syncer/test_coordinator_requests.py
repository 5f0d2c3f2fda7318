"""Which peers may end the run in order."""

from __future__ import annotations

import json

import pytest

from decoupled_diloco.config.parties import Parties
from decoupled_diloco.config.signing_keys import PublicKey
from decoupled_diloco.syncer.coordinator_requests import answer_stop, stopping_party
from decoupled_diloco.transport.tokens import RequestRefusal

PARTIES = Parties(
    parties=[
        {
            "name": name,
            "learners": [f"{name}-*"],
            "key": str(PublicKey(name.encode() * 32)),
            "may_stop": name == "a",
        }
        for name in "ab"
    ]
)


class Coordinator:
    """Records which process ends the run."""

    def __init__(self, problem: str = "") -> None:
        self.problem, self.stopped = problem, list[str]()

    def want_stop(self, by: str) -> str:
        self.stopped.append(by)
        return self.problem


@pytest.mark.parametrize(
    ("names", "by"),
    [
        ((), "the operator"),
        (("shard-1",), "the operator"),
        (("shard-*",), "the operator"),
        (("a",), "a"),
        (("a", "a-0", "relay.example"), "a"),
        (("hub.example", "localhost", "shard-*"), "the operator"),
    ],
)
def test_the_operator_and_a_party_that_may_do_so_end_the_run(
    names: tuple[str, ...], by: str
) -> None:
    coordinator = Coordinator()
    assert json.loads(answer_stop(coordinator, names, PARTIES).body) == {"by": by}
    assert coordinator.stopped == [by]


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (("b",), r"party 'b' may not stop the run: only the operator .*, and a: ask them"),
        (("b-3",), "party 'b' may not"),
        (("a", "b-0"), "party 'a', 'b' may not"),
        (("evaluator",), "'evaluator' may not stop the run"),
    ],
)
def test_others_are_refused_with_those_that_may(names: tuple[str, ...], words: str) -> None:
    coordinator = Coordinator()
    with pytest.raises(RequestRefusal, match=words) as caught:
        answer_stop(coordinator, names, PARTIES)
    assert caught.value.status == 403
    assert coordinator.stopped == []


def test_without_parties_a_learners_own_token_does_not_end_the_run() -> None:
    assert stopping_party((), None) == "the operator"
    with pytest.raises(RequestRefusal, match="'learner-0' may not stop the run: only the operator"):
        stopping_party(("learner-0",), None)


def test_a_run_that_cannot_end_says_why() -> None:
    with pytest.raises(RequestRefusal, match="the run has not begun") as caught:
        answer_stop(Coordinator("the run has not begun"), (), PARTIES)
    assert caught.value.status == 400
    with pytest.raises(RequestRefusal, match="send the request to shard 0"):
        answer_stop(None, (), PARTIES)
