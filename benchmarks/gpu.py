"""Every CUDA path of a learner, checked and measured on the GPUs there are, in ten minutes.

    make gpu

Parts, each in processes of its own, in this order:

- *tests*: the unit tests that have a case for CUDA.
- *paths*: codecs give the same bits on the device as on the host; parameters are written as on the
  host; none of it waits for the device.
- *train*, *assignment*, *precision*, *ranks*, *simulate*, *defaults*: what a user starts. `ddiloco
  train` takes the GPU by itself and shows it; learners share the GPUs; bf16 autocast; the process
  group of a learner's ranks; virtual training; another default device and dtype.
- *learners* of 0.1, 0.5 and 1.5 B parameters in bf16 and fp32, and one of FSDP2 over NCCL on all
  GPUs: a GPT against a shard in another process, by turns with and without ``learner.step()``.
  PyTorch's sync debug mode makes every wait for the device inside ``step()`` an error. Waits that
  it does not know are found with a kernel that sleeps: ``step()`` has to return before the kernel
  ends. A trace shows on which streams and from which memory the copies go, and how much of them
  passes beside kernels.
- *comparison*: the loss of eight learners in virtual time, a GPT of 11 M parameters, against
  data-parallel with as many tokens and against one learner alone with an eighth of them.

Exit code 0: every claim holds, or there is no GPU. 1: a claim does not hold, or a part has not been
measured in its time; the last lines name each. What was measured is in ``results/gpu``. A model
that this machine has too little memory for is left out.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from evidence import RESULTS, keep, spread
from gpu_parts import COMPARISON, FRAGMENTS, SIZES, run_part
from gpu_product import PARTS as PRODUCT

from decoupled_diloco.config import RunConfig, dump_config

ESTIMATE = (
    "step() issues one copy inside the device and one to pinned memory: 0.3 to 1 ms of host time, "
    "0.2 to 0.5 % of a step of 200 ms, whatever the model's size; no wait for the device. Memory: "
    "a fragment in fp32 twice, 8 N / 24 bytes. 1.5 B parameters in bf16 with AdamW: 12 GB and "
    "activations. The syncer needs 16 bytes a parameter of host memory, the learner 4, rounded up "
    "to a power of two for each fragment, as PyTorch rounds pinned memory. Eight learners: a loss "
    "5 to 12 % above data-parallel, and below that of one learner alone"
)
TESTS = ("tests/unit/learner/test_store.py", "tests/unit/ranks/test_tensors.py")
"""Those that have a case for CUDA."""

TOTAL_SECONDS = 560.0
"""No part lasts longer, so that start and end fit into ten minutes."""

MEMORY_GB = {"0.1B": (10, 8), "0.5B": (20, 20), "1.5B": (34, 52)}
"""What a learner in bf16 needs of the device, and with its shard of the host. Where there is less,
the part is left out and named; that is no failure."""

THROUGHPUT_PERCENT_MIN = 95.0
OVERLAP_PERCENT_MIN = 50.0
ASIDE_PERCENT_MIN = 99.0
FRAGMENTS_OF_DEVICE_MEMORY_MAX = 4
SPARE_BYTES = 64 << 20
"""Limits of the claims; memory is fragments in fp32, and this besides."""


@dataclass(frozen=True)
class Part:
    """What is run, and for how long: it plans for ``seconds``, and is killed after ``limit``."""

    name: str
    kind: str
    seconds: float
    limit: float
    size: str = ""
    dtype: str = ""
    ranks: int = 0  # 0: one process without a process group
    device_gb: float = 0.0  # what it needs of memory, roughly
    host_gb: float = 0.0

    @property
    def is_learner(self) -> bool:
        return self.kind == "learner"


def product_parts() -> list[Part]:
    """What a user starts, each program once."""
    return [Part(name, "product", 8, 90, "tiny") for name in PRODUCT]


def parts_for(devices: int) -> list[Part]:
    """All parts, what matters most first."""

    def learner(size: str, dtype: str, seconds: float, ranks: int = 0) -> Part:
        name = f"{size}, {dtype}" + (f", FSDP2 over {ranks}" if ranks else "")
        device_gb, host_gb = MEMORY_GB[size]
        device_gb *= 2 if dtype == "fp32" else 1
        limit = seconds + (60 if size == "1.5B" else 35)
        return Part(name, "learner", seconds, limit, size, dtype, ranks, device_gb, host_gb)

    return [
        Part("tests", "tests", 30, 60),
        Part("paths", "paths", 20, 60),
        *product_parts(),
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
    """The same with tiny models, on a CPU too; it shows that the script runs, and nothing else."""
    return [
        Part("tests", "tests", 30, 120),
        Part("paths", "paths", 20, 60),
        *product_parts(),
        Part("tiny, fp32", "learner", 12, 90, "tiny", "fp32"),
        Part("tiny, bf16, FSDP2 over 1", "learner", 12, 90, "tiny", "bf16", 1),
        Part("tiny, fp32, FSDP2 over 2", "learner", 12, 120, "tiny", "fp32", 2),
        Part("comparison", "comparison", 20, 120, "tiny"),
    ]


class Failed(Exception):
    """A part has ended badly; says how."""


def run(part: Part, limit: float, folder: Path, device: str) -> Any:
    """Runs a part in processes of its own, and gives what it found.

    Raises:
        Failed: It ended badly, or was not done after ``limit`` seconds.
    """
    if part.kind == "tests":
        root = Path(__file__).parents[1]
        tests = [str(root / each) for each in TESTS]
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
        finished([command], limit, folder)
        return {}
    me = [__file__, "--part", json.dumps(vars(part)), "--into", str(folder), "--device", device]
    if not (part.is_learner or part.name == "defaults"):
        finished([[sys.executable, *me]], limit, folder)
        return told_by(folder, 0)
    with a_shard(part, folder) as address:
        command = [sys.executable, *me, "--syncer", address]
        finished([command] * max(1, part.ranks), limit, folder, as_ranks=part.ranks > 0)
    if not part.is_learner:
        return told_by(folder, 0)
    others = [told_by(folder, rank) for rank in range(1, part.ranks)]
    return told_by(folder, 0) | {"other ranks": others}


def told_by(folder: Path, rank: int) -> Any:
    return json.loads((folder / f"{rank}.json").read_text())


def finished(
    commands: list[list[str]], limit: float, folder: Path, *, as_ranks: bool = False
) -> None:
    """Runs processes beside one another, and waits for the good end of all.

    Not with torchrun: what it has started outlives it if it is killed.
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
                raise Failed(f"it was not done after {limit:.0f} s")
            time.sleep(0.1)
            codes = [process.poll() for process in processes]
    finally:
        for process in processes:
            end_with_its_children(process)
    if any(codes):
        reasons = [json.loads(path.read_text()) for path in sorted(folder.glob("failed-*.json"))]
        raise Failed(f"exit codes {codes}" + (f": {reasons[0]}" if reasons else ""))


