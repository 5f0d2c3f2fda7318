"""Attackers of secure sums: a curious syncer, and one that lies (docs/security.md)."""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from decoupled_diloco.config.parties import Parties
from decoupled_diloco.config.signing_keys import create_signing_key
from decoupled_diloco.errors import ProtocolError
from decoupled_diloco.learner.masked_sums import PinnedParties
from decoupled_diloco.merge.fixed_point import Integers
from decoupled_diloco.privacy import secure_sum
from decoupled_diloco.privacy.keys import KeyPair
from decoupled_diloco.privacy.secure_sum import (
    Claim,
    Cohort,
    claim_text,
    pair_secret,
    read_claim,
    read_cohort,
    sum_name,
)
from unit.privacy.sums import SecureSum

Mask = Callable[[bytes, int, int], Integers]


def completed(sums: SecureSum, late: str = "") -> SecureSum:
    """Run a sum to its end; the payload of a ``late`` learner arrives after the others'."""
    sums.claim()
    sums.share()
    sums.mask(late=[late])
    sums.open().unmask(sums.total)
    return sums


def shifted(change: dict[bytes, Integers], original: Mask) -> Mask:
    """Return the streams of masks, with some of them shifted.

    Without the secret, its stream is indistinguishable from uniform integers. A shift leaves
    uniform integers uniform, so a run with shifted masks has the same distribution.
    """

    def mask(secret: bytes, elements: int, scalars: int) -> Integers:
        stream = original(secret, elements, scalars)
        if secret in change:
            stream.add(change[secret])
        return stream

    return mask


def with_other_data(sums: SecureSum, name: str, other: str | None) -> SecureSum:
    """Return a sum with the same secrets, in which one learner has other data.

    The data of ``other`` change by as much the other way, so the sum stays the same.
    """
    changed = SecureSum(sums.count, sums.threshold, sums.seed)
    original = changed.integers

    def integers(learner: str) -> Integers:
        found = original(learner)
        if learner in (name, other):
            found.add(difference(found), 1 if learner == name else -1)
        return found

    changed.integers = integers  # type: ignore[method-assign]
    return changed


def difference(like: Integers) -> Integers:
    """Return an arbitrary change of a contribution."""
    generator = torch.Generator().manual_seed(99)
    return Integers(
        torch.randint(-(2**20), 2**20, like.elements.shape, dtype=torch.int32, generator=generator),
        torch.randint(-(2**40), 2**40, like.scalars.shape, dtype=torch.int64, generator=generator),
    )


