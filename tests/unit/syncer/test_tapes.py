"""The tapes that a shard serves over HTTP: bounded pieces, whole lines, and the next offset."""

import asyncio
import json
from functools import partial

import aiohttp
import pytest

from decoupled_diloco.errors import AccessError, ConfigError, ProtocolError, TransportError
from decoupled_diloco.protocol.messages import Tick
from decoupled_diloco.syncer import tapes
from decoupled_diloco.syncer.tapes import TapeDocuments, read_piece
from decoupled_diloco.tape import TapeWriter
from decoupled_diloco.tape.samples import StoreMirrored
from decoupled_diloco.tape.segments import (
    compress_later,
    end_segment,
    open_to_append,
    segments_of,
)
from decoupled_diloco.tape.sources import TAPE_PATH, SyncerSource
from decoupled_diloco.transport.documents import NoSuchDocumentError
from decoupled_diloco.transport.fetch import fetch
from decoupled_diloco.transport.http_server import HttpServer
from decoupled_diloco.transport.tokens import Tokens
from unit.show.show_worlds import write_world


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    run = tmp_path_factory.mktemp("served")
    write_world(run, until=30.0)
    return run


def documents_of(folder, shard=0, addresses=("http://127.0.0.1:1", "http://127.0.0.1:2")):
    names = [f"shard-{shard}", *(["coordinator"] if shard == 0 else [])]
    files = {name: folder / "tape" / f"{name}.jsonl" for name in names}
    return TapeDocuments("causes", shard, addresses, files)


def elsewhere(documents, folder, _, *arguments):
    """Return the documents of another folder."""
    return documents(folder, *arguments)


def follow(path, *, detail=True):
    """Return all pieces of a tape, and their number."""
    start, text, pieces = 0, b"", 0
    while True:
        document = read_piece(path, start, detail=detail)
        text += document.body
        following = int(document.facts["next"])
        if following == start:
            return text, pieces
        start, pieces = following, pieces + 1


def test_pieces_of_any_size_make_up_the_whole_tape(folder, monkeypatch):
    path = folder / "tape" / "shard-0.jsonl"
    whole, pieces = follow(path)
    assert pieces == 1
    monkeypatch.setattr(tapes, "PIECE_BYTES", 3000)
    assert follow(path) == (whole, pytest.approx(path.stat().st_size / 3000, rel=0.3))


def in_segments(folder, source):
    """Write the same text in segments of 20 lines each."""
    folder.mkdir()
    tape = folder / source.name
    lines = source.read_bytes().splitlines(keepends=True)
    for first in range(0, len(lines), 20):
        with open_to_append(tape) as file:
            file.write(b"".join(lines[first : first + 20]))
            assert end_segment(tape, file)
    with open_to_append(tape) as file:
        file.write(b'{"v":1,"at"')
    compress_later(tape).result()
    return tape


@pytest.mark.parametrize("piece_bytes", [3000, 1 << 20])
def test_pieces_of_a_tape_in_segments_are_the_same_text(folder, tmp_path, monkeypatch, piece_bytes):
    whole = folder / "tape" / "shard-0.jsonl"
    tape = in_segments(tmp_path / "tape", whole)
    assert len(segments_of(tape)) > 10
    monkeypatch.setattr(tapes, "PIECE_BYTES", piece_bytes)
    assert follow(tape)[0] == follow(whole)[0]
    first, last = read_piece(tape, 0, detail=True), read_piece(tape, 10**9, detail=True)
    assert first.facts["tape"] == read_piece(whole, 0, detail=True).facts["tape"]
    assert int(last.facts["size"]) == whole.stat().st_size + len('{"v":1,"at"')


async def test_a_reader_reports_a_corrupted_segment_and_continues(
    servers, folder, tmp_path, monkeypatch
):
    (tmp_path / "tape").mkdir()
    for process in ("shard-0", "shard-1", "coordinator"):
        source = folder / "tape" / f"{process}.jsonl"
        tape = in_segments(tmp_path / process, source)
        for path in (tape, tape.with_suffix(".segments")):
            path.rename(tmp_path / "tape" / path.name)
    spoilt = segments_of(tmp_path / "tape" / "shard-1.jsonl")[2]
    spoilt.path.write_bytes(spoilt.path.read_bytes()[:100])
    monkeypatch.setattr(f"{__name__}.documents_of", partial(elsewhere, documents_of, tmp_path))
    source = SyncerSource((servers[0].address,), "secret")
    records = await in_thread(source.poll)
    assert len({r.seq for r in records if r.process == "shard-1"}) > 100
    assert records[-1].at > 29.0
    [problem] = source.problems()
    assert f"from byte {spoilt.begin} to {spoilt.end} missing" in problem


