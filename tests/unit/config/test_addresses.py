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


def test_the_settings_determine_the_advertised_addresses() -> None:
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
def test_a_wildcard_is_replaced_by_the_dialed_host(wildcard: str) -> None:
    advertised = f"http://{wildcard}:7071"
    assert reached_by(advertised, "http://[fd00::1]:7070") == "http://[fd00::1]:7071"
    assert reached_by(advertised, "https://syncer") == "http://syncer:7071"
    assert on_this_machine(advertised) in ("http://127.0.0.1:7071", "http://[::1]:7071")
    assert wildcard not in from_elsewhere(advertised)
    assert from_elsewhere(advertised).endswith(":7071")


def test_any_other_address_is_unchanged() -> None:
    for address in ("http://127.0.0.1:7070", "https://syncer", "memory", "http://[::1]:1"):
        assert reached_by(address, "http://elsewhere:9") == address
        assert on_this_machine(address) == address
        assert from_elsewhere(address) == address
