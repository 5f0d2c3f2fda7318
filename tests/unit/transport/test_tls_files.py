"""Certificate files: errors in one sentence, and the principals of a certificate."""

from __future__ import annotations

import shutil
import stat
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization

import encrypted
from decoupled_diloco.errors import ConfigError, StorageError
from decoupled_diloco.launch.certificates import CertificateFolder, hosts_of
from decoupled_diloco.transport import tls
from decoupled_diloco.transport.tls import LiveTls, ServerTLSConfig, TLSConfig
from decoupled_diloco.transport.tokens import RequestRefusal, Tokens


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return encrypted.made(tmp_path / "tls")


def days_left(folder: Path) -> dict[str, int]:
    return {each.name: round(each.days_left) for each in CertificateFolder(folder).listing()}


def test_only_the_owner_can_read_a_key(folder: Path) -> None:
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.glob("*.key")}
    assert modes == dict.fromkeys(
        ["authority.key", "syncer.key", "learner-0.key", "learner-1.key", "evaluator.key"], 0o600
    )


def test_nothing_is_overwritten(folder: Path) -> None:
    before = {path: path.read_bytes() for path in folder.iterdir()}
    for attempt in (
        lambda: CertificateFolder(folder).begin([], 1),
        lambda: CertificateFolder(folder).add(["learner-9", "learner-0"], 1),
    ):
        with pytest.raises(ConfigError, match="no file is overwritten"):
            attempt()
    (folder / "learner-0.pem").unlink()
    with pytest.raises(ConfigError, match="remove it and its key"):
        CertificateFolder(folder).add(["learner-0"], 1)
    assert {path: path.read_bytes() for path in folder.iterdir()} == {
        path: data for path, data in before.items() if path.name != "learner-0.pem"
    }


def test_a_renewed_certificate_keeps_key_and_names(folder: Path) -> None:
    key = (folder / "syncer.key").read_bytes()
    assert CertificateFolder(folder).renew([], 90) == [
        "evaluator",
        "learner-0",
        "learner-1",
        "syncer",
    ]
    CertificateFolder(folder).renew(["syncer"], 60, ["10.0.0.7", "localhost"])
    assert (folder / "syncer.key").read_bytes() == key
    found = days_left(folder)
    assert found == {
        "authority": 3650,
        "evaluator": 90,
        "learner-0": 90,
        "learner-1": 90,
        "syncer": 60,
    }
    (syncer,) = (e for e in CertificateFolder(folder).listing() if e.name == "syncer")
    assert syncer.names == (
        *("syncer.example", "localhost", "127.0.0.1", "::1", "shard-*"),
        "10.0.0.7",
    )
    LiveTls(encrypted.served(folder))


def test_a_relays_certificate_names_its_learners_and_hosts(folder: Path) -> None:
    made = CertificateFolder(folder)
    made.add(["site-a"], 30, ["relay.example"], ["learner-0", "learner-1"])
    made.renew(["site-a"], 60, ["10.0.0.9"], ["learner-1", "learner-2"])
    assert hosts_of(folder / "site-a.pem") == [
        *("site-a", "learner-0", "learner-1", "relay.example", "localhost", "127.0.0.1", "::1"),
        *("learner-2", "10.0.0.9"),
    ]
    assert hosts_of(folder / "learner-0.pem") == ["learner-0"]
    for wrong in ("a/b", "syncer"):
        with pytest.raises(ConfigError, match=f"'{wrong}' is not a valid id"):
            made.add(["site-b"], 30, [], ["learner-3", wrong])
    with pytest.raises(ConfigError, match="the certificate of the CA names no host"):
        made.renew(["authority"], 30, ["x"])
    assert not (folder / "site-b.pem").exists()


def test_certificates_expire_with_their_ca(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"exceeds the lifetime of the CA.*renew"):
        CertificateFolder(folder).renew([], 4000)
    CertificateFolder(folder).renew(["authority"], 5000)
    CertificateFolder(folder).renew(["learner-0"], 4000)
    assert days_left(folder)["learner-0"] == 4000


