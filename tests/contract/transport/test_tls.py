"""HTTPS only: who is trusted, who may speak, what is said of it, and renewal while all runs."""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import encrypted
from decoupled_diloco.errors import AccessError, ConfigError, TransportError
from decoupled_diloco.launch.certificates import CertificateFolder
from decoupled_diloco.transport import tls as module
from decoupled_diloco.transport.base import Channel
from decoupled_diloco.transport.documents import Document, fetch
from decoupled_diloco.transport.http_client import HttpClient
from decoupled_diloco.transport.http_server import CERTIFICATE_LEFT, HttpServer
from decoupled_diloco.transport.reach import look
from decoupled_diloco.transport.tls import DAY_SECONDS, LiveTls, ServerTls, Tls
from decoupled_diloco.transport.tokens import Tokens

FOLDER = encrypted.folder()


@asynccontextmanager
async def serving(tls: ServerTls | None = None, **options: Any) -> AsyncIterator[HttpServer]:
    async def keep(channel: Channel) -> None:
        await channel.receive()

    async def document(query: object) -> Document:
        return Document(b"text")

    server = HttpServer(on_channel=keep, queries={"/document": document}, tls=tls, **options)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


async def dial(
    address: str, tls: Tls | None, name: str = "learner-0", token: str | None = None
) -> None:
    client = HttpClient(tls=tls, token=token)
    try:
        await client.connect(address, "learner", name)
    finally:
        await client.close()


async def read(address: str, tls: Tls | None, token: str | None = None) -> bytes:
    document = await asyncio.to_thread(fetch, address, "/document", {}, token, tls)
    return document.body


