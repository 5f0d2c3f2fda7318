"""`parties.toml`: what it says, what is refused, and the keys that sign."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from typer.testing import CliRunner

from decoupled_diloco import PartyFiles
from decoupled_diloco.cli.main import app
from decoupled_diloco.config import RunConfig, dump_config, load_config
from decoupled_diloco.config.method import options_of, public_text, read_public
from decoupled_diloco.config.parties import OwnParty, Parties, load_parties
from decoupled_diloco.config.signing_keys import (
    PublicKey,
    create_signing_key,
    load_signing_key,
)
from decoupled_diloco.config.sync import methods_unchecked
from decoupled_diloco.errors import ConfigError
from decoupled_diloco.launch.secrets import token_of_a_reader
from decoupled_diloco.protocol.quotas import Quota

KEYS = [str(PublicKey(bytes([number]) * 32)) for number in range(4)]


def party(number: int, **changes: object) -> dict[str, object]:
    name = f"hospital-{number}"
    return {"name": name, "learners": [f"{name}-*"], "key": KEYS[number], **changes}


def parties(*entries: dict[str, object]) -> Parties:
    return Parties(parties=entries)


def test_a_learner_belongs_to_the_party_whose_name_or_pattern_fits() -> None:
    found = parties(party(0, learners=["a", "a-*"]), party(1, learners=["ab"]))
    assert found.of_learner("a").name == found.of_learner("a-7").name == "hospital-0"
    assert found.of_learner("ab").name == "hospital-1"
    with pytest.raises(ConfigError, match=r"learner 'abc' belongs to no party: add its name"):
        found.of_learner("abc")


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([party(0), party(1, name="hospital-0")], "name='hospital-0' occurs twice"),
        ([party(0), party(1, key=KEYS[0])], "'hospital-0' and 'hospital-1' .* have the same key"),
        ([{"name": "a", "learners": ["a"]}], r"\[\[parties\]\] lacks 'key': add it"),
        ([party(0, key="ed25519:AAAA")], "is not a public key: write ed25519: and 32 bytes"),
        ([party(0, learners=[])], "learners=.. of party 'hospital-0' .* is empty"),
        ([party(0, learners=["a*b"])], "'a.b' of party 'hospital-0' .* is not a valid name"),
        ([party(0), party(1, learners=["hospital-0-7"])], "'hospital-0-7' of party .* overlap"),
        ([party(0), party(1, learners=["hosp*"])], "overlap, so a learner could have two parties"),
        ([party(0, share_min=0.6, share_max=0.5)], "share_min=0.6 .* exceeds share_max=0.5"),
        ([party(0, share_min=0.6), party(1, share_min=0.5)], "share_min of all .* is 1.1 in sum"),
        ([party(0, share_max=0.4), party(1, share_max=0.5)], "share_max of all .* is 0.9 in sum"),
        ([party(0, share_min=-0.1)], r"share_min=-0.1 .* out of range: it must be at least 0"),
        ([party(0, sees="none")], "sees='none' .* is not known"),
        ([], "too short"),
    ],
)
def test_a_file_that_cannot_hold_is_refused_with_one_sentence(
    entries: list[dict[str, object]], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        parties(*entries)
    assert "\n" not in str(caught.value)


def test_shares_that_are_exactly_one_in_sum_are_accepted_in_spite_of_rounding() -> None:
    shares = (0.7, 0.2, 0.1)
    assert sum(shares) < 1
    assert parties(*(party(i, share_min=s, share_max=s) for i, s in enumerate(shares))).has_quotas


def test_the_digest_is_of_the_meaning() -> None:
    one = parties(party(0, learners=["a", "b"]), party(1))
    same = parties(party(1, share_min=0.0), party(0, learners=["b", "a"]))
    assert one.digest == same.digest
    for change in ({"share_max": 0.9}, {"key": KEYS[3]}, {"sees": "all"}):
        assert parties(party(0, learners=["a", "b"]), party(1, **change)).digest != one.digest


def test_a_key_signs_and_another_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "keys" / "a.key"
    key = create_signing_key(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    again = load_signing_key(path)
    assert again.public == key.public == PublicKey.parse(str(key.public))
    signature = again.sign(b"data")
    assert key.public.verifies(signature, b"data")
    assert not key.public.verifies(signature, b"date")
    assert not key.public.verifies(signature[:-1], b"data")
    with pytest.raises(ConfigError, match="already exists, and no file is overwritten"):
        create_signing_key(path)
    path.chmod(0o640)
    with pytest.raises(ConfigError, match=r"has mode 640.* run chmod 600"):
        load_signing_key(path)
    (tmp_path / "b.key").write_text("nothing")
    (tmp_path / "b.key").chmod(0o600)
    with pytest.raises(ConfigError, match="is not an Ed25519 private key"):
        load_signing_key(tmp_path / "b.key")
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        load_signing_key(tmp_path / "c.key")


def test_the_commands_create_a_key_and_check_a_file(tmp_path: Path) -> None:
    runner, file = CliRunner(), tmp_path / "parties.toml"
    for name in ("a", "b"):
        made = runner.invoke(app, ["parties", "create-key", name, "--folder", str(tmp_path)])
        assert made.exit_code == 0
        file.write_text((file.read_text() if file.exists() else "") + made.stdout)
    checked = runner.invoke(app, ["parties", "check", str(file)])
    assert checked.exit_code == 0
    assert "a  a-*: 0% to 100% of a merge, sees its own learners\n" in checked.stdout
    assert f"digest {load_parties(file).digest}:" in checked.stdout
    file.write_text("[[parties]]\nname = 'a'\n")
    with pytest.raises(ConfigError, match=r"parties.toml: \[\[parties\]\] lacks 'learners'"):
        load_parties(file)


def test_a_run_keeps_the_parties_of_its_start(tmp_path: Path) -> None:
    file, run = tmp_path / "parties.toml", tmp_path / "run.toml"
    made = CliRunner().invoke(app, ["parties", "create-key", "a", "--folder", str(tmp_path)])
    file.write_text(made.stdout)
    run.write_text(f'[run]\nmax_steps = 1\n[privacy]\nparties = "{file}"\n')
    config = load_config(run)
    (tmp_path / "resolved.toml").write_text(dump_config(config))
    file.unlink()
    assert load_config(tmp_path / "resolved.toml") == config
    assert config.privacy.agreed is not None
    sent = read_public(public_text(config)).privacy.agreed
    assert sent is not None
    assert sent.digest == config.privacy.agreed.digest
    with pytest.raises(ConfigError, match="is not a file: pass the path"):
        load_config(run)


def test_a_private_key_without_parties_would_be_ignored() -> None:
    with pytest.raises(ConfigError, match=r"party_key='a.key' in \[learner\] would be ignored"):
        RunConfig(run={"max_steps": 1}, learner={"party_key": "a.key"})
    with pytest.raises(ConfigError, match="has no parties: pass parties="):
        PartyFiles(key="a.key")


def test_a_learner_takes_the_key_of_its_own_party(tmp_path: Path) -> None:
    keys = {name: create_signing_key(tmp_path / f"{name}.key") for name in ("x", "y")}
    entries = [
        {"name": name, "learners": [f"{name}-*"], "key": str(key.public)}
        for name, key in keys.items()
    ]
    agreed = parties(*entries)
    own = OwnParty.load(agreed, "y-0", tmp_path)
    assert own.settings.name == "y"
    assert own.key is not None
    assert own.key.public == keys["y"].public
    with pytest.raises(ConfigError, match="but party 'y' of learner 'y-0' has the key"):
        OwnParty.load(agreed, "y-0", tmp_path / "x.key")


def test_a_learner_accepts_only_its_own_parties() -> None:
    own = OwnParty(parties(party(0)), party_settings := parties(party(0)).parties[0], None)
    assert own.settings is party_settings
    own.require_same(parties(party(0)))
    with pytest.raises(ConfigError, match="the syncer has no parties, but this learner's"):
        own.require_same(None)
    with pytest.raises(ConfigError, match="compare both files with ddiloco parties check"):
        own.require_same(parties(party(0, sees="all")))


def limited(**tables: object) -> RunConfig:
    members = [
        party(0, learners=["learner-0"], share_max=0.5),
        party(1, learners=["learner-1", "learner-2"]),
    ]
    run = {"max_steps": 1, "learners": 3}
    return RunConfig(run=run, privacy={"members": members}, data={"elastic": False}, **tables)


def test_quotas_become_options_of_the_machines() -> None:
    assert options_of(limited()).quotas[0] == Quota("hospital-0", ("learner-0",), 0.0, 0.5)
    members = [party(0), party(1)]
    assert options_of(RunConfig(run={"max_steps": 1}, privacy={"members": members})).quotas == ()


def test_quotas_need_sums_of_one_party_each() -> None:
    sites = [{"name": "a", "learners": [0]}, {"name": "b", "learners": [1, 2]}]
    assert len(limited(sites=sites).sites) == 2
    with pytest.raises(ConfigError, match=r"'a' in .* has learners of hospital-0 and hospital-1"):
        limited(sites=[{"name": "a", "learners": [0, 1]}])
    sites[1] = {**sites[1], "upstream": "a"}
    with pytest.raises(ConfigError, match="write one site for each party"):
        limited(sites=sites)
    refused = pytest.raises(ConfigError, match=r"rule='my:own' .* cannot be combined with share_")
    with refused, methods_unchecked():
        limited(sync={"merge": {"rule": "my:own"}})


def test_a_viewer_with_the_name_of_a_party_or_its_learner_sees_its_own_lanes() -> None:
    agreed = parties(party(0), party(1, sees="all"))
    for name in ("hospital-0", "hospital-0-7"):
        found = agreed.viewer([name])
        assert found is not None
        assert found.name == "hospital-0"
    for names in ([], ["evaluator"], ["shard-1", "shard-*"], ["hospital-1"], ["hospital-1-7"]):
        assert agreed.viewer(names) is None


def test_processes_of_the_syncer_read_with_a_token_that_may_see_all(tmp_path: Path) -> None:
    file = tmp_path / "principals.toml"
    file.write_text('hospital-0-1 = "a"\nshard-1 = "b"\n')
    members = parties(party(0), party(1)).parties
    run = {"max_steps": 1}
    config = RunConfig(run=run, privacy={"members": members}, syncer={"principals_file": file})
    assert token_of_a_reader(config, None) == "b"
