"""The secure sum of one round: what its learners and its shard compute (rule 24).

A sum has four steps. A shard passes the messages of each step on:

1. *Claim.* A learner sends two fresh public keys, with the steps and tokens of its contribution.
   The learners that did so when the window closes are the *cohort*.
2. *Share.* A learner receives all claims. It divides two secrets among its neighbors in the cohort,
   encrypted for each: its private mask key, and the seed of its own mask.
3. *Mask.* A learner receives its neighbors' shares, and so learns which members have shared. It
   sends its integers plus its own mask, plus a mask for each neighbor with a greater name, minus
   one for each with a smaller name. In the sum, these cancel.
4. *Open.* The members whose integers arrived are the *survivors*. Each sends its shares of the own
   masks of survivors, and of the mask keys of the other members. The shard subtracts these masks.

A member answers each step once. The seed of a survivor and the mask key of another member need
more than half of the holders each. So no shard can obtain both of one learner from honest members,
whatever it requests. All keys are fresh, and every derived key depends on the whole cohort: members
that were sent different cohorts have masks that do not cancel.

Sources: Bonawitz et al., *Practical Secure Aggregation*, CCS 2017; for more than 32 members the
sparse graph of Bell et al., CCS 2020.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any, Protocol

from decoupled_diloco.errors import MergeError, ProtocolError
from decoupled_diloco.merge.fixed_point import Integers
from decoupled_diloco.privacy.keys import (
    SECRET_BYTES,
    SHARE_BYTES,
    Draw,
    KeyPair,
    coefficients_at_zero,
    digest_of,
    join,
    mask,
    seal,
    split,
    unseal,
)
from decoupled_diloco.protocol.machine_options import least_survivors
from decoupled_diloco.protocol.quotas import Quota, factors, party_of
from decoupled_diloco.protocol.secure_rounds import COMPLETE_MAX

DROPOUTS = 1 / 3
"""The share of dropouts with which a large cohort still opens its sum."""

COLLUDING = 1 / 5
"""The share of members in a large cohort that may collude with the syncer."""

_OPENS = 2.0**-10
_PRIVATE = 2.0**-40
"""Probabilities that a random graph is too sparse for these shares."""

TOKENS_FACTOR = 32.0
"""A member's tokens per step count up to this multiple of the cohort's (lower) median."""

SIGNATURE_BYTES = 64

COUNT_MAX = 2**53
"""The most steps or tokens of a claim: exact as a float."""


class Signer(Protocol):
    """A party's signing key."""

    def sign(self, message: bytes, /) -> bytes: ...


class Pins(Protocol):
    """The parties of a run, from a learner's own file.

    Attributes:
        least: The least number of parties in a sum.
    """

    @property
    def least(self) -> int: ...

    def party(self, learner: str) -> str:
        """Return the party of a learner.

        Raises:
            ProtocolError: It has none.
        """

    def verify(self, learner: str, message: bytes, signature: bytes) -> None:
        """Check a learner's signature.

        Raises:
            ProtocolError: The learner's party has not signed the message.
        """


def sum_name(run: str, fragment: int, base: str, digest: str) -> str:
    """Return what a claim is for: a contribution to a fragment, made from this base.

    Args:
        run: Id of the run.
        fragment: The fragment.
        base: The version of the base.
        digest: That of its values. A shard that publishes different values under one version, to
            make one contribution stand out, gets no sum.
    """
    return f"{run} fragment {fragment} base {base} {digest}"


@dataclass(frozen=True)
class Claim:
    """A learner's first message of a round.

    Attributes:
        steps, tokens: Counters of the contribution.
        mask_key, share_key: Fresh public keys, 32 bytes each.
        signature: The party's signature; empty without pinned keys.
    """

    learner: str
    steps: int
    tokens: int
    mask_key: bytes
    share_key: bytes
    signature: bytes = b""

    def signed_text(self, sum_name: str) -> bytes:
        """Return what the signature covers: a signature counts for one sum only."""
        counters = f"{self.learner}\0{self.steps}\0{self.tokens}\0{sum_name}".encode()
        return digest_of(b"decoupled-diloco claim", counters, self.mask_key, self.share_key)


