"""Inputs found by fuzzing, each in its smallest form, that once crashed or filled the memory."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import xxhash

from decoupled_diloco.config.toml_files import load_config
from decoupled_diloco.errors import ConfigError, ProtocolError, StorageError, TransportError
from decoupled_diloco.tape.reader import TapeReader
from decoupled_diloco.tape.records import PROBLEMS_MAX
from decoupled_diloco.tape.segments import LINE_BYTES_MAX
from fuzz.file_targets import HEAD
from fuzz.harness import Target
from fuzz.sockets import HEAD as SHOWN
from fuzz.sockets import UPGRADE
from fuzz.valid import messages_of

DEEP = b"[" * 3_000
DIGITS = b"9" * 400
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
FORM = (
    b"POST /page/sign-in HTTP/1.1\r\nHost: x\r\nContent-Length: 8\r\n"
    b"Content-Type: application/x-www-form-urlencoded"
)
REPORT = b'{"type":"StepReport","step":1,"tokens":1,"seconds":%s}'


def record(text: bytes, body: bytes = b"") -> bytes:
    """Return a journal record with a valid digest."""
    return (
        HEAD.pack(b"DDJ1", len(text), len(body), xxhash.xxh3_128(text + body).digest())
        + text
        + body
    )


@pytest.mark.parametrize(
    ("name", "data", "error"),
    [
        ("from-learner", REPORT % DIGITS, ProtocolError),
        ("from-learner", b'{"type":' + b"[" * 940 + b"]" * 940 + b"}", ProtocolError),
        ("headers", b"\n\n0-4,x", ProtocolError),
        ("answer", DEEP, ProtocolError),
        ("state-head", b'["1", [["0", "float32", [-9], 9999999999999999999]], []]\n', StorageError),
        ("fetch-answer", CHUNKED + b"-%s\r\n" % DIGITS[:19], TransportError),
        ("tables", b"a = " + DEEP, ConfigError),
        ("tables", b"a = " + b"9" * 5_000, ConfigError),
        ("run-file", b"[run]\nlearners = 0x" + b"f" * 5_000, ConfigError),
        ("run-file", b'[run]\nname = "a"\nmax_steps = 1\nlearners = 2147483648', ConfigError),
        ("run-file", b"run = 0x" + b"f" * 5_000, ConfigError),
        ("authority", b"\n", ConfigError),
        ("scenario", b"name = 'a'\nrun = {max_steps = 9}\nworkload = {name = 'paced', "
         b"options = {step_seconds = 1979-05-27}}", ConfigError),
        ("principals", b"a = " + DEEP, ConfigError),
        ("token", b"\xff", ConfigError),
        ("addresses", b"\xff", StorageError),
        ("launcher", b"somebody elsewhere", ConfigError),
        ("claim", DEEP, StorageError),
        ("manifest", DEEP, StorageError),
        ("coordinator", DEEP, StorageError),
        ("layout-file", DEEP, StorageError),
        ("facts", DEEP, StorageError),
        ("jobs", b'[{"name": "a"}]', StorageError),
        ("ledger", record(b'{"basis": 3}'), StorageError),
    ],
)  # fmt: skip
def test_invalid_input_raises_the_named_error(
    targets: dict[str, Target], name: str, data: bytes, error: type[Exception]
) -> None:
    with pytest.raises(error):
        targets[name].read(data)


@pytest.mark.parametrize(
    ("name", "data"),
    [
        (
            "tape",
            b'{"v":4,"at":1,"process":"learner-%s","seq":1,"kind":"event","type":"StepFinished","data":{}}\n'
            % (b"9" * 5_000),
        ),
        ("override", b"run.name=" + DEEP),
        ("run-folder", b"a = " + DEEP),
        ("excerpt", b'{"kind":"start","data":' + DEEP + b"}\n"),
        ("tape-followed", b'{"v":4,"data":' + DEEP + b"}\n"),
        ("journal", record(b"3")),
        ("journal", record(DEEP)),
        ("shard-journal", record(b'{"fragment": {}, "version": "1.1", "digest": ""}', bytes(4))),
        ("shard-journal", record(b'{"fragment": 0, "version": "1.1", "digest": ""}', bytes(3))),
        ("shard-journal", record(b'{"fragment": 0, "version": "one", "digest": ""}', bytes(4))),
    ],
)
def test_torn_input_is_skipped(targets: dict[str, Target], name: str, data: bytes) -> None:
    targets[name].read(data)


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"GET / HTTP/1.1\r\nHost: [\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\nCookie: ddiloco-page=9.\xff\r\n\r\n", 303),
        (FORM + b"\r\n\r\nsecret=\xff", 400),
        (FORM + b"; charset=nobodys\r\n\r\nsecret=x", 400),
        (b"GET /page/events HTTP/1.1\r\nHost: x\r\nOrigin: http://[\r\n\r\n", 400),
        (UPGRADE.replace(b"dGhlIHNhbXBsZSBub25jZQ==", b"\xc3\xa9" * 12), 400),
    ],
)
def test_requests_that_were_answered_500(
    targets: dict[str, Target], data: bytes, status: int
) -> None:
    """`read` raises for a 500 answer and for a logged error."""
    answer = targets["http"].read(data)
    assert isinstance(answer, bytes)
    assert answer.startswith(b"HTTP/1.1 %d" % status)


def test_a_line_that_is_not_valid_http_is_not_logged(
    targets: dict[str, Target], caplog: pytest.LogCaptureFixture
) -> None:
    """aiohttp would log the line with the token in it."""
    with caplog.at_level(logging.DEBUG):
        for line in (b"\x00", b"Authorization: Bearer secret\x00"):
            targets["http"].read(b"GET /run HTTP/1.1\r\n" + SHOWN + line + b"\r\n\r\n")
    assert "secret" not in caplog.text
    assert not [each for each in caplog.records if each.levelno >= logging.ERROR]


def test_a_certificate_of_an_unknown_version(targets: dict[str, Target]) -> None:
    import base64

    begin, *lines, end = targets["certificate"].samples[0].strip().splitlines()
    der = base64.b64decode(b"".join(lines)).replace(
        b"\xa0\x03\x02\x01\x02", b"\xa0\x03\x02\x01\x0a"
    )
    with pytest.raises(ConfigError):
        targets["certificate"].read(b"\n".join([begin, base64.encodebytes(der).strip(), end, b""]))


def test_a_share_of_another_model(targets: dict[str, Target]) -> None:
    share = targets["share"].samples[0]
    size = int.from_bytes(share[:8], "little")
    head = share[8 : 8 + size].replace(b'"fragment.0"', b'"fragment.9"')
    with pytest.raises(StorageError, match="not a share"):
        targets["share"].read(share[:8] + head + share[8 + size :])


def test_a_file_of_torn_lines_does_not_fill_the_memory(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"{\n" * (PROBLEMS_MAX + 5_000))
    reader = TapeReader(path)
    assert list(reader) == []
    assert len(reader.problems) == PROBLEMS_MAX + 1
    assert "are not listed" in reader.problems[-1]


def test_an_endless_line_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"x" * (LINE_BYTES_MAX + 100) + b"\n\n")
    reader = TapeReader(path)
    assert list(reader) == []
    assert "longer than 16 MiB" in reader.problems[0]


def test_a_long_invalid_setting_is_shortened_in_the_error(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(f'[run]\nname = "a"\nmax_steps = "{"x" * 10_000}"\n')
    with pytest.raises(ConfigError) as raised:
        load_config(path)
    assert len(str(raised.value)) < 1_000


def test_the_samples_contain_messages_of_all_kinds() -> None:
    from typing import get_args

    from decoupled_diloco.protocol import messages

    assert len(messages_of(get_args(messages.FromLearner))) == 4 * len(
        get_args(messages.FromLearner)
    )
