"""`parties.toml`: the organizations that train one model together, and what each may do.

Every party holds a copy of the file. The syncer reads its own copy, and a learner reads that of its
party: it never accepts a key or a limit from the syncer. `Parties.digest` is equal for equal files.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, ConfigDict, Field, PlainSerializer, model_validator

from decoupled_diloco.config.settings import NAME, Settings
from decoupled_diloco.config.signing_keys import PublicKey, SigningKey, load_signing_key
from decoupled_diloco.config.toml_tables import read_tables
from decoupled_diloco.errors import ConfigError
from decoupled_diloco.protocol.quotas import is_one_of, matches

_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\*?")

ROUNDING = 1e-9
"""Shares whose sum differs from 1 by less count as 1: 0.7 + 0.2 + 0.1 is less than 1."""

ADD_LEARNER = (
    "add its name or a pattern to the learners of one party in parties.toml, in every copy of the "
    "file"
)
"""The fix for a learner without a party."""


def _key_of(value: object) -> object:
    return PublicKey.parse(value) if isinstance(value, str) else value


KeyText = Annotated[PublicKey, BeforeValidator(_key_of), PlainSerializer(str)]
"""A public key as it is written in a file."""


class PartySettings(Settings):
    """Table `[[parties]]`: one organization."""

    table: ClassVar[str] = "[[parties]]"
    model_config = ConfigDict(arbitrary_types_allowed=True)

    name: str = Field(pattern=NAME)
    """Name of the party. Its members read the live page and `ddiloco status` with a token or
    certificate of this name, or of one of its learners."""

    learners: tuple[str, ...] = Field(strict=False)
    """Names of the party's learners. A name may end with "*", which stands for any further
    characters: "hospital-a-*"."""

    key: KeyText
    """The party's public signing key, "ed25519:BASE64", as `ddiloco parties create-key` prints
    it."""

    share_min: float = Field(default=0.0, ge=0, le=1)
    """Smallest share of the party in the weight of each merge in which it takes part, 0 to 1."""

    share_max: float = Field(default=1.0, gt=0, le=1)
    """Largest share of the party in the weight of a merge, greater than 0, at most 1."""

    sees: Literal["own", "all"] = "own"
    """Whose learners the party sees on the live page and in `ddiloco status`: its own, or all."""

    may_stop: bool = False
    """Whether the party may end the run with `ddiloco stop URL`. The operator always may."""

    def has(self, learner: str) -> bool:
        """Whether a learner is of this party."""
        return is_one_of(self.learners, learner)

    @model_validator(mode="after")
    def _check(self) -> PartySettings:
        if not self.learners:
            raise ConfigError(
                f"learners=[] of party {self.name!r} in [[parties]] is empty: list the names of "
                f'its learners, for example learners = ["{self.name}-*"]'
            )
        for pattern in self.learners:
            if not _PATTERN.fullmatch(pattern):
                raise ConfigError(
                    f"learner {pattern!r} of party {self.name!r} in [[parties]] is not a valid "
                    "name: use letters, digits, '.', '_' and '-', with '*' at the end only"
                )
        if self.share_min > self.share_max:
            raise ConfigError(
                f"share_min={self.share_min} of party {self.name!r} in [[parties]] exceeds "
                f"share_max={self.share_max}: lower share_min or raise share_max"
            )
        return self


class Parties(Settings):
    """All parties of a run, as `load_parties` reads them."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    parties: tuple[PartySettings, ...] = Field(strict=False, min_length=1)
    """The parties, in the order of the file."""

    syncer_key: KeyText | None = None
    """The public key that signs the records of merges, "ed25519:BASE64", if the parties have agreed
    on one. The shards then start only with this key (`signing_key` in `[syncer]`), and `ddiloco
    audit` accepts no other."""

    least_parties: int | None = Field(default=None, ge=2)
    """The least number of parties in a secure sum, at least 2. A learner takes part in no sum of
    fewer, whatever settings the syncer has, and in no run without secure sums. Default: 2, in a run
    with secure sums."""

    def of_learner(self, learner: str) -> PartySettings:
        """Return the party of a learner.

        Raises:
            ConfigError: No party has this learner.
        """
        party = self.find(learner)
        if party is None:
            raise ConfigError(f"learner {learner!r} belongs to no party: {ADD_LEARNER}")
        return party

    def find(self, learner: str) -> PartySettings | None:
        """Return the party of a learner; `None` if no party has it."""
        return next((party for party in self.parties if party.has(learner)), None)

    def viewer(self, names: Iterable[str]) -> PartySettings | None:
        """Return the party whose lanes alone a viewer may see; `None`: it may see all.

        Args:
            names: The names that its token and certificate prove: of a party, a learner, or another
                process of the run. Without any, it has the token of the whole run.
        """
        found = {party.name: party for name in names if (party := self.of_name(name)) is not None}
        own = [party for party in found.values() if party.sees == "own"]
        return own[0] if own and len(own) == len(found) else None

    def of_name(self, name: str) -> PartySettings | None:
        """Return the party with this name or this learner; `None`: there is none."""
        named = next((party for party in self.parties if party.name == name), None)
        return named or self.find(name)

    @property
    def has_quotas(self) -> bool:
        """Whether a party's share in a merge is limited."""
        return any(party.share_min > 0 or party.share_max < 1 for party in self.parties)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the meaning of the file: the order of entries and comments do not count."""
        entries = [party.model_dump(mode="json") for party in self.parties]
        for entry in entries:
            entry["learners"] = sorted(entry["learners"])
        entries.sort(key=lambda entry: str(entry["name"]))
        key = None if self.syncer_key is None else str(self.syncer_key)
        least = [] if self.least_parties is None else [{"least_parties": self.least_parties}]
        text = json.dumps(
            [key, *least, *entries], sort_keys=True, separators=(",", ":"), ensure_ascii=True
        )
        return hashlib.sha256(text.encode()).hexdigest()

    @model_validator(mode="after")
    def _check_against_each_other(self) -> Parties:
        by_name: dict[str, PartySettings] = {}
        by_key: dict[bytes, str] = {}
        for party in self.parties:
            if party.name in by_name:
                raise ConfigError(
                    f"name={party.name!r} occurs twice in [[parties]]: give each party its own name"
                )
            if party.key.raw in by_key:
                raise ConfigError(
                    f"parties {by_key[party.key.raw]!r} and {party.name!r} in [[parties]] have the "
                    "same key: create one for each with ddiloco parties create-key"
                )
            for other in by_name.values():
                self._refuse_common_learner(other, party)
            by_name[party.name], by_key[party.key.raw] = party, party.name
        if self.least_parties is not None and self.least_parties > len(self.parties):
            raise ConfigError(
                f"least_parties={self.least_parties} exceeds the {len(self.parties)} [[parties]], "
                "so no sum would ever be opened: lower it"
            )
        least = sum(party.share_min for party in self.parties)
        most = sum(party.share_max for party in self.parties)
        if least > 1 + ROUNDING:
            raise ConfigError(
                f"share_min of all [[parties]] is {least:g} in sum, more than 1: lower some"
            )
        if most < 1 - ROUNDING:
            raise ConfigError(
                f"share_max of all [[parties]] is {most:g} in sum, less than 1: raise some"
            )
        return self

    @staticmethod
    def _refuse_common_learner(one: PartySettings, two: PartySettings) -> None:
        for first in one.learners:
            for second in two.learners:
                # A pattern is a prefix, so two patterns overlap if one begins with the other.
                if matches(first, second.rstrip("*")) or matches(second, first.rstrip("*")):
                    raise ConfigError(
                        f"learners {first!r} of party {one.name!r} and {second!r} of party "
                        f"{two.name!r} in [[parties]] overlap, so a learner could have two "
                        "parties: change one of them"
                    )


def load_parties(path: str | Path) -> Parties:
    """Read a file of parties.

    Raises:
        ConfigError: It cannot be read, or an entry is not valid.
    """
    path = Path(path)
    if not path.is_file():
        raise ConfigError(
            f"parties={str(path)!r} is not a file: pass the path of the parties.toml that all "
            "parties hold"
        )
    tables = read_tables(path)
    try:
        return Parties(**tables)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


@dataclass(frozen=True)
class OwnParty:
    """A learner's party, from the files on the learner's machine.

    Attributes:
        parties: The party's own copy of the file.
        settings: The party's entry in it.
        key: The party's private key; `None`: it does not sign.
    """

    parties: Parties
    settings: PartySettings
    key: SigningKey | None

    @classmethod
    def load(cls, parties: Parties, learner: str, key: Path | None) -> OwnParty:
        """Return the party of a learner.

        Args:
            parties: The party's own copy of the file.
            learner: The learner's name.
            key: File with the party's private key, or a folder with the file NAME.key.

        Raises:
            ConfigError: No party has this learner, or the key cannot be read or is of another
                party.
        """
        party = parties.of_learner(learner)
        if key is None:
            return cls(parties, party, None)
        path = key / f"{party.name}.key" if key.is_dir() else key
        signing = load_signing_key(path)
        if signing.public != party.key:
            raise ConfigError(
                f"signing key {str(path)!r} belongs to {signing.public}, but party {party.name!r} "
                f"of learner {learner!r} has the key {party.key}: pass the key of this party, or "
                "correct parties.toml"
            )
        return cls(parties, party, signing)

    def require_same(self, theirs: Parties | None) -> None:
        """Check that the syncer has the same parties as this learner's own file.

        Raises:
            ConfigError: It has others, or none.
        """
        if theirs is None or theirs.digest != self.parties.digest:
            there = "has no parties" if theirs is None else f"has the digest {theirs.digest[:12]}…"
            raise ConfigError(
                f"the syncer {there}, but this learner's parties.toml has the digest "
                f"{self.parties.digest[:12]}…: compare both files with ddiloco parties check, and "
                "use the same file"
            )


def read_members(tables: dict[str, Any]) -> None:
    """Replace the name of the parties' file in a run's tables by its contents, in place.

    Raises:
        ConfigError: The file cannot be read, or an entry is not valid.
    """
    privacy = tables.get("privacy")
    if isinstance(privacy, dict) and isinstance(privacy.get("parties"), str):
        found = load_parties(privacy["parties"])
        del privacy["parties"]
        privacy["members"], privacy["syncer_key"] = found.parties, found.syncer_key
        privacy["least_parties"] = found.least_parties
