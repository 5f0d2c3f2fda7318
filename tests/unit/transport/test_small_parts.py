"""Backoff, Tokens, RangeSet, Silence."""

from __future__ import annotations

import random

import pytest

from decoupled_diloco.errors import AccessError, ConfigError, ProtocolError, TransportError
from decoupled_diloco.transport.backoff import BRISK_CAP_SECONDS, Backoff
from decoupled_diloco.transport.byte_ranges import (
    RangeSet,
    read_content_range,
    read_list,
    read_range,
    write_content_range,
    write_list,
    write_range,
)
from decoupled_diloco.transport.interface import Silence
from decoupled_diloco.transport.tokens import RequestRefusal, Tokens, is_loopback, refusal_error


def test_backoff_grows_to_its_cap_with_jitter() -> None:
    backoff = Backoff(random.Random(1))
    delays = [backoff.next() for _ in range(200)]
    assert all(0.1 <= delay <= 5.0 for delay in delays)
    assert delays[0] <= 0.2
    assert max(delays[:4]) <= 1.6
    assert max(delays) > 4.5
    assert len(set(delays)) == 200
    backoff.reset()
    assert backoff.next() <= 0.2


def test_backoff_is_brisk_at_first_and_slow_after_a_long_absence() -> None:
    backoff = Backoff(random.Random(1), brisk_seconds=60.0)
    delays = [backoff.next() for _ in range(400)]
    first = next(i for i in range(len(delays)) if sum(delays[:i]) >= 60.0)
    assert max(delays[:first]) <= BRISK_CAP_SECONDS
    assert max(delays[first:]) > 4.5
    assert sum(delays[:first]) / first > 0.3, "the attempts are not too frequent"
    backoff.reset()
    assert max(backoff.next() for _ in range(100)) <= BRISK_CAP_SECONDS


def test_backoff_repeats_by_seed() -> None:
    first, second = Backoff(random.Random(9)), Backoff(random.Random(9))
    assert [first.next() for _ in range(10)] == [second.next() for _ in range(10)]


def refused(tokens: Tokens, authorization: str | None, principal: str) -> int:
    with pytest.raises(RequestRefusal) as caught:
        tokens.authorize(authorization, principal)
    return caught.value.status


def test_open_tokens_admit_anyone_on_loopback_only() -> None:
    assert Tokens().authorize(None, "anyone") == "anyone"
    Tokens().check_bind("127.0.0.1")
    Tokens().check_bind("::1")
    Tokens().check_bind("localhost")
    for host in ("0.0.0.0", "::", "192.168.1.2", "example.org", ""):
        with pytest.raises(ConfigError, match="set an auth token"):
            Tokens().check_bind(host)
        Tokens("secret").check_bind(host)


def test_run_token() -> None:
    tokens = Tokens("secret")
    assert tokens.authorize("Bearer secret", "a") == "a"
    assert tokens.authorize("bearer secret", "b") == "b"
    for header in (None, "", "secret", "Bearer", "Bearer ", "Bearer Secret", "Basic secret"):
        assert refused(tokens, header, "a") == 401


def test_tokens_per_principal() -> None:
    tokens = Tokens(principals={"a": "1", "b": "2"})
    assert tokens.authorize("Bearer 2", "b") == "b"
    assert refused(tokens, "Bearer 1", "b") == 403
    assert refused(tokens, "Bearer 3", "b") == 401
    assert (
        refused(Tokens(principals={}), "Bearer 3", "b") == 401
    )  # It admits no peer, not every peer.


@pytest.mark.parametrize("name", ["", ".a", "a/b", "a b", "a\n", "é", "x" * 129])
def test_names(name: str) -> None:
    assert refused(Tokens(), None, name) == 400


def test_bad_token_configurations() -> None:
    with pytest.raises(ConfigError, match="keep one of the two"):
        Tokens("x", {"a": "y"})
    with pytest.raises(ConfigError, match="empty"):
        Tokens(" ")
    with pytest.raises(ConfigError, match="same token"):
        Tokens(principals={"a": "x", "b": "x"})


def test_is_loopback() -> None:
    assert is_loopback("127.8.0.1")
    assert not is_loopback("10.0.0.1")


@pytest.mark.parametrize(
    ("status", "kind"),
    [(401, AccessError), (403, AccessError), (404, ProtocolError), (410, ProtocolError),
     (413, ProtocolError), (409, TransportError), (429, TransportError), (503, TransportError)],
)  # fmt: skip
def test_refusals_become_errors(status: int, kind: type[Exception]) -> None:
    assert type(refusal_error(status, "why", "where")) is kind


def test_range_set_against_a_set_of_bytes() -> None:
    rng = random.Random(4)
    for _ in range(300):
        ranges, dumb = RangeSet(), set()
        for _ in range(rng.randrange(8)):
            start = rng.randrange(30)
            stop = start + rng.randrange(8)
            ranges.add(start, stop)
            dumb.update(range(start, stop))
        left, right = sorted((rng.randrange(40), rng.randrange(40)))
        assert ranges.nbytes == len(dumb)
        assert ranges.overlaps(left, right) == bool(dumb & set(range(left, right)))
        missing = {
            byte for start, stop in ranges.missing(left, right) for byte in range(start, stop)
        }
        assert missing == set(range(left, right)) - dumb
        assert read_list(write_list(ranges.ranges)) == ranges.ranges
        assert all(a[1] < b[0] for a, b in zip(ranges.ranges, ranges.ranges[1:], strict=False))


def test_range_headers() -> None:
    assert read_content_range(write_content_range(3, 9, 10)) == (3, 9, 10)
    assert read_range(write_range(3, 9)) == (3, 9)
    for text in ("bytes 3-2/10", "bytes 0-10/10", "bytes */10", "bytes 0-1/*", "", "bytes 0-1/1"):
        assert read_content_range(text) is None
    for text in ("bytes=3-2", "bytes=1-", "bytes=-1", "bytes=0-1,2-3", "items=0-1", ""):
        assert read_range(text) is None


def test_silence_does_not_count_a_pause_of_this_process() -> None:
    silence = Silence(step_seconds=1.0, now=0.0)
    assert silence.observe(1.0, marker=1) == 0
    assert silence.observe(2.0, marker=1) == 1
    assert silence.observe(100.0, marker=1) == 3
    assert silence.observe(101.0, marker=2) == 0


def test_a_relay_acts_only_for_its_own_learners() -> None:
    secrets = {"site-a": "r", "learner-0": "0", "learner-1": "1"}
    tokens = Tokens(principals=secrets, relays={"site-a": ["learner-0"]})
    assert tokens.authorize("Bearer r", "learner-0") == "learner-0"
    assert tokens.represents("site-a", "learner-0", None) == ""
    with pytest.raises(RequestRefusal, match="belongs to 'site-a'"):
        tokens.authorize("Bearer r", "learner-1")
    assert "may not represent 'learner-1'" in tokens.represents("site-a", "learner-1", None)
    assert "may not represent" in tokens.represents("learner-1", "learner-0", None)


def test_the_certificate_of_a_relay_names_its_learners() -> None:
    tokens = Tokens(certificates=True)
    names = ("site-a", "learner-0")
    assert tokens.represents("site-a", "learner-0", names) == ""
    assert "does not name 'learner-1'" in tokens.represents("site-a", "learner-1", names)


def test_with_one_token_for_all_a_relay_may_represent_everyone() -> None:
    assert Tokens("secret").represents("site-a", "learner-9", None) == ""
