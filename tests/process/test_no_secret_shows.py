"""Secrets of every kind appear in no other file, no output and no process list.

Real processes are started with an auth token, with a secret per name, and with certificates. They
are killed, rejected, watched and queried by every command. Then every readable byte is searched for
each secret and its usual encodings.
"""

from __future__ import annotations

import base64
import contextlib
import json
import lzma
import os
import stat
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, quote_plus, urlencode

import pytest

import encrypted
from process.process_runs import command, config_file, health, until

STRANGE = "Zq7/+&=%wrong-token-of-a-stranger"
BUDGET = {"max_steps": 100_000, "learners": 2}


def encodings(secret: str) -> Iterator[bytes]:
    """Return a secret as it is, and in the forms in which programs write it."""
    raw = secret.encode()
    yield from {raw, quote(secret, safe="").encode(), quote(secret).encode()}
    yield from {quote_plus(secret).encode(), json.dumps(secret)[1:-1].encode(), raw.hex().encode()}
    for shift in range(3):  # within other text, base64 has one of three alignments
        for encode in (base64.b64encode, base64.urlsafe_b64encode):
            yield encode(bytes(shift) + raw)[4:-4]


def found_in(data: bytes, secrets: Mapping[str, list[bytes]]) -> list[str]:
    return [name for name, needles in secrets.items() if any(each in data for each in needles)]


def needles_of(secrets: Mapping[str, str]) -> dict[str, list[bytes]]:
    return {name: list(encodings(secret)) for name, secret in secrets.items()}


def key_of(path: Path) -> list[bytes]:
    """Return the recognizable forms of a private key: its lines, and its bytes."""
    lines = path.read_bytes().split(b"\n")[1:-2]
    return [*lines, base64.b64decode(b"".join(lines))[30:62]]


def everywhere(folder: Path) -> Iterator[tuple[str, bytes]]:
    """Yield every file below a folder, including compressed ones."""
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.is_symlink():
            data = path.read_bytes()
            yield str(path), str(path).encode() + b"\n" + data
            if path.suffix == ".xz":
                yield f"{path}, unpacked", lzma.decompress(data)


def processes() -> Iterator[tuple[str, bytes]]:
    """Yield what each process of this machine exposes."""
    for place in Path("/proc").glob("[0-9]*"):
        for name in ("cmdline", "environ"):
            with contextlib.suppress(OSError):
                data = (place / name).read_bytes()
                if name == "environ":
                    assert stat.S_IMODE((place / name).stat().st_mode) == 0o400
                yield f"{place}/{name}", data


class Watch:
    """Collects where a secret was found.

    Args:
        secrets: Every encoding, by name.
        token: The run's auth token, if it is known from the start.
    """

    def __init__(self, secrets: dict[str, list[bytes]], token: str = "") -> None:
        self.secrets = secrets
        self.token = token
        self.found: list[str] = []

    def look(self, where: str, data: bytes) -> None:
        self.found += [f"{name} in {where}" for name in found_in(data, self.secrets)]

    def look_at_processes(self) -> None:
        for where, data in processes():
            self.look(where, data)


def asked(*arguments: str, code: int | None = 0) -> bytes:
    """Return all output of a command that ends with this exit code; ``None`` allows any code."""
    done = subprocess.run(
        [sys.executable, "-m", "decoupled_diloco.cli", *arguments],
        capture_output=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=240,
    )
    assert code in (None, done.returncode), (arguments, done.stdout, done.stderr)
    return done.stdout + done.stderr


def pass_of(address: str, secret: str) -> str:
    """Return the cookie that a browser receives for the secret."""

    class Stay(urllib.request.HTTPRedirectHandler):
        def redirect_request(self, *_: Any) -> None:
            return None

    form = urlencode({"secret": secret}).encode()
    request = urllib.request.Request(f"{address}/page/sign-in", data=form, method="POST")
    try:
        urllib.request.build_opener(Stay).open(request, timeout=10)
    except urllib.error.HTTPError as answer:
        cookie = str(answer.headers["Set-Cookie"])
        answer.close()
        return cookie.partition("=")[2].partition(";")[0].partition(".")[2]
    raise AssertionError("nobody is signed in")


