"""One secret for the run, or one secret per id."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import encrypted
from decoupled_diloco.config import RunConfig
from decoupled_diloco.errors import ConfigError
from decoupled_diloco.launch.certificates import CertificateFolder
from decoupled_diloco.launch.secrets import (
    accepted_tokens,
    own_tls,
    own_token,
    read_principals,
    require_relay_certificates,
    served_tls,
)
from decoupled_diloco.transport.tokens import RequestRefusal


def config_of(**syncer: Any) -> RunConfig:
    return RunConfig(run={"max_steps": 1}, syncer=syncer)


def test_each_id_has_its_own_secret(tmp_path: Path) -> None:
    path = tmp_path / "principals"
    path.write_text('learner-0 = "zero"\nshard-1 = "one"\n"a.b" = "two"\n')
    config = config_of(principals_file=path)
    assert own_token(config, "learner-0") == "zero"
    assert own_token(config, "a.b") == "two"
    tokens = accepted_tokens(config, None)
    assert tokens.authorize("Bearer zero", "learner-0") == "learner-0"
    with pytest.raises(RequestRefusal, match="belongs to 'learner-0', not to 'shard-1'"):
        tokens.authorize("Bearer zero", "shard-1")
    with pytest.raises(ConfigError, match="has no secret for 'evaluator': add a line evaluator ="):
        own_token(config, "evaluator")
    given = tmp_path / "given"
    given.write_text("by hand\n")
    assert own_token(config, "evaluator", given) == "by hand"


def test_one_secret_is_valid_for_all_ids(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text("s\n")
    config = config_of(token_file=path)
    assert own_token(config, "learner-0") == own_token(config, "shard-1") == "s"
    assert own_token(config_of(), "learner-0") is None
    assert accepted_tokens(config, "s").authorize("Bearer s", "anybody") == "anybody"
    with pytest.raises(
        ConfigError, match="has both token_file and principals_file: keep the first"
    ):
        config_of(token_file=path, principals_file=path)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "must hold a line"),
        ("hunter2", "is not TOML: write a line id ="),
        ("a = 1", "must hold a line"),
        ('[a]\nb = "c"', "must hold a line"),
    ],
)
def test_an_invalid_file_of_secrets_is_rejected_and_not_quoted(
    tmp_path: Path, text: str, problem: str
) -> None:
    path = tmp_path / "principals"
    path.write_text(text)
    with pytest.raises(ConfigError, match=problem) as caught:
        read_principals(path)
    assert "hunter2" not in str(caught.value)
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_principals(tmp_path / "none")


def test_a_relays_certificate_must_name_the_learners_of_its_site(tmp_path: Path) -> None:
    encrypted.made(tmp_path)
    config = RunConfig(
        run={"max_steps": 1, "learners": 3},
        tls=encrypted.tables(tmp_path),
        sites=[
            {"name": "site-a", "learners": [0]},
            {"name": "site-b", "learners": [1], "upstream": "site-a"},
        ],
    )
    made = CertificateFolder(tmp_path)
    with pytest.raises(ConfigError, match=r"has no site-a\.pem: create it with ddiloco certs add"):
        require_relay_certificates(config)
    made.add(["site-a"], 30, [], ["learner-0"])
    words = r"site-a\.pem does not name learner-1,site-b, which .* renew .* site-a --represents "
    with pytest.raises(ConfigError, match=f"{words}learner-1,site-b"):
        require_relay_certificates(config)
    made.renew(["site-a"], 30, [], ["learner-1", "site-b"])
    made.add(["site-b"], 30, [], ["learner-1"])
    require_relay_certificates(config)
    served = served_tls(config, own_tls(config, "site-a"))
    assert served is not None
    assert served.cert == tmp_path / "site-a.pem", "it needs no key of the shards"
