from __future__ import annotations

import pytest

from decoupled_diloco.config import RunConfig
from decoupled_diloco.config.addresses import (
    from_elsewhere,
    on_this_machine,
    reached_by,
)
from decoupled_diloco.config.run import advertised
from decoupled_diloco.errors import ConfigError


def config_of(**syncer: object) -> RunConfig:
    return RunConfig(run={"max_steps": 1}, syncer={"shards": 2, **syncer})


def test_the_settings_say_where_the_shards_are() -> None:
    assert advertised(config_of(port=80)) == ("http://127.0.0.1:80", "http://127.0.0.1:81")
    assert advertised(config_of(host="::", port=80), (5, 9)) == ("http://[::]:5", "http://[::]:9")
    given = ("https://a", "https://b:443")
    assert advertised(config_of(addresses=given, port=0)) == given
    with pytest.raises(
        ConfigError, match="no process knows where the shards are: pass their addresses"
    ):
        advertised(config_of(port=0))
    with pytest.raises(ConfigError, match="host=''"):
        config_of(host="")


@pytest.mark.parametrize("wildcard", ["0.0.0.0", "[::]", "[0::0]"])
def test_a_wildcard_is_replaced_by_what_was_dialled(wildcard: str) -> None:
    told = f"http://{wildcard}:7071"
    assert reached_by(told, "http://[fd00::1]:7070") == "http://[fd00::1]:7071"
    assert reached_by(told, "https://syncer") == "http://syncer:7071"
    assert on_this_machine(told) in ("http://127.0.0.1:7071", "http://[::1]:7071")
    assert wildcard not in from_elsewhere(told)
    assert from_elsewhere(told).endswith(":7071")


def test_any_other_address_stays_as_it_is() -> None:
    for told in ("http://127.0.0.1:7070", "https://syncer", "memory", "http://[::1]:1"):
        assert reached_by(told, "http://elsewhere:9") == told
        assert on_this_machine(told) == told
        assert from_elsewhere(told) == told