def test_a_line_longer_than_a_piece_arrives_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(tapes, "PIECE_BYTES", 100)
    path = tmp_path / "shard-0.jsonl"
    line = json.dumps({"v": 1, "kind": "effect", "type": "Note", "data": {"text": "x" * 1000}})
    path.write_text((line.replace(", ", ",").replace(": ", ":") + "\n") * 3)
    assert follow(path)[0] == path.read_bytes()


def test_an_unfinished_line_is_read_later(folder, tmp_path):
    whole = (folder / "tape" / "shard-0.jsonl").read_bytes()
    path = tmp_path / "shard-0.jsonl"
    path.write_bytes(whole[:-20])
    first = read_piece(path, 0, detail=True)
    cut = whole[:-20].rfind(b"\n") + 1
    assert int(first.facts["next"]) == cut
    path.write_bytes(whole)
    rest = read_piece(path, cut, detail=True)
    assert int(rest.facts["next"]) == len(whole)


def test_an_offset_after_the_end_returns_nothing(folder):
    path = folder / "tape" / "shard-0.jsonl"
    document = read_piece(path, 10**12, detail=True)
    assert (document.body, document.facts["next"]) == (b"", str(10**12))


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ({"process": "learner-1"}, "the tapes are coordinator, shard-0"),
        ({"process": "../token"}, "has no tape here"),
        ({"process": "shard-0", "from": "-1"}, "is not an offset"),
        ({"process": "shard-0", "from": "9" * 30}, "is not an offset"),
        ({"process": "shard-0", "from": "²"}, "is not an offset"),
    ],
)
async def test_a_missing_document_is_named_in_the_error(folder, query, message):
    with pytest.raises(NoSuchDocumentError, match=message):
        await documents_of(folder)(query)


async def test_a_tape_that_its_process_has_not_begun_is_empty(tmp_path):
    """The mirror of the run starts after the shard, which serves its tape, too."""
    document = await documents_of(tmp_path)({"process": "shard-0"})
    assert (document.body, document.facts["next"], document.facts["size"]) == (b"", "0", "0")


async def test_a_reader_follows_a_tape_that_begins_later(tmp_path, monkeypatch):
    def mirror():
        with TapeWriter(tmp_path / "tape", "mirror") as tape:
            tape.sample(0.0, StoreMirrored("s3://bucket/run", 3, 10, 0, ""))

    files = {name: tmp_path / "tape" / f"{name}.jsonl" for name in ("shard-0", "mirror")}
    documents = TapeDocuments("causes", 0, ("http://shard",), files)
    monkeypatch.setattr(
        "decoupled_diloco.tape.sources.fetch",
        lambda address, path, query, *secrets: asyncio.run(documents(query)),
    )
    with TapeWriter(tmp_path / "tape", "shard-0") as tape:
        tape.event(0.0, Tick())
    source = SyncerSource(("http://shard",), "secret")
    before = await in_thread(source.poll)
    mirror()
    after = await in_thread(source.poll)
    assert {record.process for record in before} == {"shard-0"}
    assert {(record.process, record.type) for record in after} == (
        {("mirror", "start"), ("mirror", "StoreMirrored")}
    )
    assert source.generation == 0, "it is the same run"


async def nobody(channel):
    raise AssertionError("no channel is opened here")


@pytest.fixture
async def servers(folder):
    """Both shards of the run, which know each other's addresses."""
    addresses: list[str] = []
    started = []
    for shard in (0, 1):

        async def query(parameters, shard=shard):
            return await documents_of(folder, shard, tuple(addresses))(parameters)

        server = HttpServer(tokens=Tokens("secret"), on_channel=nobody, queries={TAPE_PATH: query})
        await server.start()
        addresses.append(server.address)
        started.append(server)
    yield started
    for server in started:
        await server.stop()


async def in_thread(function, *arguments):
    return await asyncio.to_thread(function, *arguments)


async def test_any_shard_gives_access_to_all_tapes(servers):
    for server in servers:
        source = SyncerSource((server.address,), "secret")
        records = await in_thread(source.poll)
        assert {record.process for record in records} == {"shard-0", "shard-1", "coordinator"}
        assert [r.wall for r in records] == sorted(r.wall for r in records)
        assert await in_thread(source.poll) == []
        assert source.problems() == []


async def test_an_unreachable_shard_is_reported_and_the_others_are_read(servers):
    source = SyncerSource((servers[0].address,), "secret")
    await in_thread(source.poll)
    await servers[1].stop()
    assert await in_thread(source.poll) == []
    assert "shard 1 is unreachable" in source.problems()[0]