@dataclass(frozen=True)
class Cohort:
    """The members of a sum, and what all of them must agree on.

    Attributes:
        sum_name: Names the run, fragment, base and round.
        claims: The members' claims, in the order of their names.
        bounds: B of each segment; see `fixed_point`.
        threshold: The least number of contributions in the sum, as set.
    """

    sum_name: str
    claims: tuple[Claim, ...]
    bounds: tuple[float, ...]
    threshold: int

    @cached_property
    def transcript(self) -> bytes:
        """A digest of everything that all members must have received alike."""
        parts = [self.sum_name.encode(), str(self.threshold).encode()]
        parts += [float(bound).hex().encode() for bound in self.bounds]
        for claim in self.claims:
            parts += [claim.signed_text(self.sum_name), claim.signature]
        return digest_of(*parts)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The members, in order."""
        return tuple(claim.learner for claim in self.claims)

    @cached_property
    def needed(self) -> int:
        """The least number of contributions with which the sum is opened."""
        return least_survivors(self.threshold, len(self.claims))

    @cached_property
    def shares_needed(self) -> int:
        """The number of shares that determine a secret: more than half of its holders."""
        if len(self.claims) <= COMPLETE_MAX:
            return self.needed
        return (degree(len(self.claims)) + 1) // 2 + 1

    @cached_property
    def _circle(self) -> tuple[str, ...]:
        # The order depends on all keys, so that no member can choose its neighbors.
        seed = self.transcript
        return tuple(sorted(self.names, key=lambda name: digest_of(seed, name.encode())))

    def holders(self, learner: str) -> tuple[str, ...]:
        """Return the members that hold shares of a member's secrets, itself included."""
        count = len(self.names)
        reach = degree(count) // 2
        if count <= COMPLETE_MAX or 2 * reach >= count - 1:
            return self.names
        at = self._circle.index(learner)
        around = (self._circle[(at + by) % count] for by in range(-reach, reach + 1))
        return tuple(sorted(around))

    def neighbors(self, learner: str) -> tuple[str, ...]:
        """Return the members with which a member has masks."""
        return tuple(name for name in self.holders(learner) if name != learner)

    def weights(
        self,
        weight: Callable[[float, float], float],
        steps_max: int,
        quotas: Sequence[Quota] = (),
    ) -> dict[str, float]:
        """Return the members' weights, which each of them computes from all claims.

        Args:
            weight: The weight of a contribution with these tokens and steps.
            steps_max: The most steps of one contribution that count.
            quotas: The limits of the parties' shares.
        """
        rates = sorted(claim.tokens / claim.steps for claim in self.claims)
        most = TOKENS_FACTOR * rates[(len(rates) - 1) // 2]
        found = {}
        for claim in self.claims:
            steps = min(claim.steps, steps_max)
            found[claim.learner] = weight(steps * min(most, claim.tokens / claim.steps), steps)
        of = {name: party_of(quotas, name) for name in found}
        limited = dict(factors(quotas, [(of[name], each) for name, each in found.items()]))
        return {name: each * limited.get(of[name], 1.0) for name, each in found.items()}

    def to_text(self) -> str:
        """Return the text for `read_cohort`."""
        claims = [
            [c.learner, c.steps, c.tokens, *map(_text, (c.mask_key, c.share_key, c.signature))]
            for c in self.claims
        ]
        return json.dumps([self.sum_name, claims, self.bounds, self.threshold])


def read_cohort(text: str) -> Cohort:
    """Read a cohort.

    Raises:
        ProtocolError: It is malformed.
    """
    try:
        sum_name, claims, bounds, threshold = json.loads(text)
        cohort = Cohort(
            str(sum_name),
            tuple(
                Claim(_name(name), _count(steps), _count(tokens), *map(_bytes, keys))
                for name, steps, tokens, *keys in claims
            ),
            tuple(float(bound) for bound in bounds),
            _count(threshold),
        )
        cohort.transcript  # noqa: B018 - it fails if a name is not a text that can be sent
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        raise ProtocolError(f"a cohort cannot be read: {error!r}") from error
    names = list(cohort.names)
    if names != sorted(set(names)):
        raise ProtocolError("a cohort names a member twice, or is not in order")
    if not all(math.isfinite(bound) and bound > 0 for bound in cohort.bounds):
        raise ProtocolError("a cohort has a bound that is not positive and finite")
    if any(len(key) != SECRET_BYTES for c in cohort.claims for key in (c.mask_key, c.share_key)):
        raise ProtocolError(f"a cohort has a key that is not of {SECRET_BYTES} bytes")
    return cohort


@cache
def degree(members: int) -> int:
    """Return the number of neighbors in a cohort, an even number if it is not complete.

    It is the least one with which a cohort of this size opens its sum in spite of `DROPOUTS`, and
    keeps its secrets in spite of `COLLUDING`, but for the probabilities above.
    """
    if members <= COMPLETE_MAX:
        return members - 1
    alive = members - math.ceil(members * DROPOUTS)
    bad = math.ceil(members * COLLUDING)
    for even in range(2, members - 1, 2):
        needed = (even + 1) // 2 + 1
        opens = members * _tail(members, members - alive, even + 1, even + 1 - needed + 1)
        private = members * _tail(members, bad, even + 1, needed)
        if opens <= _OPENS and private <= _PRIVATE:
            return even
    return members - 1


def _tail(total: int, marked: int, drawn: int, least: int) -> float:
    """Return the probability that at least ``least`` of ``drawn`` are marked ones."""
    cases = math.comb(total, drawn)
    ways = (
        math.comb(marked, hits) * math.comb(total - marked, drawn - hits)
        for hits in range(max(0, least), min(drawn, marked) + 1)
    )
    return sum(ways) / cases


@dataclass
class SumMember:
    """One learner in one sum. Its methods are called in order, each at most once.

    Args:
        learner: Its name.
        threshold: The least number of contributions that it accepts in a sum.
        draw: The source of randomness.
        signer: Its party's key; ``None`` if keys are not pinned.
        pins: The parties' keys; ``None`` if keys are not pinned.
    """

    learner: str
    threshold: int
    draw: Draw
    signer: Signer | None = None
    pins: Pins | None = None
    _claim: Claim | None = None
    _cohort: Cohort | None = None
    _senders: tuple[str, ...] = ()
    _received: dict[str, tuple[bytes, bytes]] = field(default_factory=dict)
    _is_masked: bool = False
    _answered: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self._masks = KeyPair(self.draw(SECRET_BYTES))
        self._shares = KeyPair(self.draw(SECRET_BYTES))
        self._own = self.draw(SECRET_BYTES)

    def claim(self, sum_name: str, steps: int, tokens: int) -> Claim:
        """Step 1: return the claim for this sum."""
        claim = Claim(self.learner, steps, tokens, self._masks.public, self._shares.public)
        if self.signer is not None:
            signature = self.signer.sign(claim.signed_text(sum_name))
            claim = Claim(
                *(claim.learner, steps, tokens, claim.mask_key, claim.share_key), signature
            )
        self._claim, self._sum_name = claim, sum_name
        return claim

    def share(self, cohort: Cohort) -> dict[str, bytes]:
        """Step 2: return the encrypted shares of the own secrets, by holder.

        Raises:
            ProtocolError: The cohort is too small or of another sum, does not contain this claim,
                or a signature is not valid.
        """
        if self._cohort is not None:
            raise ProtocolError("a second cohort was sent for one sum")
        if cohort.sum_name != self._sum_name:
            raise ProtocolError(f"the cohort is for {cohort.sum_name!r}, not {self._sum_name!r}")
        if self._claim not in cohort.claims:
            raise ProtocolError("the cohort has another claim of this learner: its key was swapped")
        if cohort.threshold < self.threshold or len(cohort.claims) < cohort.needed:
            raise ProtocolError(
                f"a cohort of {len(cohort.claims)} learners with threshold={cohort.threshold} is "
                f"too small: at least {max(self.threshold, cohort.needed)} are needed"
            )
        if self.pins is not None:
            for claim in cohort.claims:
                text = claim.signed_text(cohort.sum_name)
                self.pins.verify(claim.learner, text, claim.signature)
        self._require_parties(cohort.names)
        self._cohort = cohort
        holders, needed = cohort.holders(self.learner), cohort.shares_needed
        parts = zip(
            split(self._masks.private, len(holders), needed, self.draw),
            split(self._own, len(holders), needed, self.draw),
            strict=True,
        )
        sealed = {}
        for holder, (of_key, of_seed) in zip(holders, parts, strict=True):
            if holder == self.learner:
                self._received[holder] = (of_key, of_seed)
            else:
                secret = self._agreed(holder, self.learner, holder)
                sealed[holder] = seal(secret, of_key + of_seed)
        return sealed

    def mask(self, sealed: Mapping[str, bytes], integers: Integers) -> Integers:
        """Step 3: add the masks to the own integers.

        Args:
            sealed: The encrypted shares for this member, by sender. The senders are those
                neighbors that have shared.
            integers: The own contribution; changed in place.

        Raises:
            ProtocolError: A sender is not a neighbor, too few have shared, or a share was changed.
        """
        cohort = self._cohort
        if cohort is None or self._is_masked:
            raise ProtocolError("shares were sent before the cohort, or twice for one sum")
        senders = sorted(sealed)
        if not set(senders) <= set(cohort.neighbors(self.learner)):
            raise ProtocolError("shares came from learners that are no neighbors in the cohort")
        if len(senders) + 1 < cohort.shares_needed:
            raise ProtocolError(
                f"{len(senders) + 1} members have shared, {cohort.shares_needed} are needed"
            )
        for sender in senders:
            try:
                parts = unseal(self._agreed(sender, sender, self.learner), sealed[sender])
            except ProtocolError as error:
                raise ProtocolError(f"{error} from {sender}") from error
            if len(parts) != 2 * SHARE_BYTES:
                raise ProtocolError(f"the share of {sender} has {len(parts)} bytes")
            self._received[sender] = (parts[:SHARE_BYTES], parts[SHARE_BYTES:])
        self._senders = tuple(senders)
        self._is_masked = True
        sizes = (integers.elements.numel(), integers.scalars.numel())
        integers.add(mask(self._own, *sizes))
        keys = {claim.learner: claim.mask_key for claim in cohort.claims}
        for other in senders:
            secret = pair_secret(self._masks, keys[other], cohort)
            integers.add(mask(secret, *sizes), 1 if self.learner < other else -1)
        return integers

    def open(self, survivors: Collection[str]) -> dict[str, bytes]:
        """Step 4: return the shares that open the sum of the survivors, by member.

        For a survivor it is the share of its own mask's seed, for another sender that of its mask
        key. The same request is answered again, because its answer may have been lost; no other
        request is.

        Raises:
            ProtocolError: The survivors are too few, unknown, without this learner, or others than
                in the first request.
        """
        cohort, named = self._cohort, tuple(sorted(survivors))
        if cohort is None or not self._is_masked:
            raise ProtocolError("the sum is to be opened before this learner has masked its part")
        if self._answered and self._answered != named:
            raise ProtocolError(
                "the shard requests the shares of one sum for two sets of survivors: it could "
                "open a single contribution with them, so the second request is refused"
            )
        if not set(named) <= set(cohort.names) or self.learner not in named:
            raise ProtocolError("the survivors of a sum are not all in its cohort")
        if len(named) < cohort.needed:
            raise ProtocolError(f"{len(named)} survivors are too few: {cohort.needed} are needed")
        self._require_parties(named)
        self._answered = named
        alive = set(named)
        return {
            name: of_seed if name in alive else of_key
            for name, (of_key, of_seed) in self._received.items()
        }

    def _require_parties(self, learners: Collection[str]) -> None:
        """Refuse a sum of too few parties: one party may have, or invent, many learners."""
        if self.pins is not None:
            found = {self.pins.party(learner) for learner in learners}
            if len(found) < self.pins.least:
                raise ProtocolError(
                    f"a sum of {len(found)} parties is too small: at least {self.pins.least} are "
                    "needed"
                )

    def _agreed(self, other: str, sender: str, holder: str) -> bytes:
        cohort = self._cohort
        assert cohort is not None
        key = next(claim.share_key for claim in cohort.claims if claim.learner == other)
        purpose = digest_of(b"share", cohort.transcript, sender.encode(), holder.encode())
        return self._shares.agree(key, purpose)


def pair_secret(keys: KeyPair, other: bytes, cohort: Cohort) -> bytes:
    """Return the secret of the mask that two members have in common."""
    return keys.agree(other, digest_of(b"mask", cohort.transcript))


@dataclass(frozen=True)
class Opening:
    """What a shard has for the opening of a sum.

    Attributes:
        cohort: The cohort.
        shared: The members that have shared, and so have masks with one another.
        survivors: The members whose integers are in the sum.
        answers: The shares, by the member that sent them and the member that they are of.
        steps_max: The most steps of one contribution that count.
        quotas: The limits of the parties' shares.
    """

    cohort: Cohort
    shared: tuple[str, ...]
    survivors: tuple[str, ...]
    answers: Mapping[str, Mapping[str, bytes]]
    steps_max: int
    quotas: tuple[Quota, ...] = ()

    def unmask(self, total: Integers) -> None:
        """Subtract the masks from the sum, in place; see the function `unmask`."""
        unmask(self.cohort, self.shared, self.survivors, self.answers, total)

    def weights(self, weight: Callable[[float, float], float]) -> tuple[list[float], float]:
        """Return the weights of the contributions in the sum, and the cohort's largest one."""
        found = self.cohort.weights(weight, self.steps_max, self.quotas)
        return [found[name] for name in self.survivors], max(found.values())


def unmask(
    cohort: Cohort,
    shared: Collection[str],
    survivors: Collection[str],
    answers: Mapping[str, Mapping[str, bytes]],
    total: Integers,
) -> None:
    """Subtract the masks from a sum of the survivors' masked integers, in place.

    Args:
        cohort: The cohort.
        shared: The members that have shared, and so have masks with one another.
        survivors: The members whose integers are in the sum.
        answers: The shares, by the member that sent them and the member that they are of.
        total: The sum.

    Raises:
        MergeError: Too few shares arrived for one secret, or they contradict each other.
    """
    alive = set(survivors)
    sizes = (total.elements.numel(), total.scalars.numel())
    keys = {claim.learner: claim.mask_key for claim in cohort.claims}
    coefficients: dict[tuple[int, ...], list[int]] = {}
    for name in sorted(shared):
        secret = _joined(cohort, name, answers, coefficients)
        if name in alive:
            total.add(mask(secret, *sizes), -1)
            continue
        try:
            pair = KeyPair(secret)
        except ValueError as error:
            raise MergeError(f"the mask key of {name} cannot be opened: {error}") from error
        if pair.public != keys[name]:
            raise MergeError(f"the shares of {name} do not belong to its mask key")
        for other in cohort.neighbors(name):
            if other in alive:
                # The survivor added this mask with the opposite sign.
                left = mask(_pair_secret(pair, other, keys[other], cohort), *sizes)
                total.add(left, -1 if other < name else 1)


def _pair_secret(pair: KeyPair, other: str, key: bytes, cohort: Cohort) -> bytes:
    try:
        return pair_secret(pair, key, cohort)
    except ProtocolError as error:
        raise MergeError(f"the mask of {other} cannot be opened: {error}") from error


def _joined(
    cohort: Cohort,
    name: str,
    answers: Mapping[str, Mapping[str, bytes]],
    coefficients: dict[tuple[int, ...], list[int]],
) -> bytes:
    """Return a member's secret. The coefficients of equal holders are computed once."""
    holders = {holder: number for number, holder in enumerate(cohort.holders(name), start=1)}
    found = {
        number: share
        for holder, number in holders.items()
        if (share := answers.get(holder, {}).get(name)) is not None
    }
    if len(found) < cohort.shares_needed:
        raise MergeError(
            f"{len(found)} shares of {name} have arrived, {cohort.shares_needed} are needed"
        )
    used = tuple(sorted(found))[: cohort.shares_needed]
    if used not in coefficients:
        coefficients[used] = coefficients_at_zero(used)
    try:
        return join([found[number] for number in used], coefficients[used])
    except ProtocolError as error:
        raise MergeError(f"the secret of {name} cannot be opened: {error}") from error


def shares_text(shares: Mapping[str, bytes]) -> str:
    """Return shares as text for `read_shares`."""
    return json.dumps({name: _text(share) for name, share in shares.items()})


def read_shares(text: str) -> dict[str, bytes]:
    """Read shares.

    Raises:
        ProtocolError: They are malformed.
    """
    try:
        return {str(name): _bytes(share) for name, share in _object(json.loads(text)).items()}
    except (ValueError, TypeError, RecursionError) as error:
        raise ProtocolError(f"the shares of a sum cannot be read: {error!r}") from error


def claim_text(claim: Claim) -> str:
    """Return a claim's keys as text for `read_claim`."""
    return json.dumps([_text(claim.mask_key), _text(claim.share_key), _text(claim.signature)])


def read_claim(learner: str, steps: int, tokens: int, text: str) -> Claim:
    """Read a claim.

    Raises:
        ProtocolError: It is malformed.
    """
    try:
        mask_key, share_key, signature = map(_bytes, json.loads(text))
    except (ValueError, TypeError, RecursionError) as error:
        raise ProtocolError(f"the keys of {learner} cannot be read: {error!r}") from error
    if len(mask_key) != SECRET_BYTES or len(share_key) != SECRET_BYTES:
        raise ProtocolError(f"the keys of {learner} are not of {SECRET_BYTES} bytes")
    if len(signature) not in (0, SIGNATURE_BYTES):
        raise ProtocolError(f"the signature of {learner} is not of {SIGNATURE_BYTES} bytes")
    for key in (mask_key, share_key):  # a key of low order would agree with no other
        KeyPair(b"\x01" * SECRET_BYTES).agree(key, b"check")
    return Claim(learner, steps, tokens, mask_key, share_key, signature)


def names_text(names: Iterable[str]) -> str:
    """Return names as text for `read_names`."""
    return json.dumps(list(names))


def read_names(text: str) -> tuple[str, ...]:
    """Read names.

    Raises:
        ProtocolError: They are malformed.
    """
    try:
        names = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"the survivors of a sum cannot be read: {error!r}") from error
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ProtocolError("the survivors of a sum are not a list of names")
    return tuple(names)


def _name(value: Any) -> str:
    if not isinstance(value, str) or not value.isascii():
        raise TypeError("a name is not a text of ASCII characters")
    return value


def _count(value: Any) -> int:
    if type(value) is not int or not 0 < value <= COUNT_MAX:
        raise ValueError("a count is not a whole number from 1 to 2^53")
    return value


def _object(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"{type(value).__name__} instead of an object")
    return value


def _text(value: bytes) -> str:
    return base64.b64encode(value).decode("ascii")


def _bytes(text: Any) -> bytes:
    return base64.b64decode(text, validate=True)
