"""How fast codecs encode and decode on one core, and how many bits an element they take.

python benchmarks/codec_speed.py
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import torch
from evidence import keep, spread, timed

from decoupled_diloco.config.sync import bits_of
from decoupled_diloco.merge.codec import codec

ESTIMATE = (
    "bf16 at the speed of the memory, 20 to 40 GB/s of fp32; int8, int4 and int2 encode at 4 to 7 "
    "(five passes over a block in the cache) and decode at 10 to 20; fp4-e3m0 encodes at 4; top-k, "
    "which sorts, at 2"
)
NAMES = ("bf16", "int8", "int4", "fp4-e3m0", "int2", "topk")
GB = 1e9


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--elements", type=int, default=2**22)
    parser.add_argument("--repeats", type=int, default=25)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    values = torch.randn(arguments.elements) * 1e-3
    raw: dict[str, Any] = {name: {"encode": [], "decode": []} for name in NAMES}
    bodies = {name: codec(name).encode(values) for name in NAMES}
    out = torch.empty_like(values)
    for _ in range(arguments.repeats):  # by turns, so that other work meets all alike
        for name in NAMES:
            each, body = codec(name), bodies[name]
            raw[name]["encode"].append(timed(partial(each.encode, values, body)))
            raw[name]["decode"].append(timed(partial(each.decode, body, len(values), out)))
    nbytes = values.nbytes
    result = {
        name: {
            "bits": 8 * bodies[name].numel() / len(values),
            "bits_in_theory": bits_of(name),
            "encode": spread([nbytes / GB / each for each in times["encode"]]),
            "decode": spread([nbytes / GB / each for each in times["decode"]]),
        }
        for name, times in raw.items()
    }
    keep(
        "codec_speed",
        estimate=ESTIMATE,
        config=vars(arguments),
        raw=raw,
        result=result,
        not_measured="GPUs, other processors, error feedback and copies around it",
    )


if __name__ == "__main__":
    main()
