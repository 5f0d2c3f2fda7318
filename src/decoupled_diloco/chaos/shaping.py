"""Links with a rate, in the kernel: a token bucket filter for each direction of each link.

Everybody's wires begin at a loopback address of their own (`chaos.proxy`), so packets to and from
that address are those of one process's link. Needs a network namespace of this process's own.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping

from decoupled_diloco.chaos import spaces
from decoupled_diloco.simulate.scenario import Scenario
from decoupled_diloco.simulate.scenario_file import LinkSettings

QUEUE_MILLISECONDS = 200
"""How long a packet may wait for its turn; then it is dropped, and TCP slows down."""

BURST_BYTES_MIN = 16_000
BURST_SECONDS = 0.01
MTU_BYTES = 1_500


class Shaper:
    """The rates of a scenario's links, on this namespace's loopback device.

    Args:
        scenario: Who is on which link.
        host: The loopback address of a learner.

    Raises:
        Error: the kernel or `tc` refuses.
    """

    def __init__(self, scenario: Scenario, host: Callable[[str], str]) -> None:
        self._links: Mapping[str, LinkSettings] = scenario.links
        self._buckets: defaultdict[str, list[tuple[int, float]]] = defaultdict(list)
        self._factors: defaultdict[str, list[float]] = defaultdict(list)
        self._shared: dict[tuple[str, str], int] = {}
        self._count = 0
        spaces.command("ip", "link", "set", "lo", "mtu", str(MTU_BYTES))
        _tc("qdisc", "add", "root", "handle", "1:", "htb", "default", "0")
        for learner, group in scenario.members.items():
            if group.link is not None:
                self._limit(self._links[group.link], host(learner))

    def throttle(self, link: str, factor: float, *, begins: bool) -> None:
        """A link has 1/``factor`` of its rate from now on, or has it back."""
        factors = self._factors[link]
        (factors.append if begins else factors.remove)(factor)
        for number, rate in self._buckets[link]:
            _bucket("change", number, rate / math.prod(factors))

    def _limit(self, link: LinkSettings, address: str) -> None:
        """``up`` is to the address at which a learner's wires begin, ``down`` from it."""
        ways = (("dst", link.up_bytes_per_second), ("src", link.down_bytes_per_second))
        for way, rate in ways:
            if math.isinf(rate):
                continue
            number = self._shared.get((link.name, way)) if link.shared else None
            if number is None:
                number = self._add(rate)
                self._shared[link.name, way] = number
                self._buckets[link.name].append((number, rate))
            match = ("u32", "match", "ip", way, f"{address}/32", "flowid", f"1:{number:x}")
            _tc("filter", "add", "parent", "1:", "protocol", "ip", *match)

    def _add(self, rate: float) -> int:
        self._count += 1
        number = self._count + 0xF
        unlimited = ("htb", "rate", "100gbit", "quantum", "60000")
        _tc("class", "add", "parent", "1:", "classid", f"1:{number:x}", *unlimited)
        _bucket("add", number, rate)
        return number


def _bucket(what: str, number: int, bytes_per_second: float) -> None:
    burst = max(BURST_BYTES_MIN, round(bytes_per_second * BURST_SECONDS))
    rate = ("rate", f"{round(8 * bytes_per_second)}bit", "burst", str(burst))
    place = ("parent", f"1:{number:x}", "handle", f"{number:x}:")
    _tc("qdisc", what, *place, "tbf", *rate, "latency", f"{QUEUE_MILLISECONDS}ms")


def _tc(kind: str, what: str, *words: str) -> None:
    spaces.command("tc", kind, what, "dev", "lo", *words)
