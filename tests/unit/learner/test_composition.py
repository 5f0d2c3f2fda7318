"""The parts of a `Learner` with one rank and with several."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from torch import nn

from decoupled_diloco.errors import ConfigError, DilocoError
from decoupled_diloco.learner.learner_model import TrainedModel
from decoupled_diloco.learner.parameter_store import ModuleStore
from decoupled_diloco.learner.party import Solo
from decoupled_diloco.participants import Learner, Observer
from decoupled_diloco.ranks.rank_process import RankSeat

ADDRESS = "http://127.0.0.1:1"


class Later(Learner):
    """A learner that does not join in its constructor."""

    def _enter(self) -> None:
        pass


class Seated(Later):
    """Rank 0 of a multi-rank learner whose other ranks receive only errors."""

    errors: ClassVar[list[DilocoError]]

    def _seat_of(self, model: Any, *given: Any) -> Any:
        store = ModuleStore(model)
        received = self.errors

        class Seat(SimpleNamespace):
            leads = True
            group = SimpleNamespace(size=2)
            reports_errors = RankSeat.reports_errors

            def train(self, *given: Any) -> TrainedModel:
                return TrainedModel(model, None, store.layout)

            def leave(self, error: DilocoError) -> None:
                received.append(error)

        return Seat(store=store, exchange=None, checkpointer=None)


@pytest.mark.parametrize("kind", [Learner, Observer])
def test_a_participant_is_one_class(kind: type) -> None:
    assert kind.__mro__ == (kind, object)
    assert "__new__" not in vars(kind)


def test_a_one_rank_learner_has_a_solo_party() -> None:
    learner = Later(nn.Linear(2, 2), ADDRESS, name="a")
    party = learner._party
    assert isinstance(party, Solo)
    assert party.boundary.membership is party.membership
    assert learner.name == "a"
    party.leave("", abrupt=True)


def test_an_invalid_argument_on_rank_0_is_sent_to_the_other_ranks() -> None:
    received: list[DilocoError] = []
    Seated.errors = received
    with pytest.raises(ConfigError, match="checkpoint='kept' needs name=") as error:
        Seated(nn.Linear(2, 2), ADDRESS, checkpoint="kept")
    assert received == [error.value]