def test_the_ca_signs_no_other_ca(folder: Path) -> None:
    authority = x509.load_pem_x509_certificate((folder / "authority.pem").read_bytes())
    syncer = x509.load_pem_x509_certificate((folder / "syncer.pem").read_bytes())
    of = [c.extensions.get_extension_for_class(x509.BasicConstraints) for c in (authority, syncer)]
    assert [(each.value.ca, each.value.path_length) for each in of] == [(True, 0), (False, None)]
    assert all(each.critical for each in of)


@pytest.mark.parametrize("name", ["authority", "syncer", "a/b", "", "../x", "-x"])
def test_invalid_ids_are_rejected(folder: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="is not a valid id"):
        CertificateFolder(folder).add([name], 1)


@pytest.mark.parametrize("name", ["authority", "syncer"])
def test_reserved_ids_are_named(folder: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=f"'{name}' is not a valid id: the name is reserved"):
        CertificateFolder(folder).add(["learner-7", name], 1)
    assert not (folder / "learner-7.pem").exists()


@pytest.mark.parametrize("days", [36501, 3_000_000, 10**30])
def test_a_lifetime_that_is_too_long_is_rejected_before_a_file_is_written(
    folder: Path, tmp_path: Path, days: int
) -> None:
    before = {path: path.read_bytes() for path in folder.iterdir()}
    for attempt in (
        lambda: CertificateFolder(folder).add(["learner-7"], days),
        lambda: CertificateFolder(folder).renew([], days),
        lambda: CertificateFolder(folder).renew(["authority"], days),
    ):
        with pytest.raises(ConfigError) as refused:
            attempt()
        assert f"{refused.value}" == f"--valid-days {days} is out of range: 1 to 36500"
    assert {path: path.read_bytes() for path in folder.iterdir()} == before
    for longer in (days, 3650):
        with pytest.raises(ConfigError) as refused:
            CertificateFolder(tmp_path / "new").begin([], longer)
        assert f"{refused.value}" == (
            f"--valid-days {longer} is out of range: 1 to 3649, as the CA expires after 3650 days"
        )
    assert not (tmp_path / "new").exists()
    CertificateFolder(tmp_path / "new").begin([], 3649)


def test_an_invalid_host_is_rejected_before_a_certificate_is_renewed(folder: Path) -> None:
    before = {path: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(ConfigError, match=r"--host 'x:70' is not a valid host"):
        CertificateFolder(folder).renew([], 9, ["x:70"])
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize("host", ["http://x", "x:70", "ü.example", ""])
def test_invalid_hosts_are_rejected(tmp_path: Path, host: str) -> None:
    with pytest.raises(ConfigError, match="is not a valid host"):
        CertificateFolder(tmp_path / "new").begin([host], 1)
    assert not (tmp_path / "new").exists()


def test_an_incomplete_certificate_folder_is_rejected(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no authority\.pem: create a CA.* --host HOST"):
        CertificateFolder(tmp_path).listing()
    with pytest.raises(ConfigError, match="has no certificate 'learner-7'"):
        CertificateFolder(folder).renew(["learner-7"], 1)
    (folder / "authority.key").unlink()
    with pytest.raises(StorageError, match="folder that has the CA's key"):
        CertificateFolder(folder).add(["learner-7"], 1)


def test_a_certificate_without_its_key_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"cert='c.pem' has no key: set both"):
        TLSConfig(cert="c.pem")
    with pytest.raises(ConfigError, match=r"key='c.key' has no cert"):
        TLSConfig("a.pem", key="c.key")
    with pytest.raises(ConfigError, match="neither ca_cert nor cert"):
        TLSConfig()


def test_unusable_files_are_rejected(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls, "EXCHANGE_SECONDS", 0.0)
    (folder / "text").write_text("no certificate")
    for files, words in (
        (TLSConfig(folder / "gone.pem"), "ca_cert=.*gone.pem' cannot be read: No such file"),
        (TLSConfig(folder / "text"), "ca_cert=.*text' contains no PEM certificate"),
        (TLSConfig(None, folder / "syncer.pem", folder / "gone"), "key=.*gone' cannot be read"),
        (
            TLSConfig(None, folder / "text", folder / "syncer.key"),
            "are not a PEM certificate and its key",
        ),
        (
            ServerTLSConfig(folder / "syncer.pem", folder / "learner-0.key"),
            "learner-0.key' does not match cert=.*syncer.pem",
        ),
        (
            ServerTLSConfig(folder / "syncer.pem", folder / "syncer.key", folder / "gone"),
            "client_ca_cert=.*cannot be read",
        ),
    ):
        with pytest.raises(ConfigError, match=words):
            LiveTls(files)


def torn(path: Path) -> bytes:
    return path.read_bytes()[:200]


@pytest.mark.parametrize("name", ["syncer.pem", "syncer.key"])
@pytest.mark.parametrize("state", ["old", "torn", "empty", "missing"])
def test_a_starting_process_waits_until_exchanged_files_match(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, state: str
) -> None:
    new = encrypted.made(tmp_path / "new")
    before = (folder / name).read_bytes()
    for each in ("syncer.pem", "syncer.key"):
        shutil.copy(new / each, folder)
    if state == "missing":
        (folder / name).unlink()
    else:
        content = {"old": before, "torn": torn(new / name), "empty": b""}[state]
        (folder / name).write_bytes(content)
    waits: list[float] = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        shutil.copy(new / name, folder)

    monkeypatch.setattr(tls.time, "sleep", wait)
    live = LiveTls(encrypted.served(folder))
    assert len(waits) == 1
    assert live.shows


def test_files_that_never_match_are_rejected_after_a_while(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copy(encrypted.made(tmp_path / "new") / "syncer.key", folder)
    monkeypatch.setattr(tls, "EXCHANGE_SECONDS", 0.3)
    with pytest.raises(ConfigError, match="does not match"):
        LiveTls(encrypted.served(folder))
    assert sum("waiting" in message for message in caplog.messages) <= 1


def test_a_key_with_a_passphrase_is_rejected_without_a_prompt(folder: Path) -> None:
    key = serialization.load_pem_private_key((folder / "syncer.key").read_bytes(), None)
    closed = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"secret"),
    )
    (folder / "syncer.key").write_bytes(closed)
    with pytest.raises(ConfigError, match="has a passphrase"):
        LiveTls(encrypted.served(folder))


