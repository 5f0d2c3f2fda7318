"""Evidence of each number: a folder with command, configuration, hardware, raw output and result.

Every benchmark writes through `keep`, so that each number in the docs has its folder, and tables
can be generated from the folders. `benchmarks.toml` has the texts of each folder: the estimate
before the measurement, what was not measured, and the conclusion.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import time
import tomllib
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
RESULTS = HERE / "results"
sys.path.insert(0, str(HERE.parent / "tests"))  # for `worlds`, before benchmarks/random_worlds.py
ABOUT: dict[str, dict[str, Any]] = tomllib.loads((HERE / "benchmarks.toml").read_text())


def options(**defaults: Any) -> Namespace:
    """Parse the command line. Each keyword is an option, and its default determines the type.

    ``False`` makes a switch, a list takes several values, and a type has no default. The help is
    the docstring of the program.
    """
    return parser(**defaults).parse_args()


def parser(**defaults: Any) -> ArgumentParser:
    """Return the parser of `options`, for a program that adds options."""
    text = sys.modules["__main__"].__doc__
    found = ArgumentParser(description=text, formatter_class=RawDescriptionHelpFormatter)
    for name, default in defaults.items():
        flag = "--" + name.replace("_", "-")
        if default is False:
            found.add_argument(flag, action="store_true")
        elif isinstance(default, type):
            found.add_argument(flag, type=default)
        else:
            many = {"nargs": "+"} if isinstance(default, list) else {}
            kind = type(default[0] if many else default)
            found.add_argument(flag, type=kind, default=default, **many)
    return found


def keep(name: str, *, config: Any, raw: Any, result: Any, of: str = "", besides: str = "") -> Path:
    """Write ``benchmarks/results/<name>/`` and print the result; return the folder.

    Args:
        name: Name of the folder.
        config: Settings of the measurement.
        raw: Raw measurements.
        result: Summary of the measurements.
        of: Section of `benchmarks.toml`, if it differs from the folder's name.
        besides: Additional limitations that only the run knows.
    """
    about, folder = ABOUT[of or name], RESULTS / name
    folder.mkdir(parents=True, exist_ok=True)
    shown = Path(sys.argv[0]).resolve().relative_to(RESULTS.parents[1])
    (folder / "command").write_text(f"python {shown} {' '.join(sys.argv[1:])}".strip() + "\n")
    write_json(folder / "config.json", config)
    write_json(folder / "hardware.json", hardware())
    write_json(folder / "raw.json", raw)
    document = {
        "estimate": about["estimate"],
        "result": result,
        "not_measured": about["not_measured"] + besides,
    }
    write_json(folder / "result.json", document)
    for what, value in result.items():
        print(f"{what}: {value}")
    return folder


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1, default=str) + "\n")


def hardware() -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if sys.platform == "linux" else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "processor": names[0] if names else "unknown",
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "shared": "other work ran on the same machine; ratios are taken within one run",
    }


def timed(work: Callable[[], object]) -> float:
    """Return the seconds that a function takes."""
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def spread(values: Iterable[float]) -> dict[str, float]:
    """Return median, minimum and maximum of repeated measurements."""
    found = list(values)
    return {"median": statistics.median(found), "min": min(found), "max": max(found)}


def spreads(rows: list[dict[str, Any]], names: Iterable[str]) -> dict[str, dict[str, float]]:
    """Return the spread of each of these columns."""
    return {name: spread(row[name] for row in rows) for name in names}