def end_with_its_children(process: subprocess.Popen[bytes]) -> None:
    """Ends what is left of its session."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextmanager
def a_shard(part: Part, folder: Path) -> Iterator[str]:
    """A syncer of one shard for a learner's part; gives its address."""
    (folder / "token").write_text("benchmark")
    tables: dict[str, Any] = {
        "run": {
            "learners": 1,
            "budget_steps": 10**7,
            "evaluator": False,
            "folder": str(folder / "run"),
        },
        "sync": {"fragments": FRAGMENTS, "period": FRAGMENTS, "overlap": 2},
        "syncer": {"port": free_port(), "token_file": str(folder / "token"), "durable": False},
        "workload": {"options": {**SIZES[part.size], "total_steps": 10**6}},
    }
    config = RunConfig(**tables)
    (folder / "run.toml").write_text(dump_config(config))
    cli = [sys.executable, "-m", "decoupled_diloco.cli", "syncer", str(folder / "run.toml")]
    log = folder / "shard.log"
    with log.open("wb") as file:
        shard = subprocess.Popen(
            [*cli, "--shard", "0"], stdout=file, stderr=file, start_new_session=True
        )
    try:
        yield f"http://127.0.0.1:{config.syncer.port}"
    except Failed as error:
        raise Failed(f"{error}; the shard's last words: {log.read_text()[-500:]!r}") from None
    finally:
        end_with_its_children(shard)