@pytest.mark.parametrize("count", [3, 5, 8])
def test_a_curious_syncer_cannot_tell_two_learners_with_the_same_sum_apart(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sums = completed(SecureSum(count))
    one, two = sums.names[0], sums.names[count // 2]
    # Both survive, so their own masks are opened. The mask that they share hides the exchange.
    secret = pair_secret(sums.members[one]._masks, sums.members[two]._masks.public, sums.cohort)
    minus = difference(sums.plain)
    minus.elements.neg_()
    minus.scalars.neg_()
    monkeypatch.setattr(secure_sum, "mask", shifted({secret: minus}, secure_sum.mask))
    other = completed(with_other_data(sums, one, two))
    assert torch.equal(other.integers(one).elements, sums.integers(one).elements) is False
    assert other.view == sums.view, "every message has the same bits"
    assert torch.equal(other.total.elements, sums.total.elements)
    assert torch.equal(other.total.scalars, sums.total.scalars)


def test_a_late_payload_reveals_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    late = "learner-002"
    sums = completed(SecureSum(5), late)
    # Its mask key is opened, so the masks that it shares are known. Its own mask hides its data.
    secret = sums.members[late]._own
    minus = difference(sums.plain)
    minus.elements.neg_()
    minus.scalars.neg_()
    monkeypatch.setattr(secure_sum, "mask", shifted({secret: minus}, secure_sum.mask))
    other = completed(with_other_data(sums, late, None), late)
    assert other.view == sums.view, "every message has the same bits"


def test_all_secrets_are_fresh_in_each_round() -> None:
    first, second = SecureSum(4), SecureSum(4)
    second.members = {
        name: secure_sum.SumMember(name, 2, first.rng.randbytes) for name in second.names
    }
    completed(first)
    completed(second)
    assert torch.equal(first.plain.elements, second.plain.elements), "the data are the same"
    for name in first.names:
        ours, theirs = first.members[name], second.members[name]
        assert ours._masks.private != theirs._masks.private
        assert ours._shares.private != theirs._shares.private
        assert ours._own != theirs._own
        a, b = first.view.payloads[name], second.view.payloads[name]
        equal = sum(x == y for x, y in zip(a, b, strict=True))
        assert equal < len(a) / 8, "the payloads differ as random bytes do"
        assert first.view.shares[name] != second.view.shares[name]


def test_one_claim_in_two_cohorts_has_two_masks() -> None:
    sums = SecureSum(4)
    cohort = sums.claim()
    keys = KeyPair(b"k" * 32)
    fewer = Cohort("sum", cohort.claims[:3], cohort.bounds, 2)
    other = cohort.claims[1].mask_key
    assert pair_secret(keys, other, cohort) != pair_secret(keys, other, fewer)


@pytest.mark.parametrize("count", [3, 4, 5, 6])
def test_a_lying_shard_never_gets_both_secrets_of_a_learner(count: int) -> None:
    """Each member is asked for a set of survivors that the shard chooses for it alone."""
    sums = SecureSum(count)
    sums.claim()
    sums.share()
    sums.mask()
    victim, needed = sums.names[0], sums.cohort.shares_needed
    asked = 0
    for with_victim in itertools.product([True, False], repeat=count - 1):
        of_seed = of_key = 0
        for name, alive in zip(sums.names, (True, *with_victim), strict=True):
            member = copy.copy(sums.members[name])
            survivors = set(sums.names) if alive else set(sums.names) - {victim}
            try:
                answer = member.open(survivors)
            except ProtocolError:
                continue  # too few survivors
            of_seed += answer[victim] == member._received[victim][1]
            of_key += answer[victim] == member._received[victim][0]
            asked += 1
            with pytest.raises(ProtocolError, match=r"two sets of survivors|too few|not all in"):
                member.open(survivors ^ {sums.names[-1] if name != sums.names[-1] else victim})
            assert member.open(survivors) == answer, "a repeated request gets the same answer"
        assert of_seed < needed or of_key < needed
    assert asked


def test_a_shard_cannot_open_a_sum_below_the_threshold() -> None:
    sums = SecureSum(6, threshold=5)
    sums.claim()
    sums.share()
    sums.mask()
    member = sums.members[sums.names[0]]
    with pytest.raises(ProtocolError, match="4 survivors are too few: 5 are needed"):
        member.open(sums.names[:4])


def test_a_member_refuses_a_small_cohort() -> None:
    sums = SecureSum(4, threshold=3)
    cohort = sums.claim()
    small = Cohort("sum", cohort.claims[:2], cohort.bounds, 2)
    with pytest.raises(ProtocolError, match="a cohort of 2 learners with threshold=2 is too small"):
        sums.members[sums.names[0]].share(small)


def test_a_member_shares_once_and_masks_once() -> None:
    sums = SecureSum(3)
    cohort = sums.claim()
    sums.share()
    member = sums.members[sums.names[0]]
    with pytest.raises(ProtocolError, match="a second cohort was sent for one sum"):
        member.share(cohort)
    sums.mask()
    with pytest.raises(ProtocolError, match="twice for one sum"):
        member.mask(sums.for_member(sums.names[0]), sums.integers(sums.names[0]))


def test_nothing_is_opened_before_it_is_masked() -> None:
    sums = SecureSum(3)
    sums.claim()
    sums.share()
    with pytest.raises(ProtocolError, match="before this learner has masked its part"):
        sums.members[sums.names[0]].open(sums.names)


def test_a_changed_share_is_noticed() -> None:
    sums = SecureSum(3)
    sums.claim()
    sums.share()
    first, second = sums.names[:2]
    parts = sums.for_member(first)
    parts[second] = parts[second][:-1] + bytes([parts[second][-1] ^ 1])
    with pytest.raises(ProtocolError, match="an encrypted share was changed on its way"):
        sums.members[first].mask(parts, sums.integers(first))


def test_a_swapped_key_of_this_learner_is_noticed() -> None:
    sums = SecureSum(3)
    cohort = sums.claim()
    claims = list(cohort.claims)
    keys = KeyPair(b"a" * 32).public, KeyPair(b"b" * 32).public
    claims[0] = Claim(claims[0].learner, claims[0].steps, claims[0].tokens, *keys)
    with pytest.raises(ProtocolError, match="its key was swapped"):
        sums.members[sums.names[0]].share(Cohort("sum", tuple(claims), cohort.bounds, 2))


def pinned(sums: SecureSum, folder: Path, parties: int = 0, least: int | None = None) -> None:
    """Give each learner its party's key, and the keys of all others."""
    count = parties or sums.count
    keys = [create_signing_key(folder / f"{number}.key") for number in range(count)]
    listed = [
        {"name": f"party-{n}", "learners": sums.names[n::count], "key": key.public}
        for n, key in enumerate(keys)
    ]
    pins = PinnedParties(Parties(parties=listed, least_parties=least))
    for number, member in enumerate(sums.members.values()):
        member.signer, member.pins = keys[number % count], pins


def test_pinned_keys_agree(tmp_path: Path) -> None:
    sums = SecureSum(4)
    pinned(sums, tmp_path)
    completed(sums)
    assert torch.equal(sums.total.scalars, sums.plain.scalars)


@pytest.mark.parametrize("swapped", ["mask_key", "share_key", "tokens", "learner"])
def test_a_syncer_that_swaps_a_pinned_key_is_detected(swapped: str, tmp_path: Path) -> None:
    """With its own keys for all other members, it could open the one contribution left."""
    sums = SecureSum(4)
    pinned(sums, tmp_path)
    cohort = sums.claim()
    own = KeyPair(b"k" * 32).public
    forged = {"mask_key": own, "share_key": own, "tokens": 10**6, "learner": "learner-009"}
    claims = [*cohort.claims[:3], replace(cohort.claims[3], **{swapped: forged[swapped]})]
    with pytest.raises(ProtocolError, match=r"not signed by party|belongs to no party"):
        sums.members[sums.names[0]].share(replace(cohort, claims=tuple(claims)))


def test_a_signature_for_another_sum_does_not_count(tmp_path: Path) -> None:
    sums, earlier = SecureSum(3), SecureSum(3)
    pinned(sums, tmp_path)
    cohort = sums.claim()
    for name in sums.names:
        earlier.members[name].signer = sums.members[name].signer
    replayed = earlier.members[sums.names[2]].claim("another sum", 24, 240)
    claims = (*cohort.claims[:2], replayed)
    with pytest.raises(ProtocolError, match="not signed by party"):
        sums.members[sums.names[0]].share(replace(cohort, claims=claims))


def test_a_sum_has_the_learners_of_several_parties(tmp_path: Path) -> None:
    """One party may have, or invent, as many learners as it likes."""
    sums = SecureSum(6, threshold=4)
    pinned(sums, tmp_path, parties=3, least=3)
    cohort = sums.claim()
    two = tuple(c for n, c in enumerate(cohort.claims) if n % 3 < 2)
    member = sums.members[sums.names[0]]
    with pytest.raises(ProtocolError, match="a sum of 2 parties is too small: at least 3"):
        member.share(replace(cohort, claims=two))
    fresh = SecureSum(6, threshold=4)
    pinned_again = tmp_path / "again"
    pinned_again.mkdir()
    pinned(fresh, pinned_again, parties=3, least=3)
    fresh.claim()
    fresh.share()
    fresh.mask()
    survivors = [name for n, name in enumerate(fresh.names) if n % 3 < 2]
    with pytest.raises(ProtocolError, match="a sum of 2 parties is too small"):
        fresh.members[survivors[0]].open(survivors)


def test_a_shard_with_two_copies_under_one_version_opens_nothing() -> None:
    """Values that stop all but one learner from training would make that one stand out."""
    names = [sum_name("run", 0, "1.4", digest) for digest in ("values", "other values")]
    sums = SecureSum(3)
    claims = tuple(
        member.claim(names[number > 0], 24, 240)
        for number, member in enumerate(sums.members.values())
    )
    cohort = Cohort(names[0], claims, (1.0,) * 3, 2)
    with pytest.raises(ProtocolError, match="the cohort is for"):
        sums.members[sums.names[1]].share(cohort)


@pytest.mark.parametrize(
    "change",
    [
        {"steps": 1e400},
        {"steps": 2.0},
        {"steps": True},
        {"tokens": 10**400},
        {"tokens": 0},
        {"learner": "\ud800"},
        {"learner": 3},
        {"bounds": [10**400, 1.0, 1.0]},
        {"bounds": [-1.0, 1.0, 1.0]},
        {"threshold": 1e400},
        {"mask_key": "AA=="},
    ],
)
def test_a_malformed_cohort_is_a_protocol_error(change: dict[str, object]) -> None:
    """Any other error would stop the learner's background, and so its training loop."""
    name, claims, bounds, threshold = json.loads(SecureSum(3).claim().to_text())
    ((field, value),) = change.items()
    places = {"learner": 0, "steps": 1, "tokens": 2, "mask_key": 3}
    if field in places:
        claims[1][places[field]] = value
    bounds = value if field == "bounds" else bounds
    threshold = value if field == "threshold" else threshold
    with pytest.raises(ProtocolError, match="a cohort"):
        read_cohort(json.dumps([name, claims, bounds, threshold]))


@pytest.mark.parametrize("key", [bytes(32), b"\x01" + bytes(31), b"short"])
def test_a_key_of_low_order_is_refused_by_the_shard(key: bytes) -> None:
    """It agrees with no other key: the sum could not be opened."""
    claim = Claim("a", 24, 240, key, KeyPair(b"k" * 32).public)
    with pytest.raises(ProtocolError, match=r"public key is not valid|not of 32 bytes"):
        read_claim("a", 24, 240, claim_text(claim))


def test_a_bad_share_names_its_sender() -> None:
    sums = SecureSum(3)
    sums.claim()
    sums.share()
    first, second = sums.names[:2]
    parts = sums.for_member(first) | {second: b"x" * 90}
    with pytest.raises(ProtocolError, match=f"changed on its way from {second}"):
        sums.members[first].mask(parts, sums.integers(first))


@pytest.mark.parametrize("lie", ["bounds", "weight", "cohort"])
def test_a_shard_that_tells_members_different_things_opens_nothing(lie: str) -> None:
    """A learner whose weight or bound differs from the others' would stand out in the sum."""
    sums = SecureSum(4)
    cohort = sums.claim()
    claims = list(cohort.claims)
    others = {
        "bounds": {"bounds": tuple(1e6 * bound for bound in cohort.bounds)},
        "weight": {"claims": (*claims[:3], replace(claims[3], tokens=10**6))},
        "cohort": {"claims": tuple(claims[:3])},
    }
    victim = sums.names[0]
    shares = {victim: sums.members[victim].share(cohort)}
    for name in sums.names[1:3]:
        shares[name] = sums.members[name].share(replace(cohort, **others[lie]))
    parts = {sender: each[victim] for sender, each in shares.items() if victim in each}
    with pytest.raises(ProtocolError, match="an encrypted share was changed on its way"):
        sums.members[victim].mask(parts, sums.integers(victim))


def test_colluding_members_open_nothing_below_the_documented_number() -> None:
    """With t of n shares, 2t - n members must reveal both secrets of another one."""
    sums = SecureSum(6, threshold=5)
    sums.claim()
    sums.share()
    sums.mask()
    victim, needed, count = sums.names[0], 5, 6
    honest, colluding = sums.names[:3], sums.names[3:]
    assert len(colluding) == 2 * needed - count - 1
    of_seed = of_key = len(colluding)
    for name in honest:
        alive = name != sums.names[1]
        survivors = set(sums.names) if alive else set(sums.names) - {victim}
        answer = sums.members[name].open(survivors)[victim]
        of_seed += answer == sums.members[name]._received[victim][1]
        of_key += answer == sums.members[name]._received[victim][0]
    assert of_seed + of_key == count + len(colluding)
    assert min(of_seed, of_key) < needed