def guess(address: str) -> None:
    """Send an invented token in each place where a server looks for one."""
    for headers in ({"Authorization": f"Bearer {STRANGE}"}, {"Cookie": f"ddiloco-page={STRANGE}"}):
        for path in ("/run", "/", "/tape", f"/run?token={quote(STRANGE)}"):
            request = urllib.request.Request(address + path, headers=headers)
            with contextlib.suppress(urllib.error.URLError, ConnectionError):
                urllib.request.urlopen(request, timeout=5).close()


def kill(run: Path, name: str) -> None:
    """Kill a role's process, found by its command line."""
    role, _, number = name.partition("-")
    option = {"learner": b"--index", "shard": b"--shard"}[role]
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            words = (place / "cmdline").read_bytes().split(b"\0")
            is_it = words[words.index(option) + 1] == number.encode()
            if is_it and any(word.startswith(f"{run}/".encode()) for word in words):
                os.kill(int(place.name), 9)
                return
    raise AssertionError(f"{name} does not run")


@contextlib.contextmanager
def training(file: Path) -> Iterator[subprocess.Popen[str]]:
    """Run ``ddiloco train`` with its output in a file next to the run, and interrupt it like a
    user.
    """
    output = file.with_suffix(".out").open("w")
    process = command("train", str(file))
    try:
        yield process
    finally:
        process.send_signal(2)
        try:
            text, _ = process.communicate(timeout=240)
        finally:
            process.kill()
        output.write(text)
        output.close()


def asking(address: str, file: Path, run: Path, told: list[str]) -> list[list[str]]:
    """Return commands that query a run in progress."""
    return [
        ["status", address, *told],
        ["doctor", str(file), "--syncer", address, *told],
        ["checkpoint", address, *told],
        ["explain", "learner", "learner-0", address, *told],
        ["intervals", address, *told],
        ["metrics", "config", str(run), *told],
    ]


def lived(file: Path, run: Path, watch: Watch, told: list[str]) -> None:
    """Run with everything that could expose a secret."""
    with training(file) as process:
        addresses = run / "addresses"
        until(lambda: addresses.exists() and addresses.read_text().split(), "addresses", 60)
        address = addresses.read_text().split()[0]
        if address.startswith("http://"):
            until(lambda: health(address).get("clock", 0) > 3, "a few steps", 60)
            guess(address)
        else:
            tape = run / "tape" / "learner-0.jsonl"
            until(lambda: tape.exists() and "StepFinished" in tape.read_text(), "steps", 60)
        if (run / "token").exists():
            watch.token = (run / "token").read_text().strip()
            watch.secrets |= needles_of({"token": watch.token})
            told = ["--auth-token-file", str(run / "token")]
        if watch.token:
            watch.secrets |= needles_of({"page's pass": pass_of(address, watch.token)})
        watch.look_at_processes()
        for name in ("learner-0", "shard-1"):
            kill(run, name)
        everything = run.name == "own"  # all commands query one run
        for words in asking(address, file, run, told)[: None if everything else 3]:
            watch.look(f"what {words[0]} says", asked(*words))
            watch.look_at_processes()
        if address.startswith("http://"):
            refused = asked("status", address, *wrong(file.parent.parent / "private"), code=5)
            watch.look("what a wrong token is told", refused)
        assert process.poll() is None, "the run has continued"
    watch.look("what train says", file.with_suffix(".out").read_bytes())


