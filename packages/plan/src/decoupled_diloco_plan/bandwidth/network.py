"""Sites with learners, the location of the shards, and the links between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from decoupled_diloco.errors import ConfigError
from decoupled_diloco.units import parse_duration, parse_rate
from decoupled_diloco_plan.checks import above, at_least

SITE_FORM = "NAME:LEARNERS:UP[/DOWN][:LATENCY][:own][:step=TIME]"
"""Format of a `--site` value."""

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

    def __post_init__(self) -> None:
        if self.step_seconds is not None:
            above(0, **{f"step_seconds of site {self.name!r}": self.step_seconds})
        at_least(1, **{f"learners of site {self.name!r}": self.learners})


@dataclass(frozen=True, slots=True)
class Network:
    """The sites, and the location of the shards."""

    sites: tuple[Site, ...]  # at least one
    syncer: str = SPREAD  # `SPREAD`, `HUB`, or the name of a site
    hub: Link | None = None  # the hub's link, if the syncer is there

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
    def places(self) -> tuple[Link, ...]:
        """The links of all sites, then the hub's link if there is a hub."""
        links = tuple(site.link for site in self.sites)
        return links if self.hub is None else (*links, self.hub)

    def names(self) -> tuple[str, ...]:
        return (*(site.name for site in self.sites), *((HUB,) if self.hub else ()))

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
        return 0.0 if a == b else self.places[a].latency_seconds + self.places[b].latency_seconds

    def scaled(self, factor: float) -> Network:
        """Return the network with all bandwidths but the hub's multiplied by `factor`."""
        sites = tuple(replace(site, link=site.link.scaled(factor)) for site in self.sites)
        return replace(self, sites=sites)


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
    """Parse a site from NAME:LEARNERS:UP[/DOWN][:LATENCY][:own][:step=TIME]."""
    name, *rest = text.split(":")
    steps = [each.removeprefix("step=") for each in rest if each.startswith("step=")]
    fields = [each for each in rest if each not in ("own", "shared") and "=" not in each]
    marked = [each for each in rest if "=" in each]
    whole = bool(name) and len(fields) in (2, 3) and fields[0].isdecimal()
    if not whole or len(steps) > 1 or len(marked) > len(steps):
        raise ConfigError(
            f"site {text!r} does not match {SITE_FORM}: write it as 'oslo:2:5Gbit/1Gbit:20ms'"
        )
    try:
        latency = parse_duration(fields[2]) if len(fields) == 3 else 0.0
        step = parse_duration(steps[0]) if steps else None
    except ValueError as error:
        raise ConfigError(f"site {text!r}: {error}") from None
    link = parse_link(fields[1], latency_seconds=latency, shared="own" not in rest)
    return Site(name, int(fields[0]), link, step)


def equal_sites(count: int, learners: int, link: Link) -> tuple[Site, ...]:
    """Return identical sites, with the learners divided among them."""
    at_least(1, sites=count)
    if learners < count:
        raise ConfigError(
            f"learners={learners} is below sites={count}: a site needs at least one learner"
        )
    share = [learners // count + (i < learners % count) for i in range(count)]
    return tuple(Site(f"site-{i}", n, link) for i, n in enumerate(share))


def slowest(sites: Sequence[Site]) -> Link:
    """The link with the least bandwidth in its slower direction."""
    return min((site.link for site in sites), key=lambda link: link.least)