def claims_of_learner(raw: dict[str, Any], on_cuda: bool) -> list[str]:
    """What a learner's part has to show, and did not; in words."""
    found = []
    pairs = zip(raw["attached"], raw["detached"], strict=True)
    throughput = statistics.median(100 * d / a for a, d in pairs)
    if not raw["applied while measured"]:
        found.append("no fragment was applied while it was measured: the numbers show nothing")
    if not on_cuda:
        return found
    if throughput < THROUGHPUT_PERCENT_MIN:
        found.append(
            f"{throughput:.1f} % of the tokens a second of the same loop without it, "
            f"{THROUGHPUT_PERCENT_MIN:g} % are claimed"
        )
    asleep = raw["beside a sleeping kernel"]
    waited = [each for each in asleep["steps"] if not each["returned before its end"]]
    if waited:
        found.append(
            f"{len(waited)} of {len(asleep['steps'])} calls of step() returned only when the "
            f"device had done what it was given before, the longest after "
            f"{1e3 * max(each['seconds'] for each in waited):.0f} ms; {raw['fragments before']} of "
            f"{FRAGMENTS} fragments had been applied before"
        )
    if not asleep["applied"]:
        found.append("no fragment was applied beside a sleeping kernel: it shows nothing")
    limit = FRAGMENTS_OF_DEVICE_MEMORY_MAX * raw["fragment bytes"] + SPARE_BYTES
    more = raw["device bytes"][1] - raw["device bytes"][0]
    if more > limit:
        found.append(
            f"{more / 1e6:.0f} MB more of the device's memory, {limit / 1e6:.0f} MB are claimed"
        )
    return found + claims_of_trace(raw["trace"])


def claims_of_trace(trace: dict[str, float]) -> list[str]:
    """What the trace has to show, and did not."""
    copies = trace.get("copies", 0.0)
    if not copies or not trace["kernels"]:
        return [
            "the profiler saw no copies or no kernels: it may need permission "
            "(NVreg_RestrictProfilingToAdminUsers=0, or root)"
        ]
    shares = {
        "beside kernels": OVERLAP_PERCENT_MIN,
        "from or to pinned memory": ASIDE_PERCENT_MIN,
        "on a stream beside": ASIDE_PERCENT_MIN,
    }
    return [
        f"{100 * trace[what] / copies:.0f} % of the copies' time is {what}, {least:g} % are claimed"
        for what, least in shares.items()
        if 100 * trace[what] / copies < least
    ]


def claims_of_comparison(raw: dict[str, Any], whole: bool) -> list[str]:
    losses = {name: row["loss"] for name, row in raw.items()}
    bad = [name for name, loss in losses.items() if not math.isfinite(loss)]
    if bad:
        return [f"the loss of {name} is not finite" for name in bad]
    if whole and losses["decoupled"] >= losses["alone"]:
        return [f"a loss of {losses['decoupled']:.4f}, one learner alone has {losses['alone']:.4f}"]
    return []


def claims_of(part: Part, raw: Any, device: str) -> list[str]:
    """What a part has to show, and did not."""
    if part.is_learner:
        found = claims_of_learner(raw, device == "cuda")
        for rank, other in enumerate(raw.get("other ranks", ()), start=1):
            own = claims_of_learner(other, device == "cuda")
            found += [f"rank {rank}: {each}" for each in own]
        return found
    if part.kind == "comparison":
        return claims_of_comparison(raw, not part.size)
    if part.kind in ("paths", "product"):
        return [f"{name}: {problem}" for name, problem in raw.items() if problem]
    return []


