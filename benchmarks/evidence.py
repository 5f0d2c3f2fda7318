"""Where a number lives: a folder with the command, configuration, hardware, raw output and result.

Every benchmark writes through `keep`, so that tables in the docs can be made from the folders, and
a number without its folder does not exist.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from decoupled_diloco.config import RunConfig
from decoupled_diloco.launch.local import LocalRun

RESULTS = Path(__file__).parent / "results"


def keep(
    name: str, *, estimate: str, config: Any, raw: Any, result: Any, not_measured: str
) -> Path:
    """Writes ``benchmarks/results/<name>/`` and prints the result; returns the folder."""
    folder = RESULTS / name
    folder.mkdir(parents=True, exist_ok=True)
    shown = Path(sys.argv[0]).resolve().relative_to(RESULTS.parents[1])
    (folder / "command").write_text(f"python {shown} {' '.join(sys.argv[1:])}".strip() + "\n")
    write_json(folder / "config.json", config)
    write_json(folder / "hardware.json", hardware())
    write_json(folder / "raw.json", raw)
    document = {"estimate": estimate, "result": result, "not_measured": not_measured}
    write_json(folder / "result.json", document)
    for what, value in result.items():
        print(f"{what}: {value}")
    return folder


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1, default=str) + "\n")


def hardware() -> dict[str, Any]:
    model = "unknown"
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [x for x in cpuinfo.read_text().splitlines() if x.startswith("model name")]
        model = names[0].split(":", 1)[1].strip() if names else model
    return {
        "processor": model,
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "shared": "other work ran on the same machine; ratios are taken within one run",
    }


def timed(work: Callable[[], object]) -> float:
    """Seconds that some work takes."""
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def spread(values: list[float]) -> dict[str, float]:
    """Median, smallest and largest of some repetitions."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def run_to_its_end(config: RunConfig) -> None:
    """A whole run with real processes on this machine."""
    run = LocalRun(config)
    try:
        run.start()
        outcome = run.wait(lambda: None)
    finally:
        run.close()
    assert outcome.finished, outcome.reason
