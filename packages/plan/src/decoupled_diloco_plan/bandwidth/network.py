"""Sites with learners, the location of the shards, and the links between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from decoupled_diloco.errors import ConfigError
from decoupled_diloco.units import parse_duration, parse_rate
from decoupled_diloco_plan.checks import above, at_least

SITE_FORM = "NAME:LEARNERS:UP[/DOWN][:LATENCY][:own][:relay[=SITE]][:step=TIME]"
"""Format of a `--site` value."""

INSIDE = "inside "
"""Start of the name of the link between a relay and the learners of its site."""

RELAY_RATE = 10e9 / 8
"""Assumed rate between a relay and its site's learners, bytes per second: a usual Ethernet port."""

SPREAD, HUB = "spread", "hub"
"""Shards divided evenly among the sites, and all shards at a separate place without learners."""


@dataclass(frozen=True, slots=True)
class Link:
    """The link that connects a place to the network."""

    up: float  # bandwidth away from the place, bytes per second, greater than 0
    down: float  # bandwidth towards it, bytes per second, greater than 0
    # one way, to the middle of the network; the latency between two places is the sum of both
    latency_seconds: float = 0.0
    shared: bool = True  # False: each learner of the place has a separate link of this rate

    def __post_init__(self) -> None:
        for name, rate in (("up", self.up), ("down", self.down)):
            if not rate > 0:
                raise ConfigError(f"{name}={rate:g} of a link is out of range: it must be above 0")
        at_least(0, latency_seconds=self.latency_seconds)

    @property
    def least(self) -> float:
        """Bandwidth of the slower direction, bytes per second."""
        return min(self.up, self.down)

    def scaled(self, factor: float) -> Link:
        """Return the same link with its bandwidth multiplied by `factor`."""
        return replace(self, up=self.up * factor, down=self.down * factor)


@dataclass(frozen=True, slots=True)
class Site:
    """A place with learners; `step_seconds` replaces the model's step time there."""

    name: str
    learners: int
    link: Link
    step_seconds: float | None = None
    # the relay fetches each copy once, and sends one sum of the site's contributions
    relay: bool = False
    # site to which the link leads, and whose relay this one dials; "": the middle of the network
    upstream: str = ""

    def __post_init__(self) -> None:
        if self.relay and not self.link.shared:
            raise ConfigError(
                f"site {self.name!r} has a relay and 'own' links, but only the relay uses its "
                "link: take out one of them"
            )
        if self.step_seconds is not None:
            above(0, **{f"step_seconds of site {self.name!r}": self.step_seconds})
        at_least(1, **{f"learners of site {self.name!r}": self.learners})


@dataclass(frozen=True, slots=True)
class Network:
    """The sites, and the location of the shards."""

    sites: tuple[Site, ...]  # at least one
    syncer: str = SPREAD  # `SPREAD`, `HUB`, or the name of a site
    hub: Link | None = None  # the hub's link, if the syncer is there
    # between a relay and all learners of its site, each direction, bytes per second
    relay_rate: float = RELAY_RATE

    def __post_init__(self) -> None:
        names = [site.name for site in self.sites]
        if not names:
            raise ConfigError("no site is given: give at least one, for example with --sites 4")
        if len(set(names)) < len(names):
            raise ConfigError(f"site names are not unique: {', '.join(names)}: rename one")
        if self.syncer not in (SPREAD, HUB, *names):
            raise ConfigError(
                f"--syncer-site {self.syncer!r} is not valid: give {SPREAD!r}, {HUB!r} or one of "
                + ", ".join(names)
            )
        if (self.hub is not None) != (self.syncer == HUB):
            raise ConfigError(
                "--hub-link and --syncer-site hub need each other: add the missing one, or omit "
                "both"
            )
        above(0, relay_rate=self.relay_rate)
        for number, site in enumerate(self.sites):
            above_it = [
                other.name for other in self.sites[:number] if other.relay or not site.relay
            ]
            if site.upstream and site.upstream not in above_it:
                raise ConfigError(
                    f"site {site.name!r} is behind {site.upstream!r}, which is not an earlier site "
                    "with a relay: give that site a relay, and name it first"
                )

    @property
    def learners(self) -> int:
        """Number of learners M."""
        return sum(site.learners for site in self.sites)

    def paces(self, step_seconds: float) -> tuple[float, ...]:
        """Return the step time of each site's learners; `step_seconds` is the model's."""
        return tuple(
            step_seconds if site.step_seconds is None else site.step_seconds for site in self.sites
        )

    def kth(self, values: Sequence[float], quorum: int) -> float:
        """Return the K-th smallest of the learners' values, given one value per site."""
        learners = 0
        for value, site in sorted(zip(values, self.sites, strict=True), key=lambda pair: pair[0]):
            learners += site.learners
            if learners >= quorum:
                return value
        raise AssertionError("the quorum is at most M")

    @property
    def has_relays(self) -> bool:
        return any(site.relay for site in self.sites)

    @property
    def senders(self) -> int:
        """Number of learners and relays that send contributions to the shards."""
        sites = [site for n, site in enumerate(self.sites) if self.next_relay(n) is None]
        return sum(1 if site.relay else site.learners for site in sites)

    @property
    def places(self) -> tuple[Link, ...]:
        """The links of all sites, of the hub if there is one, and of the relays inside sites."""
        inside = Link(self.relay_rate, self.relay_rate)
        hub = () if self.hub is None else (self.hub,)
        return (*(site.link for site in self.sites), *hub, *[inside] * len(self._relays))

    def names(self) -> tuple[str, ...]:
        inside = (INSIDE + self.sites[site].name for site in self._relays)
        return (*(site.name for site in self.sites), *((HUB,) if self.hub else ()), *inside)

    @property
    def _relays(self) -> list[int]:
        return [number for number, site in enumerate(self.sites) if site.relay]

    def inside(self, site: int) -> int:
        """Return the place that stands for the link between a site's relay and its learners."""
        return len(self.sites) + (self.hub is not None) + self._relays.index(site)

    def is_inside(self, place: int) -> bool:
        """Whether a place is the link inside a site."""
        return place >= len(self.sites) + (self.hub is not None)

    def next_relay(self, site: int) -> int | None:
        """Return the site whose relay a site's relay dials; None: it dials the shards."""
        above = self._above(site)
        return above if above is not None and self.sites[site].relay else None

    def _above(self, place: int) -> int | None:
        upstream = self.sites[place].upstream if place < len(self.sites) else ""
        return [site.name for site in self.sites].index(upstream) if upstream else None

    def _ways_out(self, place: int) -> list[int]:
        """Return the places whose links lead from a place to the middle of the network."""
        above = self._above(place)
        return [place, *([] if above is None else self._ways_out(above))]

    def route(self, a: int, b: int) -> list[tuple[int, bool]]:
        """Return the links on the way from one place to another: place, and whether upwards."""
        out, into = self._ways_out(a), self._ways_out(b)
        up = [(place, True) for place in out if place not in into]
        return up + [(place, False) for place in reversed(into) if place not in out]

    def capacity(self, place: int, *, up: bool) -> float:
        """Return the total bytes per second that can leave a place, or enter it."""
        link = self.places[place]
        own = place < len(self.sites) and not link.shared
        return (link.up if up else link.down) * (self.sites[place].learners if own else 1)

    def host(self, shard: int, shards: int) -> int:
        if self.syncer == HUB:
            return len(self.sites)
        if self.syncer == SPREAD:
            return shard * len(self.sites) // shards if shards > len(self.sites) else shard
        return [site.name for site in self.sites].index(self.syncer)

    def latency(self, a: int, b: int) -> float:
        """Return the one-way latency between two places, seconds."""
        return sum(self.places[place].latency_seconds for place, _ in self.route(a, b))

    def without_relays(self) -> Network:
        """Return the same links with learners that all dial the shards."""
        return replace(self, sites=tuple(replace(site, relay=False) for site in self.sites))

    def scaled(self, factor: float) -> Network:
        """Return the network with all bandwidths but the hub's multiplied by `factor`."""
        sites = tuple(replace(site, link=site.link.scaled(factor)) for site in self.sites)
        return replace(self, sites=sites)


