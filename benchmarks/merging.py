"""Cost of merging: 8 payloads of 64 MiB, compared with a plain read of the same bytes.

python benchmarks/merging.py
"""

from __future__ import annotations

import resource
from functools import partial

import torch
from evidence import keep, options, spread, spreads, timed

from decoupled_diloco.merge import Contribution, Segment, codec, digest, make_outer, publish
from decoupled_diloco.merge.accumulate import Accumulator


def main() -> None:
    arguments = options(mib=64, bodies=8, repetitions=9)
    torch.set_num_threads(1)
    numel = (arguments.mib << 20) // 4
    bodies = [torch.randn(numel) for _ in range(arguments.bodies)]
    parts = [(i * numel // 16, (i + 1) * numel // 16) for i in range(16)]
    kinds = {
        "rda, one segment": (Segment(0, numel, "rda"),),
        "rda, 16 segments": tuple(Segment(*part, "rda") for part in parts),
        "mean": (Segment(0, numel, "mean"),),
    }
    memory = torch.zeros(numel)  # a shard reuses it from round to round

    def read() -> None:
        for body in bodies:
            body.sum()

    def fold(segments: tuple[Segment, ...]) -> Accumulator:
        accumulator = Accumulator(numel, segments, buffer=memory)
        for body in bodies:
            contribution = Contribution(numel, segments)
            contribution.add(0, body)
            accumulator.add_contribution(contribution, 1.0)
        return accumulator

    raw = [
        {"plain read": timed(read), **{name: timed(partial(fold, k)) for name, k in kinds.items()}}
        for _ in range(arguments.repetitions)
    ]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    accumulator = fold(kinds["rda, one segment"])
    grown_mib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    master, published = torch.randn(numel), torch.randn(numel)
    outer, gradient = make_outer()(numel), accumulator.result()
    rest = {
        "result": accumulator.result,
        "outer step": lambda: outer.step(master, gradient),
        "publish": lambda: publish(master, published, codec("bf16")),
        "digest": lambda: digest(published),
    }
    ratios = [{name: row[name] / row["plain read"] for name in kinds} for row in raw]
    seconds = {name: spread(timed(work) for _ in range(5)) for name, work in rest.items()}
    result = {
        "time relative to a plain read": spreads(ratios, kinds),
        "growth of peak memory during another merge, MiB": grown_mib,
        "seconds of the other stages, one fragment": seconds,
    }
    keep("merging", config=vars(arguments), raw=raw, result=result)


if __name__ == "__main__":
    main()
