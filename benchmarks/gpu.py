"""Check and measure every CUDA path of a learner on the available GPUs, in ten minutes.

    make gpu

The parts run in separate processes, in this order:

- *tests*: the unit tests with a case for CUDA.
- *paths*, *product*: the tests in ``tests/on_gpu``. They check that codecs and parameter writes
  give the same bits as on the host, and that neither waits for the device. They also check that
  commands select and report the GPU, and cover bf16 autocast, process groups, virtual training,
  studies with merged moments, and other default devices and dtypes.
- *learners* with 0.1, 0.5 and 1.5 B parameters in bf16 and fp32, and one with FSDP2 over NCCL on
  all GPUs. A GPT trains against a shard in another process, in turns with and without
  ``learner.step()``. PyTorch's sync debug mode turns device waits inside ``step()`` into errors. A
  sleeping kernel finds waits that this mode does not detect: ``step()`` must return before the
  kernel ends. A trace shows the streams and memory of the copies, and how much of them overlaps
  with kernels.
- *comparison*: the loss of eight learners in virtual time, with an 11 M parameter GPT. It is
  compared with data-parallel training on as many tokens, and with one learner alone on an eighth of
  them.

Exit code 0: every claim holds, or there is no GPU. 1: a claim does not hold, or a part was not
measured in time; the last lines name each. The measurements are in ``results/gpu``. Models that do
not fit into this machine's memory are skipped.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from bench_runs import a_syncer, end_with_its_children, free_port
from evidence import RESULTS, keep, parser, spread
from gpu_parts import COMPARISON, FRAGMENTS, SIZES, run_part

TESTS = {
    "tests": ("tests/unit/learner/test_parameter_store.py", "tests/unit/ranks/test_tensors.py"),
    "paths": ("tests/on_gpu/test_paths.py",),
    "product": ("tests/on_gpu/test_product.py",),
}
"""Tests with a case for CUDA, by the part that runs them."""

TOTAL_SECONDS = 560.0
"""Time limit for all parts, so that start and end fit into ten minutes."""

MEMORY_GB = {"0.1B": (10, 8), "0.5B": (20, 20), "1.5B": (34, 52)}
"""GB that a learner in bf16 needs on the device, and on the host including its shard. With less
memory the part is skipped and reported, which is not a failure."""

THROUGHPUT_PERCENT_MIN = 95.0
OVERLAP_PERCENT_MIN = 50.0
ASIDE_PERCENT_MIN = 99.0
FRAGMENTS_OF_DEVICE_MEMORY_MAX = 4
SPARE_BYTES = 64 << 20
"""Limits of the claims. The memory limit is a number of fp32 fragments plus SPARE_BYTES."""


@dataclass(frozen=True)
class Part:
    """A part: it plans for ``seconds``, and is killed after ``limit``."""

    name: str
    kind: str
    seconds: float
    limit: float
    size: str = ""
    dtype: str = ""
    ranks: int = 0  # 0: one process without a process group
    device_gb: float = 0.0  # its approximate memory needs
    host_gb: float = 0.0

    @property
    def is_learner(self) -> bool:
        return self.kind == "learner"


def parts_for(devices: int) -> list[Part]:
    """Return all parts, the most important first."""

    def learner(size: str, dtype: str, seconds: float, ranks: int = 0) -> Part:
        name = f"{size}, {dtype}" + (f", FSDP2 over {ranks}" if ranks else "")
        device_gb, host_gb = MEMORY_GB[size]
        device_gb *= 2 if dtype == "fp32" else 1
        limit = seconds + (60 if size == "1.5B" else 35)
        return Part(name, "learner", seconds, limit, size, dtype, ranks, device_gb, host_gb)

    return [
        Part("tests", "tests", 30, 60),
        Part("paths", "tests", 20, 60),
        Part("product", "tests", 50, 150),
        learner("0.1B", "bf16", 25),
        learner("0.1B", "fp32", 25),
        learner("0.1B", "bf16", 30, devices),
        Part("comparison", "comparison", 80, 120),
        learner("0.5B", "bf16", 30),
        learner("0.5B", "fp32", 30),
        learner("1.5B", "bf16", 45),
        learner("1.5B", "fp32", 45),
    ]


def rehearsal() -> list[Part]:
    """Return parts with tiny models, also for a CPU; they only show that the script works."""
    return [
        Part("tests", "tests", 30, 120),
        Part("paths", "tests", 20, 60),
        Part("product", "tests", 50, 150),
        Part("tiny, fp32", "learner", 12, 90, "tiny", "fp32"),
        Part("tiny, bf16, FSDP2 over 1", "learner", 12, 90, "tiny", "bf16", 1),
        Part("tiny, fp32, FSDP2 over 2", "learner", 12, 120, "tiny", "fp32", 2),
        Part("comparison", "comparison", 20, 120, "tiny"),
    ]


class Failed(Exception):
    """A part failed; the message has the reason."""


def run(part: Part, limit: float, folder: Path, device: str) -> Any:
    """Run a part in separate processes, and return its results.

    Raises:
        Failed: A process failed, or did not end within ``limit`` seconds.
    """
    if part.kind == "tests":
        root = Path(__file__).parents[1]
        tests = [str(root / each) for each in TESTS[part.name]]
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
        command += ["-W", "default"]  # a driver's warning is not a failure here
        finished([command], limit, folder)
        return {}
    me = [__file__, "--part", json.dumps(vars(part)), "--into", str(folder), "--device", device]
    if not part.is_learner:
        finished([[sys.executable, *me]], limit, folder)
        return result_of(folder, 0)
    tables = {
        "run": {"learners": 1},
        "sync": {"fragments": FRAGMENTS, "sync_every": FRAGMENTS},
        "syncer": {"persist": False},
        "workload": {"options": {**SIZES[part.size], "total_steps": 10**6}},
    }
    with a_syncer(tables) as syncer:
        try:
            command = [sys.executable, *me, "--syncer", syncer.address]
            finished([command] * max(1, part.ranks), limit, folder, as_ranks=part.ranks > 0)
        except Failed as error:
            log = (syncer.folder / "shard.log").read_text()[-500:]
            raise Failed(f"{error}; end of the shard's log: {log!r}") from None
    others = [result_of(folder, rank) for rank in range(1, part.ranks)]
    return result_of(folder, 0) | {"other ranks": others}


def result_of(folder: Path, rank: int) -> Any:
    return json.loads((folder / f"{rank}.json").read_text())


def finished(
    commands: list[list[str]], limit: float, folder: Path, *, as_ranks: bool = False
) -> None:
    """Run processes side by side, and wait until all succeed.

    torchrun is not used, because its children survive if it is killed.
    """
    port, deadline = str(free_port()), time.monotonic() + limit
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank, command in enumerate(commands):
            job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": len(commands)}
            job |= {"RANK": rank, "LOCAL_RANK": rank}
            own = {name: str(value) for name, value in job.items()} if as_ranks else {}
            processes.append(
                subprocess.Popen(command, env=os.environ | own, start_new_session=True)
            )
        codes: list[int | None] = [None]
        while None in codes and not any(codes):
            if time.monotonic() > deadline:
                raise Failed(f"it did not end within {limit:.0f} s")
            time.sleep(0.1)
            codes = [process.poll() for process in processes]
    finally:
        for process in processes:
            end_with_its_children(process)
    if any(codes):
        reasons = [json.loads(path.read_text()) for path in sorted(folder.glob("failed-*.json"))]
        raise Failed(f"exit codes {codes}" + (f": {reasons[0]}" if reasons else ""))


def claims_of_learner(raw: dict[str, Any], on_cuda: bool) -> list[str]:
    """Return the claims for a learner's part that do not hold."""
    found = []
    pairs = zip(raw["attached"], raw["detached"], strict=True)
    throughput = statistics.median(100 * d / a for a, d in pairs)
    if not raw["applied while measured"]:
        found.append("no fragment was applied during the measurement, so it shows nothing")
    if not on_cuda:
        return found
    if throughput < THROUGHPUT_PERCENT_MIN:
        found.append(
            f"{throughput:.1f} % of the tokens per second of the same loop without it, "
            f"but at least {THROUGHPUT_PERCENT_MIN:g} % are claimed"
        )
    asleep = raw["during a sleeping kernel"]
    waited = [each for each in asleep["steps"] if not each["returned before its end"]]
    if waited:
        found.append(
            f"{len(waited)} of {len(asleep['steps'])} calls of step() waited for earlier work of "
            f"the device, the longest for "
            f"{1e3 * max(each['seconds'] for each in waited):.0f} ms; {raw['fragments before']} of "
            f"{FRAGMENTS} fragments had been applied before"
        )
    if not asleep["applied"]:
        found.append("no fragment was applied during a sleeping kernel, so it shows nothing")
    limit = FRAGMENTS_OF_DEVICE_MEMORY_MAX * raw["fragment bytes"] + SPARE_BYTES
    more = raw["device bytes"][1] - raw["device bytes"][0]
    if more > limit:
        found.append(
            f"{more / 1e6:.0f} MB more device memory, at most {limit / 1e6:.0f} MB are claimed"
        )
    return found + claims_of_trace(raw["trace"])


