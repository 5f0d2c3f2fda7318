"""Names of published copies, of askings for contributions, and who holds what."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Version:
    """Which published copy of a fragment: (shard term, counter), ordered lexicographically.

    A shard raises its term, durably, at every start, so that two lives of a shard can never issue
    the same version (rule 10).
    """

    term: int
    counter: int

    def __str__(self) -> str:
        return f"{self.term}.{self.counter}"

    @classmethod
    def read(cls, text: str) -> Version:
        """The version that is written like this.

        >>> Version.read("2.57")
        Version(term=2, counter=57)
        """
        term, counter = text.split(".")
        return cls(int(term), int(counter))


@dataclass(frozen=True, slots=True, order=True)
class Asking:
    """Names one asking for a contribution: the shard's term, and a number within it.

    A contribution bears the name of the asking that it answers. Two lives of a shard never give the
    same name twice.
    """

    term: int
    number: int

    def __str__(self) -> str:
        return f"{self.term}.{self.number}"


@dataclass(frozen=True, slots=True)
class Holding:
    """Learner → shard: I hold this version of the published copy.

    ``digest`` and ``seal`` as the shard has announced it; a shard takes notice only of what it has.
    """

    fragment: int
    version: Version
    digest: str = ""
    seal: str = ""