async def both_refuse(address: str, tls: Tls | None, kind: type[Exception], match: str) -> None:
    """Control plane and documents say the same."""
    for attempt in (dial(address, tls), read(address, tls)):
        with pytest.raises(kind, match=match):
            await attempt


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What another authority has signed."""
    return encrypted.made(tmp_path_factory.mktemp("other"))


async def test_who_trusts_the_authority_speaks_and_reads() -> None:
    async with serving(encrypted.served(FOLDER)) as server:
        assert server.address.startswith("https://")
        await dial(server.address, encrypted.dialled(FOLDER))
        assert await read(server.address, encrypted.dialled(FOLDER)) == b"text"


async def test_an_authority_that_nobody_trusts_is_refused(other: Path) -> None:
    async with serving(encrypted.served(FOLDER)) as server:
        for tls in (None, encrypted.dialled(other)):
            await both_refuse(server.address, tls, AccessError, "no authority that is trusted")


async def test_a_certificate_for_another_name_is_refused() -> None:
    async with serving(encrypted.served(FOLDER, name="learner-1")) as server:
        tls = encrypted.dialled(FOLDER)
        await both_refuse(server.address, tls, AccessError, "is for another name.*--name HOST")


@pytest.mark.parametrize(
    ("later", "words"), [(encrypted.PAST, "has expired"), (encrypted.FUTURE, "not valid yet")]
)
async def test_a_servers_certificate_of_another_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, later: timedelta, words: str
) -> None:
    """It is renewed there, so it is no error for good."""
    folder = encrypted.made(tmp_path / "tls")
    with encrypted.another_day(later):
        CertificateFolder(folder).renew(["syncer"], 30)
    with pytest.raises(ConfigError, match=r"expired on|not valid before"):
        LiveTls(encrypted.served(folder))
    monkeypatch.setattr(module, "_end_of", lambda path: 0.0)  # It may end while a server runs.
    async with serving(encrypted.served(folder)) as server:
        for attempt in (dial, read):
            with pytest.raises(TransportError, match=words) as caught:
                await attempt(server.address, encrypted.dialled(folder))
            assert not isinstance(caught.value, AccessError)


async def test_plain_text_to_an_encrypted_port_and_the_reverse() -> None:
    async with serving(encrypted.served(FOLDER)) as server:
        plain = server.address.replace("https", "http")
        await both_refuse(plain, None, AccessError, "speaks TLS: write https://")
        seen = await look(plain, None)
        assert seen.trouble is not None
        assert (seen.trouble.cause, "write https://" in seen.trouble.text) == ("tls", True)
    async with serving() as server:
        address = server.address.replace("http", "https")
        tls = encrypted.dialled(FOLDER)
        await both_refuse(address, tls, AccessError, "does not speak TLS: write http://")
        with pytest.raises(ConfigError, match="would be ignored"):
            await read(server.address, tls)


async def test_a_certificate_speaks_for_its_own_id_alone() -> None:
    async with serving(
        encrypted.served(FOLDER, mutual=True), tokens=Tokens(certificates=True)
    ) as server:
        address = server.address
        await dial(address, encrypted.dialled(FOLDER, "learner-0"))
        assert await read(address, encrypted.dialled(FOLDER, "learner-1")) == b"text"
        with pytest.raises(AccessError, match="is that of learner-0, not of 'learner-1'"):
            await dial(address, encrypted.dialled(FOLDER, "learner-0"), "learner-1")
        await both_refuse(address, encrypted.dialled(FOLDER), AccessError, "wants a certificate")


async def test_all_shards_may_have_the_syncers_certificate() -> None:
    async with serving(
        encrypted.served(FOLDER, mutual=True), tokens=Tokens(certificates=True)
    ) as server:
        await dial(server.address, encrypted.dialled(FOLDER, "syncer"), "shard-3")
        with pytest.raises(AccessError, match="not of 'learner-0'"):
            await dial(server.address, encrypted.dialled(FOLDER, "syncer"))


async def test_certificates_of_strangers_get_nowhere(other: Path) -> None:
    async with serving(
        encrypted.served(FOLDER, mutual=True), tokens=Tokens(certificates=True)
    ) as server:
        mine = replace(encrypted.dialled(other, "learner-0"), authority=FOLDER / "authority.pem")
        await both_refuse(server.address, mine, AccessError, "does not accept our certificate")


async def test_tokens_and_certificates_are_both_wanted_where_both_are_set() -> None:
    tokens = Tokens(principals={"learner-0": "a", "learner-1": "b"}, certificates=True)
    async with serving(encrypted.served(FOLDER, mutual=True), tokens=tokens) as server:
        mine = encrypted.dialled(FOLDER, "learner-0")
        await dial(server.address, mine, token="a")
        with pytest.raises(AccessError, match="belongs to 'learner-1'"):
            await dial(server.address, mine, token="b")
        with pytest.raises(AccessError, match="wants the run's secret"):
            await dial(server.address, mine)


async def test_the_doctor_finds_out_whose_certificate_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("decoupled_diloco.transport.reach.RATE_SECONDS", 0.05)
    async with serving(
        encrypted.served(FOLDER, mutual=True),
        tokens=Tokens(certificates=True),
        health=lambda: {"shard": 0},
    ) as server:
        seen = await look(server.address, None, tls=encrypted.dialled(FOLDER, "learner-1"))
        assert (seen.trouble, seen.principal) == (None, "learner-1")
        assert seen.health is not None
        assert 29 * DAY_SECONDS < seen.health[CERTIFICATE_LEFT] < 30 * DAY_SECONDS
        without = await look(server.address, None, tls=encrypted.dialled(FOLDER))
        assert without.health is not None, "it needs no certificate"
        assert without.trouble is not None
        assert "wants a certificate" in without.trouble.text


async def days_shown(address: str, tls: Tls) -> float:
    """How long the certificate is valid that a new connection meets."""
    client = HttpClient(tls=tls)
    context = LiveTls(tls).context()
    host, port = address.removeprefix("https://").split(":")
    _, writer = await asyncio.open_connection(host, int(port), ssl=context, server_hostname=host)
    left = module.left_seconds_of(writer.get_extra_info("peercert"))
    writer.close()
    await writer.wait_closed()
    await client.close()
    return left / DAY_SECONDS


async def test_a_renewed_certificate_is_shown_and_old_connections_stay(tmp_path: Path) -> None:
    folder = encrypted.made(tmp_path / "tls")
    tls = encrypted.dialled(folder)
    async with serving(encrypted.served(folder)) as server:
        client = HttpClient(tls=tls)
        before = await client.connect(server.address, "learner", "learner-0")
        assert 29 < await days_shown(server.address, tls) < 31
        CertificateFolder(folder).renew([], 90)
        assert 89 < await days_shown(server.address, tls) < 91
        assert not before.closed
        await client.close()


async def test_another_authority_takes_over_at_both_sides(tmp_path: Path, other: Path) -> None:
    """All files are exchanged; who comes with the old ones is refused from then on."""
    folder = encrypted.made(tmp_path / "tls")
    old = shutil.copytree(folder, tmp_path / "old")
    async with serving(
        encrypted.served(folder, mutual=True), tokens=Tokens(certificates=True)
    ) as server:
        client = HttpClient(tls=encrypted.dialled(folder, "learner-0"))
        await (await client.connect(server.address, "learner", "learner-0")).close()
        shutil.copytree(other, folder, dirs_exist_ok=True)
        await client.connect(server.address, "learner", "learner-0")
        await client.close()
        with pytest.raises(AccessError):
            await dial(server.address, encrypted.dialled(old, "learner-0"))
        mine = replace(encrypted.dialled(old, "learner-0"), authority=other / "authority.pem")
        with pytest.raises(AccessError, match="does not accept our certificate"):
            await dial(server.address, mine)


async def test_broken_files_leave_what_was_there_in_use(
    tmp_path: Path, other: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = encrypted.made(tmp_path / "tls")
    async with serving(encrypted.served(folder)) as server:
        shutil.copy(other / "syncer.pem", folder)  # its key has not come yet
        for _ in range(2):
            await dial(server.address, encrypted.dialled(folder))
        (told,) = [each for each in caplog.messages if "stay in use" in each]
        assert "does not belong to" in told
        shutil.copy(other / "syncer.key", folder)
        await dial(server.address, encrypted.dialled(other))


@pytest.fixture
def week(tmp_path: Path) -> Path:
    """Certificates that are about to end."""
    folder = encrypted.made(tmp_path / "tls")
    CertificateFolder(folder).renew([], 3)
    return folder


async def test_both_sides_tell_once_that_a_certificate_is_about_to_end(
    week: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(encrypted.served(week, mutual=True)) as server:
        client = HttpClient(tls=encrypted.dialled(week, "learner-0"))
        for _ in range(2):
            await (await client.connect(server.address, "learner", "learner-0")).close()
        await client.close()
        told = [each for each in caplog.messages if "ends in 72 hours" in each]
        assert len(told) == 3, told
        for what in (f"{week}/syncer.pem", f"{week}/learner-0.pem", server.address):
            assert [each for each in told if f"the certificate {what}" in each.replace("of ", "")]


async def test_it_is_told_again_the_next_day(
    week: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = [0.0]
    monkeypatch.setattr(module, "now", lambda: clock[0])
    live = LiveTls(encrypted.served(week))
    for hours in (0, 1, 23, 25):
        clock[0] = hours * 3600.0
        live.tell("it", live.left_seconds or 0.0)
    assert len(caplog.messages) == 2


async def test_a_token_in_plain_text_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    client = HttpClient(token="s3cret")
    for _ in range(2):
        with pytest.raises(TransportError):
            await client.connect("http://no-such-host.invalid:1", "learner", "learner-0")
    (told,) = caplog.messages
    assert "can read the token" in told
    assert "s3cret" not in told
    async with serving(tokens=Tokens("s3cret")) as server:
        await client.connect(server.address, "learner", "learner-0")
    await client.close()
    assert len(caplog.messages) == 1, "loopback is nobody's to read"


async def test_a_body_comes_from_the_donor_that_was_named() -> None:
    """A learner's certificate has its id as its name, wherever it listens."""
    async with serving(encrypted.served(FOLDER, name="learner-1")) as server:
        server.bodies.offer("state", memoryview(b"body"), "digest")
        out = memoryview(bytearray(4))
        for donor, allowed in (("learner-1", True), ("learner-0", False)):
            client = HttpClient(
                tls=encrypted.dialled(FOLDER),
                server_name=donor,
                trusted=(server.address,),
                principal="learner-0",
            )
            get = client.get("/bodies/state", out, base=server.address)
            if allowed:
                await get
                assert bytes(out) == b"body"
            else:
                with pytest.raises(AccessError, match="another name"):
                    await get
            await client.close()


async def test_health_is_as_before_without_tls() -> None:
    async with serving(health=lambda: {"shard": 0}) as server:
        reader, writer = await asyncio.open_connection(*server.address[7:].split(":"))
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n")
        text = (await reader.read()).split(b"\r\n\r\n")[1]
        writer.close()
        assert json.loads(text) == {"shard": 0}


@pytest.fixture(autouse=True)
def _warnings(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="decoupled_diloco")
