"""Virtual links with limited rates."""

from __future__ import annotations

from collections.abc import Sequence

from decoupled_diloco_lab.simulate.choices import Choices
from decoupled_diloco_lab.simulate.clockwork import Clockwork
from decoupled_diloco_lab.simulate.virtual_network import Endpoint, Link, Network


def arrivals(up: float, downs: Sequence[float], nbytes: int) -> list[float]:
    """Return when payloads of one sender arrive, each at a receiver with this rate."""
    clockwork, found = Clockwork(), list[float]()
    network = Network(clockwork, Choices(0))

    def end(name: str, link: Link) -> Endpoint:
        made = Endpoint(name)
        made.start()
        made.link = link
        return made

    sender = end("sender", Link(0.0, 0.0, up_bytes_per_second=up))
    for number, down in enumerate(downs):
        receiver = end(f"receiver-{number}", Link(0.0, 0.0, down_bytes_per_second=down))
        network.transfer(
            sender, receiver, nbytes, lambda: found.append(clockwork.now), lambda: None
        )
    while clockwork.next is not None:
        clockwork.step()
    return found


def test_payloads_on_one_link_follow_each_other() -> None:
    assert arrivals(10.0, [1000.0, 1000.0], 100) == [10.0, 20.0]


def test_a_slow_receiver_does_not_delay_the_others() -> None:
    assert arrivals(100.0, [1.0, 100.0], 100) == [2.0, 100.0]
