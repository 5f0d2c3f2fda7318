"""What merging costs: 8 bodies of 64 MiB against a plain read of the same bytes, in one run.

python benchmarks/merging.py
"""

from __future__ import annotations

import argparse
import resource

import torch
from evidence import keep, spread, timed

from decoupled_diloco.merge import Contribution, Segment, codec, digest, make_outer, publish
from decoupled_diloco.merge.accumulate import Accumulator

ESTIMATE = (
    "one fold reads the body once for norms and finiteness and once for the sums, which are read "
    "and written: about 4 memory passes, but the second read comes from the cache in blocks, so "
    "2 to 3 times a plain read; memory: one accumulator beside the bodies"
)
MIB = 1 << 20


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--bodies", type=int, default=8)
    parser.add_argument("--repetitions", type=int, default=9)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    numel = arguments.mib * MIB // 4
    bodies = [torch.randn(numel) for _ in range(arguments.bodies)]
    kinds = {
        "rda, one segment": (Segment(0, numel, "rda"),),
        "rda, 16 segments": tuple(
            Segment(i * numel // 16, (i + 1) * numel // 16, "rda") for i in range(16)
        ),
        "mean": (Segment(0, numel, "mean"),),
    }

    def read() -> None:
        for body in bodies:
            body.sum()

    memory = torch.zeros(numel)  # a shard keeps it from round to round

    def fold(segments: tuple[Segment, ...]) -> Accumulator:
        accumulator = Accumulator(numel, segments, buffer=memory)
        for body in bodies:
            contribution = Contribution(numel, segments)
            contribution.add(0, body)
            accumulator.add_contribution(contribution, 1.0)
        return accumulator

    raw: list[dict[str, float]] = []
    for _ in range(arguments.repetitions):
        row = {"plain read": timed(read)}
        for name, segments in kinds.items():
            row[name] = timed(lambda segments=segments: fold(segments))
        raw.append(row)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    accumulator = fold(kinds["rda, one segment"])
    grown_mib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    master, published = torch.randn(numel), torch.randn(numel)
    outer = make_outer()(numel)
    gradient = accumulator.result()
    rest = {
        "result": spread([timed(accumulator.result) for _ in range(5)]),
        "outer step": spread([timed(lambda: outer.step(master, gradient)) for _ in range(5)]),
        "publish": spread(
            [timed(lambda: publish(master, published, codec("bf16"))) for _ in range(5)]
        ),
        "digest": spread([timed(lambda: digest(published)) for _ in range(5)]),
    }
    ratios = {name: spread([row[name] / row["plain read"] for row in raw]) for name in kinds}
    result = {
        "times of a plain read": ratios,
        "peak memory grown by a merge beyond the accumulators before, MiB": grown_mib,
        "seconds of the rest, one fragment": rest,
    }
    keep(
        "merging",
        estimate=ESTIMATE,
        config=vars(arguments),
        raw=raw,
        result=result,
        not_measured="several threads; bodies in bf16, whose decoding adds a read and a write",
    )


if __name__ == "__main__":
    main()
