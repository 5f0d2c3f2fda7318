"""Invalid addresses of shards are rejected at once, and their passwords are not shown."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from decoupled_diloco import Learner, Timeouts
from decoupled_diloco.config.addresses import address_problem, without_password
from decoupled_diloco.config.syncer import SyncerSettings
from decoupled_diloco.errors import ConfigError

NONE = [
    "",
    "syncer:7070",
    "http://",
    "http://:7070",
    "http://[::1",
    "http://[zz::1]:7070",
    "http://syncer..lan:7070",
    "http://.lan:7070",
    f"http://{'x' * 64}.lan:7070",
    f"http://{'x.' * 127}lan:7070",
    "http://syncer:99999",
    "http://syncer:abc",
    "http://syncer:-1",
    "http://syncer:0",
    "http://syncer:",
    "http://300.1.1.1:7070",
    "http://10.0.0:7070",
    "http://syncer host:7070",
    "http://syncer:7070\n",
    "http://me:hunter2@syncer:7070",
    "http://hunter2@syncer:7070",
    "http://syncer:7070?token=1",
    "ftp://syncer:7070",
]
GOOD = [
    "http://syncer:7070",
    "https://syncer.lan",
    "http://syncer.lan.:7070",
    "http://[::1]:7070",
    "http://[fe80::1%25eth0]:7070",
    "http://127.0.0.1:7070",
    "http://bücher.example:7070",
    "http://my_syncer:7070",
    "https://syncer/under/a/path",
]


@pytest.mark.parametrize("address", NONE, ids=repr)
def test_an_invalid_address_is_rejected_at_once_in_one_sentence(address: str) -> None:
    with pytest.raises(
        ConfigError, match=r"is not a URL: write it as 'http://host:port'"
    ) as caught:
        Learner(nn.Linear(2, 2), address, timeouts=Timeouts(join=300.0))
    assert "hunter2" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"in \[syncer\] is not a URL: write it as") as caught:
        SyncerSettings(addresses=(address,))
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("syncer", [[], (), [7070], ["http://a:1", None]], ids=repr)
def test_an_address_that_is_not_a_text_is_rejected(syncer: Any) -> None:
    with pytest.raises(ConfigError, match=r"write it as 'http://host:port'|has no address"):
        Learner(nn.Linear(2, 2), syncer)


@pytest.mark.parametrize("address", GOOD)
def test_an_address_is_accepted(address: str) -> None:
    assert address_problem(address) == ""


def test_a_password_is_not_shown() -> None:
    text = "http://me:se@cret@a:1|https://b:2 and http://c@d: 'http://x/y@z'"
    shown = "http://***@a:1|https://b:2 and http://***@d: 'http://x/y@z'"
    assert without_password(text) == shown
