"""Random worlds with random faults: safety at every event, liveness once a quorum is healthy."""

from __future__ import annotations

import pytest

from decoupled_diloco.simulate import fuzz

BATCHES, RUNS = 15, 20


@pytest.mark.parametrize("batch", range(BATCHES))
def test_random_worlds_hold(batch: int) -> None:
    events = 0
    for seed in range(batch * RUNS, (batch + 1) * RUNS):
        try:
            report = fuzz.run(seed)
        except AssertionError as error:
            command = fuzz.COMMAND.format(seed=seed)
            raise AssertionError(f"{error}\nrepeat it with: {command}") from error
        assert report.events >= 300, f"seed {seed} has shown only {report.events} events"
        events += report.events
    assert events > RUNS * 1000


def test_a_seed_repeats_a_world_event_for_event() -> None:
    def tape_of(seed: int) -> list[str]:
        tape: list[str] = []
        fuzz.run(seed, lambda *event: tape.append(repr(event)))
        return tape

    assert tape_of(11) == tape_of(11)
    assert tape_of(11) != tape_of(12)


@pytest.mark.parametrize("seed", [3, 21, 25])
def test_a_machines_snapshot_is_the_whole_of_it(seed: int) -> None:
    """Before every event each machine is replaced by one that was restored from its snapshot."""

    def tape_of(*, swaps: bool) -> list[str]:
        scenario, tape = fuzz.draw(seed), list[str]()
        scenario.world.swaps = swaps
        scenario.world.recorders.append(lambda *event: tape.append(repr(event)))
        scenario.world.run(until=scenario.faulty_seconds)
        return tape

    assert tape_of(swaps=True) == tape_of(swaps=False)
