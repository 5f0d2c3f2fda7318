"""HTTPS only: trust, access, error messages, and renewal of certificates in a running server."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from yarl import URL

import encrypted
from decoupled_diloco.errors import AccessError, ConfigError, TransportError
from decoupled_diloco.launch.certificates import CertificateFolder
from decoupled_diloco.transport import tls as module
from decoupled_diloco.transport.documents import Document
from decoupled_diloco.transport.fetch import fetch
from decoupled_diloco.transport.http_client import HttpClient, encryption_problem
from decoupled_diloco.transport.http_server import CERTIFICATE_LEFT, HttpServer
from decoupled_diloco.transport.interface import Channel
from decoupled_diloco.transport.reachability import check_server
from decoupled_diloco.transport.tls import DAY_SECONDS, LiveTls, ServerTLSConfig, TLSConfig
from decoupled_diloco.transport.tokens import Tokens

FOLDER = encrypted.folder()


@asynccontextmanager
async def serving(tls: ServerTLSConfig | None = None, **options: Any) -> AsyncIterator[HttpServer]:
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
    address: str, tls: TLSConfig | None, name: str = "learner-0", token: str | None = None
) -> None:
    client = HttpClient(tls=tls, token=token)
    try:
        await client.connect(address, "learner", name)
    finally:
        await client.close()


async def read(address: str, tls: TLSConfig | None, token: str | None = None) -> bytes:
    document = await asyncio.to_thread(fetch, address, "/document", {}, token, tls)
    return document.body


async def both_refuse(
    address: str, tls: TLSConfig | None, kind: type[Exception], match: str
) -> None:
    """Check that the control plane and documents are refused alike."""
    for attempt in (dial(address, tls), read(address, tls)):
        with pytest.raises(kind, match=match):
            await attempt


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Certificates that another CA has signed."""
    return encrypted.made(tmp_path_factory.mktemp("other"))


async def test_a_client_that_trusts_the_ca_connects_and_reads() -> None:
    async with serving(encrypted.served(FOLDER)) as server:
        assert server.address.startswith("https://")
        await dial(server.address, encrypted.dialled(FOLDER))
        assert await read(server.address, encrypted.dialled(FOLDER)) == b"text"


async def test_the_network_sees_neither_a_token_nor_what_is_sent() -> None:
    """An attacker between both ends records all bytes; without TLS it finds both."""
    token, text = "a token of this run", b"text"
    for tls, is_seen in ((encrypted.served(FOLDER), False), (None, True)):
        async with serving(tls, tokens=Tokens(run_token=token)) as server:
            seen = bytearray()
            port = int(server.address.rpartition(":")[2])

            async def pass_on(
                reader: asyncio.StreamReader,
                writer: asyncio.StreamWriter,
                port: int = port,
                seen: bytearray = seen,
            ) -> None:
                async def copy(one: asyncio.StreamReader, other: asyncio.StreamWriter) -> None:
                    while piece := await one.read(1 << 16):
                        seen.extend(piece)
                        other.write(piece)
                    other.close()

                there, back = await asyncio.open_connection("127.0.0.1", port)
                await asyncio.gather(copy(reader, back), copy(there, writer))

            network = await asyncio.start_server(pass_on, "127.0.0.1", 0)
            between = network.sockets[0].getsockname()[1]
            address = f"{server.address.rpartition(':')[0]}:{between}"
            used = None if tls is None else encrypted.dialled(FOLDER)
            assert await read(address, used, token) == text
            network.close()
            assert (token.encode() in seen, b"\r\n\r\n" + text in seen) == (is_seen, is_seen)
            assert len(seen) > 200


async def test_a_certificate_of_an_untrusted_ca_is_refused(other: Path) -> None:
    async with serving(encrypted.served(FOLDER)) as server:
        for tls in (None, encrypted.dialled(other)):
            await both_refuse(
                server.address, tls, AccessError, "not signed by a CA that is trusted"
            )


async def test_a_certificate_for_another_name_is_refused() -> None:
    async with serving(encrypted.served(FOLDER, name="learner-1")) as server:
        tls = encrypted.dialled(FOLDER)
        await both_refuse(server.address, tls, AccessError, "is for another name.*--host HOST")