def link_name(place: str, direction: str) -> str:
    """Return the name of a link in a sentence.

    >>> link_name("rome", "up"), link_name("inside rome", "down")
    ('the uplink of rome', 'the downlink inside rome')
    """
    return f"the {direction}link {'' if place.startswith(INSIDE) else 'of '}{place}"


def parse_link(text: str, *, latency_seconds: float = 0.0, shared: bool = True) -> Link:
    """Parse a link from UP or UP/DOWN."""
    up, down = _split_rates(text)
    try:
        return Link(
            up=parse_rate(up), down=parse_rate(down), latency_seconds=latency_seconds, shared=shared
        )
    except ValueError as error:
        raise ConfigError(f"link {text!r}: {error}") from None


def _split_rates(text: str) -> tuple[str, str]:
    """Split UP/DOWN; the slash of a unit such as Mbit/s is not a separator."""
    marked = text.replace("bit/s", "bit").replace("B/s", "B")
    up, slash, down = marked.partition("/")
    return up, down if slash else up


def parse_site(text: str) -> Site:
    """Parse a site from `SITE_FORM`."""
    name, *rest = text.split(":")
    marked = dict(each.split("=", 1) for each in rest if "=" in each)
    fields = [each for each in rest if each not in ("own", "shared", "relay") and "=" not in each]
    named = [each.partition("=")[0] for each in rest if each.startswith(("relay", "step="))]
    whole = bool(name) and len(fields) in (2, 3) and fields[0].isdecimal()
    if not whole or len(set(named)) < len(named) or not marked.keys() <= {"relay", "step"}:
        raise ConfigError(
            f"site {text!r} does not match {SITE_FORM}: write it as 'oslo:2:5Gbit/1Gbit:20ms'"
        )
    try:
        latency = parse_duration(fields[2]) if len(fields) == 3 else 0.0
        step = parse_duration(marked["step"]) if "step" in marked else None
    except ValueError as error:
        raise ConfigError(f"site {text!r}: {error}") from None
    link = parse_link(fields[1], latency_seconds=latency, shared="own" not in rest)
    return Site(name, int(fields[0]), link, step, "relay" in named, marked.get("relay", ""))


def equal_sites(count: int, learners: int, link: Link, *, relay: bool = False) -> tuple[Site, ...]:
    """Return identical sites, with the learners divided among them."""
    at_least(1, sites=count)
    if learners < count:
        raise ConfigError(
            f"learners={learners} is below sites={count}: a site needs at least one learner"
        )
    share = [learners // count + (i < learners % count) for i in range(count)]
    return tuple(Site(f"site-{i}", n, link, relay=relay) for i, n in enumerate(share))


def slowest(sites: Sequence[Site]) -> Link:
    """The link with the least bandwidth in its slower direction."""
    return min((site.link for site in sites), key=lambda link: link.least)
