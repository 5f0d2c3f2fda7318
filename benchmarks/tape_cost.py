"""Size of the tapes of a long run, and the cost of compressing them.

Real processes train a small model, because the protocol's messages do not depend on the model's
size. The bytes per step of a learner are then those of any long run with as many fragments and
learners.

    python benchmarks/tape_cost.py
"""

from __future__ import annotations

import asyncio
import bz2
import lzma
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench_runs import carry_out, paced
from evidence import keep, options, spread

from decoupled_diloco.tape import TapeReader
from decoupled_diloco.tape.segments import FILTERS, compress_later, segments_of, tapes_in

LONG_STEPS, LONG_LEARNERS = 100_000, 8
SYNC = {"fragments": 24, "sync_every": 24, "overlap_steps": 2}
SMALL = {"layers": 2, "width": 32, "heads": 2, "context": 16, "batch_size": 2}

CODECS: dict[str, Callable[[bytes], bytes]] = {
    "gzip -6": lambda text: zlib.compress(text, 6),
    "gzip -9": lambda text: zlib.compress(text, 9),
    "bzip2": bz2.compress,
    "xz -1": lambda text: lzma.compress(text, preset=1),
    "xz -6": lambda text: lzma.compress(text, preset=6),
    "as written": lambda text: lzma.compress(text, filters=FILTERS),
}


def text_of(tape: Path) -> bytes:
    parts = [segment.open().read() for segment in segments_of(tape)]
    return b"".join(parts) + tape.read_bytes()


def sizes(folder: Path) -> list[dict[str, Any]]:
    """Return for each tape its text size, and the sizes of its segments and newest text on disk."""
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
    """Return ratio and single-thread speed of each codec, over all text for segments."""
    texts = [text for tape in tapes_in(folder / "tape") if len(text := text_of(tape)) > 1 << 20]
    whole, found = sum(map(len, texts)), {}
    for name, compress in CODECS.items():
        begun = time.thread_time()
        nbytes = sum(len(compress(text)) for text in texts)
        seconds = time.thread_time() - begun
        found[name] = {"ratio": whole / nbytes, "megabytes_a_second": whole / seconds / 1e6}
    return found


async def lateness(over: Callable[[], bool]) -> dict[str, float]:
    """Return by how many milliseconds the turns of this loop are late."""
    late = []
    while not over():
        due = time.perf_counter() + 1e-3
        await asyncio.sleep(1e-3)
        late.append(1e3 * (time.perf_counter() - due))
    late.sort()
    return {"median": late[len(late) // 2], "p99": late[99 * len(late) // 100], "worst": late[-1]}


def beside_compression(text: bytes) -> dict[str, Any]:
    """Return the lateness of a loop during the compression of a segment, and without it."""
    with tempfile.TemporaryDirectory() as name:
        tape = Path(name) / "beside.jsonl"
        segment = tape.with_suffix(".segments") / f"{len(text):012d}.jsonl"
        segment.parent.mkdir()
        segment.write_bytes(text)
        begun = time.perf_counter()
        compressing = compress_later(tape)
        assert compressing is not None
        beside = asyncio.run(lateness(compressing.done))
        seconds = time.perf_counter() - begun
    until = time.perf_counter() + seconds
    alone = asyncio.run(lateness(lambda: time.perf_counter() > until))
    return {"beside": beside, "alone": alone, "seconds": seconds}


def main() -> None:
    arguments = options(learners=LONG_LEARNERS, steps=600, step_seconds=0.3, repetitions=5)
    with paced(
        step_seconds=arguments.step_seconds,
        model={**SMALL, "corpus_bytes_max": 200_000},
        run={
            "name": "tape",
            "learners": arguments.learners,
            "max_steps": arguments.steps,
            "evaluator": True,
        },
        sync={**SYNC, "quorum": 1},
        syncer={"shards": 2},
    ) as config:
        carry_out(config)
        folder = Path(config.run.folder)
        tapes, compared = sizes(folder), codecs(folder)
        text = text_of(folder / "tape" / "shard-0.jsonl")[: 4 << 20]
        late = [beside_compression(text) for _ in range(arguments.repetitions)]
    steps = sum(tape["steps"] for tape in tapes if tape["tape"].startswith("learner-"))
    bytes_of_text = sum(tape["text"] for tape in tapes) / steps
    on_disk = sum(sum(tape["segments"]) + tape["newest"] for tape in tapes) / steps
    long_steps = LONG_STEPS * LONG_LEARNERS
    result: dict[str, Any] = {
        "bytes of text per learner step": bytes_of_text,
        "bytes on disk per learner step": on_disk,
        "MB of text for 100,000 steps of 8 learners": bytes_of_text * long_steps / 1e6,
        "MB on disk for 100,000 steps of 8 learners": on_disk * long_steps / 1e6,
        "codecs": compared,
        "seconds for 4 MiB, on this shared machine": spread(each["seconds"] for each in late),
        **{
            f"delay of an event loop {label}, ms, {which}": spread(
                each[when][which] for each in late
            )
            for which in ("median", "p99", "worst")
            for when, label in (("beside", "during compression"), ("alone", "without compression"))
        },
    }
    config = vars(arguments) | {**SYNC, "shards": 2}
    keep("tape", config=config, raw={"tapes": tapes, "late": late}, result=result)


if __name__ == "__main__":
    main()