@pytest.mark.parametrize(
    ("later", "words"), [(encrypted.PAST, "has expired"), (encrypted.FUTURE, "not valid yet")]
)
async def test_a_servers_certificate_of_another_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, later: timedelta, words: str
) -> None:
    """The server may renew it, so the error is not permanent."""
    folder = encrypted.made(tmp_path / "tls")
    with encrypted.another_day(later):
        CertificateFolder(folder).renew(["syncer"], 30)
    with pytest.raises(ConfigError, match=r"expired on|not valid before"):
        LiveTls(encrypted.served(folder))
    monkeypatch.setattr(module, "_end_of", lambda path: 0.0)  # It may expire while a server runs.
    async with serving(encrypted.served(folder)) as server:
        for attempt in (dial, read):
            with pytest.raises(TransportError, match=words) as caught:
                await attempt(server.address, encrypted.dialled(folder))
            assert not isinstance(caught.value, AccessError)


async def test_plain_text_to_an_encrypted_port_and_the_reverse() -> None:
    async with serving(encrypted.served(FOLDER)) as server:
        plain = server.address.replace("https", "http")
        await both_refuse(plain, None, AccessError, "uses TLS: write https://")
        seen = await check_server(plain, None)
        assert seen.trouble is not None
        assert (seen.trouble.cause, "write https://" in seen.trouble.text) == ("tls", True)
    async with serving() as server:
        address = server.address.replace("http", "https")
        tls = encrypted.dialled(FOLDER)
        await both_refuse(address, tls, AccessError, "does not use TLS: write http://")
        with pytest.raises(ConfigError, match="would be ignored"):
            await read(server.address, tls)


async def test_a_certificate_is_valid_only_for_its_own_id() -> None:
    async with serving(
        encrypted.served(FOLDER, mutual=True), tokens=Tokens(certificates=True)
    ) as server:
        address = server.address
        await dial(address, encrypted.dialled(FOLDER, "learner-0"))
        assert await read(address, encrypted.dialled(FOLDER, "learner-1")) == b"text"
        with pytest.raises(AccessError, match="certificate names learner-0, not 'learner-1'"):
            await dial(address, encrypted.dialled(FOLDER, "learner-0"), "learner-1")
        await both_refuse(address, encrypted.dialled(FOLDER), AccessError, "requires a certificate")


async def test_all_shards_may_present_the_syncers_certificate() -> None:
    async with serving(
        encrypted.served(FOLDER, mutual=True), tokens=Tokens(certificates=True)
    ) as server:
        await dial(server.address, encrypted.dialled(FOLDER, "syncer"), "shard-3")
        with pytest.raises(AccessError, match="not 'learner-0'"):
            await dial(server.address, encrypted.dialled(FOLDER, "syncer"))


async def test_client_certificates_of_another_ca_are_refused(other: Path) -> None:
    async with serving(
        encrypted.served(FOLDER, mutual=True), tokens=Tokens(certificates=True)
    ) as server:
        mine = replace(encrypted.dialled(other, "learner-0"), ca_cert=FOLDER / "authority.pem")
        await both_refuse(server.address, mine, AccessError, "rejects this process's certificate")


@pytest.mark.parametrize(
    "error",
    [
        aiohttp.ServerDisconnectedError(),
        ConnectionResetError(errno.ECONNRESET, "reset"),
        aiohttp.ClientOSError(errno.ECONNRESET, "reset"),
        aiohttp.ClientOSError(errno.EPIPE, "broken pipe"),
    ],
    ids=repr,
)
async def test_a_refused_certificate_is_named_however_the_connection_ends(
    other: Path, error: Exception
) -> None:
    """The alert may arrive before, with or after the request, depending on the speed of both."""
    async with serving(
        encrypted.served(FOLDER, mutual=True), tokens=Tokens(certificates=True)
    ) as server:
        mine = replace(encrypted.dialled(other, "learner-0"), ca_cert=FOLDER / "authority.pem")
        url = URL(server.address)
        problem = await encryption_problem(error, url, server.address, mine.new_context())
        assert isinstance(problem, AccessError)
        assert "rejects this process's certificate" in str(problem)


async def test_tokens_and_certificates_are_both_required_if_both_are_set() -> None:
    tokens = Tokens(principals={"learner-0": "a", "learner-1": "b"}, certificates=True)
    async with serving(encrypted.served(FOLDER, mutual=True), tokens=tokens) as server:
        mine = encrypted.dialled(FOLDER, "learner-0")
        await dial(server.address, mine, token="a")
        with pytest.raises(AccessError, match="belongs to 'learner-1'"):
            await dial(server.address, mine, token="b")
        with pytest.raises(AccessError, match="requires the run's secret"):
            await dial(server.address, mine)