def claims_of_trace(trace: dict[str, float]) -> list[str]:
    """Return the claims for the trace that do not hold."""
    copies = trace.get("copies", 0.0)
    if not copies or not trace["kernels"]:
        return [
            "the profiler recorded no copies or no kernels: it may need permission "
            "(NVreg_RestrictProfilingToAdminUsers=0, or root)"
        ]
    shares = {
        "during kernels": OVERLAP_PERCENT_MIN,
        "from or to pinned memory": ASIDE_PERCENT_MIN,
        "on a separate stream": ASIDE_PERCENT_MIN,
    }
    return [
        f"{100 * trace[what] / copies:.0f} % of the copies' time is {what}, "
        f"but at least {least:g} % are claimed"
        for what, least in shares.items()
        if 100 * trace[what] / copies < least
    ]


def claims_of_comparison(raw: dict[str, Any], whole: bool) -> list[str]:
    losses = {name: row["loss"] for name, row in raw.items()}
    bad = [name for name, loss in losses.items() if not math.isfinite(loss)]
    if bad:
        return [f"the loss of {name} is not finite" for name in bad]
    if whole and losses["decoupled"] >= losses["alone"]:
        return [f"loss={losses['decoupled']:.4f} is not below one learner's {losses['alone']:.4f}"]
    return []