def summarise(part: Part, raw: Any) -> Any:
    """What the table shows of a part whose claims hold, or not."""
    if part.kind == "tests":
        return "passed"
    if part.kind == "product":
        return f"{sum(not problem for problem in raw.values())} of {len(raw)} claims hold"
    if part.kind == "paths":
        return f"{sum(not problem for problem in raw.values())} of {len(raw)} as on the host"
    if part.kind == "comparison":
        return raw
    step = statistics.median(raw["detached"])
    asleep = [each["seconds"] for each in raw["beside a sleeping kernel"]["steps"]]
    trace = raw["trace"]
    return {
        "parameters": raw["parameters"],
        "step, ms": 1e3 * step,
        "inside step(), ms": spread([1e3 * each for each in raw["inside"]]),
        "inside step(), % of a step": 100 * statistics.median(raw["inside"]) / step,
        "inside step() beside a sleeping kernel, ms": spread([1e3 * each for each in asleep]),
        "tokens/s, % of the same loop without it": spread(
            [100 * d / a for a, d in zip(raw["attached"], raw["detached"], strict=True)]
        ),
        "fragments applied while measured": raw["applied while measured"],
        "device memory, GB": [each / 1e9 for each in raw["device bytes"]],
        "host memory, GB": {
            name: [each / 1e9 for each in pair] for name, pair in raw["host bytes"].items()
        },
        "copies beside kernels, %": 100 * trace["beside kernels"] / trace["copies"]
        if trace.get("copies")
        else "not measured",
    }


def lacking(part: Part, device_bytes: float, host_bytes: float) -> str:
    """Which memory a part needs and this machine does not have; empty: it has it."""
    for what, needed, found in (
        ("the device", part.device_gb, device_bytes / 1e9),
        ("the host", part.host_gb, host_bytes / 1e9),
    ):
        if needed > found:
            return f"it needs some {needed:.0f} GB of {what}'s memory, there are {found:.0f}"
    return ""


def memory_here() -> tuple[float, float]:
    """Bytes of the smallest device, and of the host."""
    devices = [
        torch.cuda.get_device_properties(number).total_memory
        for number in range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    ]
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return float(min(devices, default=0)), float(host)


def run_all(parts: list[Part], device: str, seconds: float) -> tuple[Any, Any, list[str]]:
    """Raw output and result of each part, and what is not as it is claimed."""
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
    """The first learner's trace, for chrome://tracing or Perfetto."""
    found, kept = folder / "trace.json.gz", RESULTS / "gpu" / "trace.json.gz"
    if found.exists() and found.stat().st_size < 4 << 20:
        kept.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(found, kept)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=TOTAL_SECONDS, help="for all parts")
    parser.add_argument("--rehearse", action="store_true", help="tiny models, on a CPU too")
    parser.add_argument("--device", default="", help=argparse.SUPPRESS)
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--syncer", default="", help=argparse.SUPPRESS)
    parser.add_argument("--only", nargs="+", metavar="NAME", default=(), help="these parts alone")
    told = parser.parse_args()
    if told.part:
        run_part(Part(**json.loads(told.part)), told.into, told.device, told.syncer)
        return
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not (devices or told.rehearse):
        print("no CUDA device here: nothing to check or to measure")
        return
    parts = rehearsal() if told.rehearse else parts_for(devices)
    names = [part.name for part in parts]
    if unknown := sorted(set(told.only) - set(names)):
        parser.error(f"--only {unknown[0]}: the parts are {', '.join(map(repr, names))}")
    parts = [part for part in parts if not told.only or part.name in told.only]
    raw, result, problems = run_all(parts, "cuda" if devices else "cpu", told.seconds)
    if not (told.rehearse or told.only):
        names = [torch.cuda.get_device_name(number) for number in range(devices)]
        keep(
            "gpu",
            estimate=ESTIMATE,
            config={
                "sizes": SIZES,
                "fragments": FRAGMENTS,
                "comparison": COMPARISON,
                "devices": names,
                "cuda": torch.version.cuda,
            },
            raw=raw,
            result={**result, "claims that do not hold": problems},
            not_measured="several machines; learners that differ; checkpoints; float8",
        )
    print(*(problems or ["every claim holds"]), sep="\n")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
