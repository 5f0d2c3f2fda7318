"""The codec of each learner: the most exact one that its link carries in time (rule 20)."""

from __future__ import annotations

import random

import pytest

from decoupled_diloco.protocol.adapt import (
    IN_VAIN_MAX,
    LATE_MAX,
    PATIENCE,
    PATIENCE_MAX,
    Choice,
    Uplink,
    arrived,
)

LADDER = (("bf16", 16.0), ("int8", 8.125), ("int4", 4.125), ("int2", 2.125))
ALLOWED = 1.0


class Link:
    """A link with a rate in bits per element and second, one payload after the other."""

    def __init__(self, bits_per_second: float, latency: float = 0.0) -> None:
        self.rate = bits_per_second
        self.latency = latency
        self.uplink = Uplink()
        self.now = 0.0
        self.choices: list[Choice] = []

    def send(self, bodies: int = 1) -> str:
        """Send payloads, one per second or as fast as possible; return the codec at the end."""
        for _ in range(bodies):
            began = self.now
            self.now += LADDER[self.uplink.rung][1] / self.rate + self.latency
            choice = arrived(self.uplink, LADDER, began, self.now, ALLOWED)
            self.now = max(self.now, began + 1.0)
            self.choices += [] if choice is None else [choice]
        return LADDER[self.uplink.rung][0]


@pytest.mark.parametrize(
    ("rate", "codec"), [(40.0, "bf16"), (12.0, "int8"), (6.0, "int4"), (3.0, "int2"), (1.0, "int2")]
)
def test_the_most_exact_timely_codec_is_chosen(rate: float, codec: str) -> None:
    link = Link(rate)
    assert link.send(400) == codec
    assert len(link.choices) == (codec != "bf16"), "as far as it must, at once"


def test_a_recovered_link_gets_finer_codecs_again() -> None:
    link = Link(40.0)
    assert link.send(20) == "bf16"
    link.rate = 4.0
    assert link.send(3) == "int2"
    link.rate = 40.0
    assert link.send(5 * PATIENCE) == "bf16"
    assert [choice.codec for choice in link.choices] == ["int2", "int4", "int8", "bf16"]


def test_one_late_payload_changes_nothing() -> None:
    link = Link(40.0)
    for _ in range(20):
        link.rate = 5.0
        link.send()
        link.rate = 40.0
        assert link.send(2) == "bf16"
    assert not link.choices


def test_a_link_at_the_border_does_not_flap() -> None:
    """Its rate alternates around the finer codec's limit: it stays with the coarser one."""
    link, chance = Link(40.0), random.Random(1)
    for _ in range(3000):
        link.rate = chance.choice([14.0, 40.0, 40.0])
        link.send()
    assert link.choices[0].codec == "int8"
    assert len(link.choices) <= 12, f"{len(link.choices)} changes in 3,000 payloads"


def test_an_unstable_link_gets_finer_codecs_ever_more_rarely() -> None:
    """The finer codec fits for 20 payloads, then does not: it moves up less and less often."""
    link = Link(40.0)
    for phase in range(150):
        link.rate = 40.0 if phase % 2 else 10.0
        link.send(20)
    assert PATIENCE < link.uplink.patience.wanted <= PATIENCE_MAX
    assert len(link.choices) <= 12, f"{len(link.choices)} changes in 3,000 payloads"


def test_a_queued_payload_does_not_count_as_slow() -> None:
    """Two are sent at once over a link that carries one in 0.4 s: each takes 0.4 s."""
    uplink = Uplink()
    for second in range(50):
        assert arrived(uplink, LADDER, second, second + 0.4, ALLOWED) is None
        assert arrived(uplink, LADDER, second, second + 0.8, ALLOWED) is None


def test_every_choice_states_its_measurement() -> None:
    link = Link(4.0)
    link.send(10)
    (choice,) = link.choices
    assert (choice.before, choice.codec) == ("bf16", "int2")
    assert choice.why == "2 payloads took too long, the last one 4 s of 1 s"


def test_a_link_that_fewer_bits_do_not_help_keeps_the_exact_codec() -> None:
    """A payload takes 0.1 s, and the round trip before it takes two seconds."""
    link, coarse = Link(160.0, latency=2.0), 0
    for _ in range(1000):
        coarse += link.send() != "bf16"
    assert link.choices[1].codec == "bf16"
    assert link.choices[1].why.startswith("fewer bits do not help: a payload still took 2.")
    assert link.uplink.patience.late_max == IN_VAIN_MAX
    assert coarse <= 1000 * LATE_MAX / IN_VAIN_MAX + 10


def test_a_link_that_becomes_slower_during_a_change_still_gets_a_coarser_codec() -> None:
    link = Link(8.0)
    assert link.send(LATE_MAX) == "int4"
    link.rate = 0.5
    assert link.send(LATE_MAX) == "bf16", "they took longer than before"
    link.rate = 3.0
    assert link.send(2 * LATE_MAX) == "int2"
    assert link.send(100) == "int2"
    assert link.uplink.patience.late_max == LATE_MAX, "it helped"