@pytest.mark.parametrize(
    "kind",
    [
        "token",
        "own",
        pytest.param("principals", marks=pytest.mark.smoke),
        "certificates",
    ],
)
def test_no_secret_shows(kind: str, tmp_path: Path) -> None:
    run = tmp_path / "runs" / kind
    secrets: dict[str, str] = {"a stranger's": STRANGE}
    tables: dict[str, Any] = {"run": BUDGET, "syncer": {"shards": 2, "record_payloads": True}}
    told: list[str] = []
    private = tmp_path / "private"
    private.mkdir()
    if kind == "token":
        secrets["token"] = "Qx9/+&=%token-of-the-run"
        (private / "token").write_text(secrets["token"] + "\n")
        tables["syncer"]["token_file"] = private / "token"
        told = ["--auth-token-file", str(private / "token")]
    if kind == "principals":
        names = ("learner-0", "learner-1", "shard-0", "shard-1")
        secrets |= {name: f"Kw{name[-1]}/+&=%secret-of-{name[::-1]}" for name in names}
        lines = [f"{name} = {json.dumps(secrets[name])}\n" for name in names]
        (private / "principals.toml").write_text("".join(lines))
        (private / "one").write_text(secrets["learner-0"])
        tables["syncer"]["principals_file"] = private / "principals.toml"
        told = ["--auth-token-file", str(private / "one")]
    keys: dict[str, list[bytes]] = {}
    if kind == "certificates":
        encrypted.made(private / "tls", "learner-0", "learner-1")
        tables["tls"] = encrypted.tables(private / "tls")
        keys = {path.name: key_of(path) for path in (private / "tls").glob("*.key")}
        pem = private / "tls" / "learner-0.pem"
        told = ["--ca-cert", str(private / "tls" / "authority.pem")]
        told += ["--cert", str(pem), "--key", str(pem.with_suffix(".key"))]
    run.parent.mkdir()
    file = config_file(run, **tables)
    watch = Watch({**needles_of(secrets), **keys}, secrets.get("token", ""))

    lived(file, run, watch, told)
    watch.look("what report says", asked("report", str(run)))
    if kind == "own":
        there = f"tensorboard:{run.parent / 'logged'}"
        watch.look(
            "what track says", asked("track", str(run), "--to", there, "--interval-seconds", "0.2")
        )

    for where, data in everywhere(tmp_path / "runs"):
        if where == str(run / "token"):
            assert stat.S_IMODE(Path(where).stat().st_mode) == 0o600
            continue
        watch.look(where, data)
    assert not watch.found, "\n".join(dict.fromkeys(watch.found))


def wrong(private: Path) -> list[str]:
    (private / "wrong").write_text(STRANGE)
    return ["--auth-token-file", str(private / "wrong")]


def test_a_launch_folder_keeps_its_secret_in_one_file(tmp_path: Path) -> None:
    for engine in ("slurm", "kubernetes"):
        folder = tmp_path / engine / "run"
        folder.parent.mkdir()
        file = config_file(folder, run={"max_steps": 10})
        said = asked("launch", str(file), "--dry-run", "--set", f'launch.backend="{engine}"')
        launch = folder.with_name("run.launch")
        assert (launch / "token").exists(), said.decode()
        secret = (launch / "token").read_text().strip()
        assert stat.S_IMODE((launch / "token").stat().st_mode) == 0o600
        watch = Watch(needles_of({"token": secret}))
        watch.look("what launch says", said)
        for where, data in everywhere(tmp_path / engine):
            if where != str(launch / "token"):
                watch.look(where, data)
        assert not watch.found, watch.found


@pytest.mark.smoke
def test_the_search_finds_secrets(tmp_path: Path) -> None:
    """Each encoding, in a file, in a compressed one, and in a process list."""
    secret = "Vb3/+&=%a-token-to-be-found"
    watch = Watch(needles_of({"token": secret}))
    raw = secret.encode()
    (tmp_path / "a").write_bytes(b"x" + raw)
    (tmp_path / "b").write_text(f"/?token={quote(secret, safe='')}")
    (tmp_path / "c").write_bytes(base64.b64encode(b"u:" + raw))
    (tmp_path / "d.xz").write_bytes(
        lzma.compress(b"..." + raw)
    )  # a text this short is stored uncompressed
    (tmp_path / "e").write_text(json.dumps({"token": secret}))
    (tmp_path / "f").write_text("nothing")
    for where, data in everywhere(tmp_path):
        watch.look(where, data)
    found = [each.rpartition("/")[2] for each in watch.found]
    assert found == ["a", "b", "c", "d.xz", "d.xz, unpacked", "e"]
    watch.found.clear()
    shown = subprocess.Popen(
        [sys.executable, "-c", "print(flush=True); input()", secret],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "SECRET": secret},
    )
    assert shown.stdout
    shown.stdout.readline()  # before that, it may still look like its parent
    try:
        watch.look_at_processes()
    finally:
        shown.communicate(b"\n")
    assert sum(f"/{shown.pid}/" in each for each in watch.found) == 2