def claims_of(part: Part, raw: Any, device: str) -> list[str]:
    """Return the claims for a part that do not hold."""
    if part.is_learner:
        found = claims_of_learner(raw, device == "cuda")
        for rank, other in enumerate(raw.get("other ranks", ()), start=1):
            own = claims_of_learner(other, device == "cuda")
            found += [f"rank {rank}: {each}" for each in own]
        return found
    if part.kind == "comparison":
        return claims_of_comparison(raw, not part.size)
    return []


def summarise(part: Part, raw: Any) -> Any:
    """Return the table's values for a part."""
    if part.kind == "tests":
        return "passed"
    if part.kind == "comparison":
        return raw
    step = statistics.median(raw["detached"])
    asleep = [each["seconds"] for each in raw["during a sleeping kernel"]["steps"]]
    trace = raw["trace"]
    return {
        "parameters": raw["parameters"],
        "step, ms": 1e3 * step,
        "inside step(), ms": spread([1e3 * each for each in raw["inside"]]),
        "inside step(), % of a step": 100 * statistics.median(raw["inside"]) / step,
        "inside step() during a sleeping kernel, ms": spread([1e3 * each for each in asleep]),
        "tokens/s, % of the same loop without it": spread(
            [100 * d / a for a, d in zip(raw["attached"], raw["detached"], strict=True)]
        ),
        "fragments applied while measured": raw["applied while measured"],
        "device memory, GB": [each / 1e9 for each in raw["device bytes"]],
        "host memory, GB": {
            name: [each / 1e9 for each in pair] for name, pair in raw["host bytes"].items()
        },
        "copies that overlap kernels, %": 100 * trace["during kernels"] / trace["copies"]
        if trace.get("copies")
        else "not measured",
    }


