"""Records the six runs of `tests/golden` again: real processes, two minutes, as root.

    python tests/golden/record.py            # all six
    python tests/golden/record.py faults     # one of them

Each run becomes one archive, ``recorded/NAME.tar.xz``: its settings, its tapes as plain text, and
the small files that commands read. Paths, process ids and the processor's name are replaced, so
that an archive says nothing of the machine. Afterwards write the outputs again:
``pytest tests/golden --rewrite``. Another recording has other times, so all outputs change; do this
only if the old tapes do not show what they are there for.

The disk-full fault needs root, to mount a small file system; without it that fault is left out.
"""

from __future__ import annotations

import io
import lzma
import os
import re
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from decoupled_diloco.tape.segments import lines_of, tapes_in

HERE = Path(__file__).parent
STORIES, RECORDED = HERE / "stories", HERE / "recorded"

KEPT = (
    "*.toml",
    "addresses",
    "chaos.json",
    "coordinator/*.json",
    "data.ledger",
    "decisions/*",
    "checkpoints/*/manifest.json",
)
"""What an archive has besides the tapes; never the secret."""


def main(names: list[str]) -> None:
    for name in names or list(RUNS):
        with tempfile.TemporaryDirectory(prefix="ddiloco-golden-") as text:
            place = Path(text)
            RUNS[name](place, name)
            archive = pack(place, name)
            print(f"{archive}: {archive.stat().st_size:,} bytes", flush=True)


def train(place: Path, name: str) -> None:
    """A run of `ddiloco train`."""
    ddiloco(place, "train", f"{STORIES}/{name}.toml", "--set", f"run.folder={name}")


def chaos(place: Path, name: str) -> None:
    """A run under faults; the verdict may be that a promise was broken, for such runs are short."""
    story = (STORIES / f"{name}.toml").read_text()
    if os.geteuid() != 0:
        head, *events = story.split("[[events]]")
        story = "[[events]]".join([head, *(e for e in events if "disk-full" not in e)])
    (place / "story.toml").write_text(story)
    limits = ("--accepted-min", "0.1", "--participation-min", "0.1")
    ddiloco(place, "chaos", "story.toml", *limits, "--set", f"run.folder={name}", codes=(0, 1))


def simulate(place: Path, name: str) -> None:
    ddiloco(place, "simulate", f"{STORIES}/{name}.toml", "--set", f"run.folder={name}")


def resume(place: Path, name: str) -> None:
    """A checkpoint of the whole run, then everything is killed, and the run goes back to it."""
    run = place / name
    arguments = ("train", f"{STORIES}/{name}.toml", "--set", f"run.folder={name}")
    process = subprocess.Popen([*COMMAND, *arguments], cwd=place, start_new_session=True)
    try:
        until(lambda: clock_of(run) >= 12)
        ddiloco(place, "checkpoint", name)
        step = clock_of(run)
        until(lambda: clock_of(run) >= step + 6)
    finally:
        process.send_signal(signal.SIGSTOP)  # it must not notice that its children die
        for child in children_of(run):
            if child != process.pid:
                os.kill(child, signal.SIGKILL)
        process.kill()
        process.wait()
    ddiloco(place, "train", "--resume", name, "--checkpoint", "last")


COMMAND = (sys.executable, "-m", "decoupled_diloco")

RUNS: dict[str, Callable[[Path, str], None]] = {
    "faults": chaos,
    "ranks": train,
    "program": train,
    "resume": resume,
    "standby": chaos,
    "virtual": simulate,
}


def ddiloco(place: Path, *arguments: str, codes: tuple[int, ...] = (0,)) -> None:
    surroundings = {**os.environ, "OMP_NUM_THREADS": "1", "GOLDEN": str(STORIES)}
    done = subprocess.run([*COMMAND, *arguments], cwd=place, env=surroundings, check=False)
    assert done.returncode in codes, f"{' '.join(arguments)}: exit code {done.returncode}"


def until(condition: Callable[[], bool], seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def clock_of(run: Path) -> int:
    """The newest step that shard 0 has written to its tape."""
    tape = run / "tape" / "shard-0.jsonl"
    if not tape.exists():
        return 0
    return max(map(int, re.findall(r'"clock":(\d+)', tape.read_text(errors="replace"))), default=0)


def children_of(run: Path) -> list[int]:
    """The processes that were started for a run."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            line = (entry / "cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue
        if f"{run.name}/run.toml" in line and "decoupled_diloco" in line:
            found.append(int(entry.name))
    return found


def pack(place: Path, name: str) -> Path:
    """Writes the archive of a run: files in order, without owners and times."""
    archive = RECORDED / f"{name}.tar.xz"
    archive.parent.mkdir(exist_ok=True)
    with lzma.open(archive, "wb", preset=9) as file, tarfile.open(fileobj=file, mode="w") as tar:
        for path, content in files_of(place / name):
            text = scrubbed(content, place)
            entry = tarfile.TarInfo(f"{name}/{path}")
            entry.size = len(text)
            tar.addfile(entry, io.BytesIO(text))
    return archive


def files_of(run: Path) -> Iterator[tuple[str, bytes]]:
    """The files that are kept, by their paths in the run folder."""
    for tape in tapes_in(run / "tape"):
        yield f"tape/{tape.name}", b"".join(line.text for line in lines_of(tape, []))
    found = {path for pattern in KEPT for path in run.glob(pattern) if path.is_file()}
    for path in sorted(found):
        yield str(path.relative_to(run)), path.read_bytes()


def scrubbed(content: bytes, place: Path) -> bytes:
    """The same without what only this machine has."""
    for path, instead in (
        (place.resolve(), "/work"),
        (place, "/work"),
        (HERE, "/golden"),
        (Path(sys.prefix), "/python"),
        (Path.home(), "/home"),
    ):
        content = content.replace(str(path).encode(), instead.encode())
    content = re.sub(rb'"pid":\d+', b'"pid":1', content)
    return re.sub(rb'"device":"cpu, [^"]*"', b'"device":"cpu"', content)


if __name__ == "__main__":
    main(sys.argv[1:])
