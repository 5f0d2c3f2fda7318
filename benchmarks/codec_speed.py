"""Encoding and decoding speed of codecs on one core, and their bits per element.

python benchmarks/codec_speed.py
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from evidence import keep, options, spread, timed

from decoupled_diloco.config.sync import bits_of
from decoupled_diloco.merge.codec import codec

NAMES = ("bf16", "int8", "int4", "fp4-e3m0", "int2", "topk")
GB = 1e9


def main() -> None:
    arguments = options(elements=2**22, repeats=25)
    torch.set_num_threads(1)
    values = torch.randn(arguments.elements) * 1e-3
    out = torch.empty_like(values)
    raw: dict[str, Any] = {name: {"encode": [], "decode": []} for name in NAMES}
    bodies = {name: codec(name).encode(values) for name in NAMES}
    for _ in range(arguments.repeats):  # in turns, so that other load affects all codecs alike
        for name in NAMES:
            each, body = codec(name), bodies[name]
            raw[name]["encode"].append(timed(partial(each.encode, values, body)))
            raw[name]["decode"].append(timed(partial(each.decode, body, len(values), out)))
    result = {
        name: {
            "bits": 8 * bodies[name].numel() / len(values),
            "bits_in_theory": bits_of(name),
            **{way: spread(values.nbytes / GB / each for each in times[way]) for way in times},
        }
        for name, times in raw.items()
    }
    keep("codec_speed", config=vars(arguments), raw=raw, result=result)


if __name__ == "__main__":
    main()