def lacking(part: Part, device_bytes: float, host_bytes: float) -> str:
    """Return which memory this machine lacks for a part; empty if it has enough."""
    for what, needed, found in (
        ("device", part.device_gb, device_bytes / 1e9),
        ("host", part.host_gb, host_bytes / 1e9),
    ):
        if needed > found:
            return (
                f"it needs about {needed:.0f} GB of {what} memory, this machine has {found:.0f} GB"
            )
    return ""


def memory_here() -> tuple[float, float]:
    """Return the bytes of the smallest device and of the host."""
    devices = [
        torch.cuda.get_device_properties(number).total_memory
        for number in range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    ]
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return float(min(devices, default=0)), float(host)


def run_all(parts: list[Part], device: str, seconds: float) -> tuple[Any, Any, list[str]]:
    """Return raw output and results by part, and all claims that do not hold."""
    begun = time.monotonic()
    raw: dict[str, Any] = {}
    result: dict[str, Any] = {}
    problems: list[str] = []
    traced = next((each for each in parts if each.is_learner and each.size != "tiny"), None)
    memory = memory_here()
    for part in parts:
        lacks = lacking(part, *memory)
        if lacks:
            result[part.name] = f"not measured: {lacks}"
            print(part.name, result[part.name], flush=True)
            continue
        left = seconds - (time.monotonic() - begun)
        if left < min(part.limit, part.seconds + 10):
            result[part.name] = "not measured: out of time"
            problems.append(f"{part.name}: not measured, {left:.0f} s were left")
            continue
        with tempfile.TemporaryDirectory() as name:
            try:
                raw[part.name] = run(part, min(part.limit, left), Path(name), device)
                result[part.name] = summarise(part, raw[part.name])
                found = claims_of(part, raw[part.name], device)
                if part is traced:
                    keep_trace(Path(name))
            except Failed as error:
                found, result[part.name] = [str(error)], f"failed: {error}"
        problems += [f"{part.name}: {each}" for each in found]
        raw.setdefault("seconds", {})[part.name] = round(time.monotonic() - begun, 1)
        print(part.name, json.dumps(result[part.name], indent=1), *found, sep="\n", flush=True)
    return raw, result, problems


def keep_trace(folder: Path) -> None:
    """Keep the first learner's trace for chrome://tracing or Perfetto, if it is small."""
    found, kept = folder / "trace.json.gz", RESULTS / "gpu" / "trace.json.gz"
    if found.exists() and found.stat().st_size < 4 << 20:
        kept.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(found, kept)


def main() -> None:
    options = parser(
        seconds=TOTAL_SECONDS, rehearse=False, part=str, into=Path, device="", syncer=""
    )
    options.add_argument("--only", nargs="+", metavar="NAME", default=(), help="run only these")
    arguments = options.parse_args()
    if arguments.part:
        part = Part(**json.loads(arguments.part))
        run_part(part, arguments.into, arguments.device, arguments.syncer)
        return
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not (devices or arguments.rehearse):
        print("no CUDA device: nothing to check or to measure")
        return
    parts = rehearsal() if arguments.rehearse else parts_for(devices)
    names = [part.name for part in parts]
    if unknown := sorted(set(arguments.only) - set(names)):
        options.error(f"--only {unknown[0]}: choose from {', '.join(map(repr, names))}")
    parts = [part for part in parts if not arguments.only or part.name in arguments.only]
    raw, result, problems = run_all(parts, "cuda" if devices else "cpu", arguments.seconds)
    if not (arguments.rehearse or arguments.only):
        names = [torch.cuda.get_device_name(number) for number in range(devices)]
        keep(
            "gpu",
            config={
                "sizes": SIZES,
                "fragments": FRAGMENTS,
                "comparison": COMPARISON,
                "devices": names,
                "cuda": torch.version.cuda,
            },
            raw=raw,
            result={**result, "claims that do not hold": problems},
        )
    print(*(problems or ["every claim holds"]), sep="\n")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
