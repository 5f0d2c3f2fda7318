"""What an earlier version has written of the coordinator's state is gone on from."""

from __future__ import annotations

from typing import Any

from decoupled_diloco.syncer.coordinator_document import document_at_checkpoint

FORMER: dict[str, Any] = {
    "phase": "running",
    "fingerprint": "f",
    "learners": {"a": {"epoch": 2, "nonce": "n", "present": True}},
    "terms": {"0": 3},
    "nonces": {"0": "s"},
    "claims": {"0": 1},
    "former": {},
    "seed": "a",
    "attempt": 1,
    "ready": [0],
    "swept": [],
    "clocks": {"0": 30},
    "tokens": 640,
    "data": {"parts": 0, "entries": 0, "leases": 0, "opened": 0, "turns": {}, "holders": {}},
    "cut": 7,
    "cuts_kept": [6, 7],
}


def test_the_number_of_the_run_s_checkpoint_goes_on() -> None:
    document, state = document_at_checkpoint({"state": FORMER, "run": "r"}, None)
    assert (state.checkpoint, state.terms, state.learners["a"].epoch) == (7, {0: 3}, 2)
    assert document_at_checkpoint(document, None)[1] == state, "as it is written today, too"
