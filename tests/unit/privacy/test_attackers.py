"""Attackers of secure sums: a curious syncer, and one that lies (docs/security.md)."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable

import pytest
import torch

from decoupled_diloco.errors import ProtocolError
from decoupled_diloco.merge.fixed_point import Integers
from decoupled_diloco.privacy import secure_sum
from decoupled_diloco.privacy.keys import KeyPair
from decoupled_diloco.privacy.secure_sum import Claim, Cohort, pair_secret
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

    The stream of a secret that nobody else knows cannot be told from uniform integers. Uniform
    integers that are shifted are uniform, so a run with shifted masks has the same distribution.
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
        name: secure_sum.Member(name, 2, first.rng.randbytes) for name in second.names
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