def test_an_expired_or_future_certificate_is_rejected_at_the_start(folder: Path) -> None:
    for later, words in (
        (encrypted.PAST, "expired on"),
        (encrypted.FUTURE, "not valid before"),
    ):
        with encrypted.another_day(later):
            CertificateFolder(folder).renew(["learner-0"], 30)
        with pytest.raises(ConfigError, match=words):
            LiveTls(encrypted.dialled(folder, "learner-0"))


def test_a_context_is_created_again_only_when_a_file_has_changed(folder: Path) -> None:
    live = LiveTls(encrypted.dialled(folder, "learner-0"))
    first = live.context()
    assert live.context() is first
    CertificateFolder(folder).renew(["learner-0"], 60)
    assert live.context() is not first
    assert round((live.left_seconds or 0) / 86_400) == 60
    (folder / "learner-0.pem").unlink()
    kept = live.context()
    shutil.copy(folder / "learner-1.pem", folder / "learner-0.pem")
    assert live.context() is kept, "the key belongs to another certificate"


@pytest.mark.parametrize(
    ("names", "principal", "status"),
    [
        (("learner-0",), "learner-0", None),
        (("learner-0", "learner-1"), "learner-1", None),
        (("host", "shard-*"), "shard-12", None),
        (("learner-0",), "learner-1", 403),
        (("learner-0",), "learner-0x", 403),
        (("shard-*",), "learner-0", 403),
        (("learner-*",), "learner-0", 403),
        (("*",), "learner-0", 403),
        ((), "learner-0", 403),
        (None, "learner-0", 401),
    ],
)
def test_principals_of_a_certificate(
    names: tuple[str, ...] | None, principal: str, status: int | None
) -> None:
    tokens = Tokens(certificates=True)
    assert not tokens.open
    tokens.check_bind("0.0.0.0")
    if status is None:
        assert tokens.authorize(None, principal, names) == principal
    else:
        with pytest.raises(RequestRefusal) as caught:
            tokens.authorize(None, principal, names)
        assert caught.value.status == status


def test_certificate_names_are_ignored_if_no_certificate_is_required() -> None:
    """Any CA that the system trusts might have signed it."""
    assert Tokens("secret").authorize("Bearer secret", "learner-1", ("learner-0",)) == "learner-1"