async def test_the_doctor_reports_the_id_of_its_certificate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("decoupled_diloco.transport.reachability.RATE_SECONDS", 0.05)
    async with serving(
        encrypted.served(FOLDER, mutual=True),
        tokens=Tokens(certificates=True),
        health=lambda: {"shard": 0},
    ) as server:
        seen = await check_server(server.address, None, tls=encrypted.dialled(FOLDER, "learner-1"))
        assert (seen.trouble, seen.principal) == (None, "learner-1")
        assert seen.health is not None
        assert 29 * DAY_SECONDS < seen.health[CERTIFICATE_LEFT] < 30 * DAY_SECONDS
        without = await check_server(server.address, None, tls=encrypted.dialled(FOLDER))
        assert without.health is not None, "/healthz requires no certificate"
        assert without.trouble is not None
        assert "requires a certificate" in without.trouble.text


async def days_shown(address: str, tls: TLSConfig) -> float:
    """Return the remaining days of the certificate that the server presents to a new connection."""
    client = HttpClient(tls=tls)
    context = LiveTls(tls).context()
    host, port = address.removeprefix("https://").split(":")
    _, writer = await asyncio.open_connection(host, int(port), ssl=context, server_hostname=host)
    left = module.left_seconds_of(writer.get_extra_info("peercert"))
    writer.close()
    await writer.wait_closed()
    await client.close()
    return left / DAY_SECONDS


async def test_a_renewed_certificate_is_presented_and_old_connections_stay(tmp_path: Path) -> None:
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


async def test_another_ca_takes_over_on_both_sides(tmp_path: Path, other: Path) -> None:
    """All files are replaced. From then on, clients with the old files are refused."""
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
        mine = replace(encrypted.dialled(old, "learner-0"), ca_cert=other / "authority.pem")
        with pytest.raises(AccessError, match="rejects this process's certificate"):
            await dial(server.address, mine)


async def test_broken_files_leave_the_old_certificate_in_use(
    tmp_path: Path, other: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = encrypted.made(tmp_path / "tls")
    async with serving(encrypted.served(folder)) as server:
        shutil.copy(other / "syncer.pem", folder)  # its key has not been copied yet
        for _ in range(2):
            await dial(server.address, encrypted.dialled(folder))
        (warning,) = [each for each in caplog.messages if "stay in use" in each]
        assert "does not match" in warning
        shutil.copy(other / "syncer.key", folder)
        await dial(server.address, encrypted.dialled(other))


@pytest.fixture
def week(tmp_path: Path) -> Path:
    """Certificates that expire soon."""
    folder = encrypted.made(tmp_path / "tls")
    CertificateFolder(folder).renew([], 3)
    return folder


async def test_both_sides_warn_once_about_a_certificate_that_expires_soon(
    week: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(encrypted.served(week, mutual=True)) as server:
        client = HttpClient(tls=encrypted.dialled(week, "learner-0"))
        for _ in range(2):
            await (await client.connect(server.address, "learner", "learner-0")).close()
        await client.close()
        warnings = [each for each in caplog.messages if "expires in 72 hours" in each]
        assert len(warnings) == 3, warnings
        for what in (f"{week}/syncer.pem", f"{week}/learner-0.pem", server.address):
            text = f"the certificate {what}"
            assert [each for each in warnings if text in each.replace("of ", "")]


async def test_the_warning_is_repeated_the_next_day(
    week: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = [0.0]
    monkeypatch.setattr(module, "now", lambda: clock[0])
    live = LiveTls(encrypted.served(week))
    for hours in (0, 1, 23, 25):
        clock[0] = hours * 3600.0
        live.warn_of_expiry("it", live.left_seconds or 0.0)
    assert len(caplog.messages) == 2


async def test_a_token_in_plain_text_causes_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    client = HttpClient(token="s3cret")
    for _ in range(2):
        with pytest.raises(TransportError):
            await client.connect("http://no-such-host.invalid:1", "learner", "learner-0")
    (warning,) = caplog.messages
    assert "can read the token" in warning
    assert "s3cret" not in warning
    async with serving(tokens=Tokens("s3cret")) as server:
        await client.connect(server.address, "learner", "learner-0")
    await client.close()
    assert len(caplog.messages) == 1, "loopback traffic cannot be read by others"


async def test_health_without_tls_has_no_certificate() -> None:
    async with serving(health=lambda: {"shard": 0}) as server:
        reader, writer = await asyncio.open_connection(*server.address[7:].split(":"))
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n")
        text = (await reader.read()).split(b"\r\n\r\n")[1]
        writer.close()
        assert json.loads(text) == {"shard": 0}


@pytest.fixture(autouse=True)
def _warnings(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="decoupled_diloco")