@pytest.mark.parametrize("longer", ["one", "all"])
async def test_a_new_run_at_the_same_addresses_is_read_once_from_its_start(
    servers, folder, tmp_path_factory, monkeypatch, longer
):
    """Also when all or some of its tapes are longer than the part of the old ones that was read."""
    copy = tmp_path_factory.mktemp("served-copy")
    names = ("shard-0", "shard-1", "coordinator")
    whole = {name: (folder / "tape" / f"{name}.jsonl").read_bytes() for name in names}
    (copy / "tape").mkdir()

    def write(name, share, run):
        lines = whole[name].splitlines(keepends=True)
        lines[0] = lines[0].replace(b'"pid":', f'"pid":{run}'.encode())
        (copy / "tape" / f"{name}.jsonl").write_bytes(b"".join(lines[: int(share * len(lines))]))

    for name in names:
        write(name, 0.5, run=1)
    monkeypatch.setattr(f"{__name__}.documents_of", partial(elsewhere, documents_of, copy))
    source = SyncerSource((servers[0].address,), "secret")
    first = await in_thread(source.poll)
    assert (source.generation, await in_thread(source.poll)) == (0, [])
    for name in names:
        write(name, 0.2 if (name, longer) == ("shard-1", "one") else 0.9, run=2)
    second = await in_thread(source.poll)
    assert source.generation == 1
    fresh = await in_thread(SyncerSource((servers[0].address,), "secret").poll)
    assert [(r.process, r.seq) for r in second] == [(r.process, r.seq) for r in fresh]
    assert len(second) > len(first) / 2
    assert await in_thread(source.poll) == []


async def test_a_wrong_auth_token_is_rejected(servers):
    for token in (None, "wrong", "secret-wrong"):
        with pytest.raises(AccessError) as caught:
            await in_thread(SyncerSource((servers[0].address,), token).poll)
        assert caught.value.exit_code == 5
        assert "wrong" not in str(caught.value)


async def test_the_separate_secret_of_each_name_is_accepted(folder):
    tokens = Tokens(principals={"learner-0": "one", "learner-1": "two"})
    server = HttpServer(
        tokens=tokens, on_channel=nobody, queries={TAPE_PATH: documents_of(folder, 1)}
    )
    await server.start()
    try:
        for token in ("one", "two"):
            assert (await in_thread(fetch, server.address, TAPE_PATH, {}, token)).body
        with pytest.raises(AccessError):
            await in_thread(fetch, server.address, TAPE_PATH, {}, "three")
    finally:
        await server.stop()


async def test_browsers_are_rejected(servers):
    async with aiohttp.ClientSession() as session:
        headers = {"Authorization": "Bearer secret", "Origin": "http://evil.example"}
        async with session.get(servers[0].address + TAPE_PATH, headers=headers) as answer:
            assert answer.status == 403


async def test_only_reading_is_served(servers):
    async with aiohttp.ClientSession(headers={"Authorization": "Bearer secret"}) as session:
        for method in ("POST", "PUT", "DELETE"):
            async with session.request(method, servers[0].address + TAPE_PATH) as answer:
                assert answer.status in (400, 404, 405)


async def test_another_server_is_recognized(servers):
    with pytest.raises(ProtocolError, match="has no tape here"):
        await in_thread(fetch, servers[0].address, TAPE_PATH, {"process": "x"}, "secret")


async def test_an_invalid_auth_token_is_not_printed(servers):
    for token in ("two\nlines", "schlüssel€"):
        with pytest.raises(ConfigError, match="the token has invalid characters") as caught:
            await in_thread(fetch, servers[0].address, TAPE_PATH, {}, token)
        assert token not in str(caught.value)


def test_an_unreachable_syncer_is_one_sentence_with_a_fix():
    with pytest.raises(TransportError, match="is it running") as caught:
        SyncerSource(("http://127.0.0.1:1",), None).poll()
    assert caught.value.exit_code == 4


@pytest.mark.parametrize(
    "address",
    [
        "ftp://host",
        "http://",
        "http://host:port",
        "http://host:99999",
        "http://[::1",
        "http://[::zz]:1",
        "http://a b",
        "http://a..b:1",
        "http://" + "x" * 80 + ":1",
        "http://ex\u2100mple:80",
        "http://\u202ex:1",
    ],
)
def test_an_invalid_address_is_an_error(address):
    with pytest.raises(ConfigError, match="not a valid syncer address"):
        fetch(address, TAPE_PATH, {}, None)
