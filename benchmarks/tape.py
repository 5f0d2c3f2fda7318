"""How large the tapes of a long run are, and what it costs to compress them.

Real processes train a small model; what the protocol says does not depend on the model's size. The
bytes for each step of a learner are then those of any long run with as many fragments and learners.

    python benchmarks/tape.py
"""

from __future__ import annotations

import argparse
import asyncio
import bz2
import lzma
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from evidence import keep, run_to_its_end, spread

from decoupled_diloco.config import RunConfig
from decoupled_diloco.observe.segments import FILTERS, compress_later, segments_of, tapes_in
from decoupled_diloco.observe.tape import TapeReader

ESTIMATE = (
    "text: 9 kB for each step of a learner, half of it on the learner's tape, half on the shards'; "
    "of it remain digests (16 bytes each that do not repeat), instants and other floats (6 bytes): "
    "550 to 600 bytes, so 440 to 480 MB for 100,000 steps of 8 learners. Compressing 4 MiB takes "
    "0.7 s of a core, and an event loop beside it waits no longer than without"
)
LONG_STEPS, LONG_LEARNERS = 100_000, 8

Compress = Callable[[bytes], bytes]
CODECS: dict[str, Compress] = {
    "gzip -6": lambda text: zlib.compress(text, 6),
    "gzip -9": lambda text: zlib.compress(text, 9),
    "bzip2": bz2.compress,
    "xz -1": lambda text: lzma.compress(text, preset=1),
    "xz -6": lambda text: lzma.compress(text, preset=6),
    "as written": lambda text: lzma.compress(text, filters=FILTERS),
}


def train(folder: Path, learners: int, steps: int, step_seconds: float) -> None:
    """A whole run on this machine."""
    config = RunConfig(
        run={"name": "tape", "folder": folder, "learners": learners, "budget_steps": steps},
        sync={"fragments": 24, "period": 24, "overlap": 2, "quorum": 1},
        syncer={"shards": 2, "port": 0},
        workload={
            "name": "paced",
            "options": {
                "step_seconds": step_seconds,
                "layers": 2,
                "width": 32,
                "heads": 2,
                "context": 16,
                "batch_size": 2,
                "corpus_bytes_max": 200_000,
            },
        },
    )
    run_to_its_end(config)


def text_of(tape: Path) -> bytes:
    parts = [segment.open().read() for segment in segments_of(tape)]
    return b"".join(parts) + tape.read_bytes()


def sizes(folder: Path) -> list[dict[str, Any]]:
    """Of each tape: its text, and what its segments and its newest text take on the disk."""
    return [
        {
            "tape": tape.stem,
            "text": len(text_of(tape)),
            "segments": [each.path.stat().st_size for each in segments_of(tape)],
            "newest": tape.stat().st_size,
            "steps": sum(r.type == "StepFinished" for r in TapeReader(tape)),
        }
        for tape in tapes_in(folder / "tape")
    ]


def codecs(folder: Path) -> dict[str, dict[str, float]]:
    """Ratio and speed of one thread, over all that a segment would be made of."""
    texts = [text for tape in tapes_in(folder / "tape") if len(text := text_of(tape)) > 1 << 20]
    found = {}
    for name, compress in CODECS.items():
        begun = time.thread_time()
        nbytes = sum(len(compress(text)) for text in texts)
        seconds = time.thread_time() - begun
        whole = sum(map(len, texts))
        found[name] = {"ratio": whole / nbytes, "megabytes_a_second": whole / seconds / 1e6}
    return found


async def lateness(over: Callable[[], bool]) -> dict[str, float]:
    """By how many milliseconds the turns of this loop are late."""
    late = []
    while not over():
        due = time.perf_counter() + 1e-3
        await asyncio.sleep(1e-3)
        late.append(1e3 * (time.perf_counter() - due))
    late.sort()
    return {"median": late[len(late) // 2], "p99": late[99 * len(late) // 100], "worst": late[-1]}


def beside_compression(folder: Path, text: bytes) -> dict[str, Any]:
    """The lateness of a loop beside the compression of a segment, and for as long without."""
    tape = folder / "beside.jsonl"
    segments = tape.with_suffix(".segments")
    segments.mkdir()
    (segments / f"{len(text):012d}.jsonl").write_bytes(text)
    begun = time.perf_counter()
    compressing = compress_later(tape)
    assert compressing is not None
    beside = asyncio.run(lateness(compressing.done))
    seconds = time.perf_counter() - begun
    until = time.perf_counter() + seconds
    alone = asyncio.run(lateness(lambda: time.perf_counter() > until))
    for path in segments.iterdir():
        path.unlink()
    segments.rmdir()
    return {"beside": beside, "alone": alone, "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--learners", type=int, default=LONG_LEARNERS)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--step-seconds", type=float, default=0.3)
    parser.add_argument("--repetitions", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "run"
        train(folder, arguments.learners, arguments.steps, arguments.step_seconds)
        tapes = sizes(folder)
        compared = codecs(folder)
        text = text_of(folder / "tape" / "shard-0.jsonl")[: 4 << 20]
        late = [beside_compression(Path(name), text) for _ in range(arguments.repetitions)]
    steps = sum(tape["steps"] for tape in tapes if tape["tape"].startswith("learner-"))
    bytes_of_text = sum(tape["text"] for tape in tapes) / steps
    on_disk = sum(sum(tape["segments"]) + tape["newest"] for tape in tapes) / steps
    long_steps = LONG_STEPS * LONG_LEARNERS
    result: dict[str, Any] = {
        "bytes of text for a step of a learner": bytes_of_text,
        "bytes on the disk for a step of a learner": on_disk,
        "MB of 100,000 steps of 8 learners as text, once": bytes_of_text * long_steps / 1e6,
        "MB of 100,000 steps of 8 learners": on_disk * long_steps / 1e6,
        "codecs": compared,
        "seconds for 4 MiB, on this shared machine": spread([each["seconds"] for each in late]),
        **{
            f"milliseconds that a loop is late {when}, {which}": spread(
                [each[when][which] for each in late]
            )
            for which in ("median", "p99", "worst")
            for when in ("beside", "alone")
        },
    }
    keep(
        "tape",
        estimate=ESTIMATE,
        config=vars(arguments) | {"fragments": 24, "period": 24, "overlap": 2, "shards": 2},
        raw={"tapes": tapes, "late": late},
        result=result,
        not_measured="100,000 steps themselves: the bytes for each step are those of a shorter "
        "run, whose first seconds, when models and layouts are told, are in them; other periods: "
        "the text falls with the number of fragments that are merged in a step",
    )


if __name__ == "__main__":
    main()
