"""Cost of secure sums: bytes, time and abandoned rounds, by learners and dropouts.

Each learner and the shard compute what they do in a round for one fragment, one after the other on
one core. A dropout happens at a random step: before the shares, before the payload, or before the
opening. A repetition has other dropouts.

    python benchmarks/secure_sum_cost.py --repeats 5
"""

from __future__ import annotations

import os
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from evidence import keep, options

from decoupled_diloco.errors import MergeError, ProtocolError
from decoupled_diloco.merge import codec
from decoupled_diloco.merge.accumulate import Accumulator, Contribution
from decoupled_diloco.merge.fixed_point import (
    FixedPoint,
    first_bounds,
    opened,
    quantize,
    read,
    write,
    zeros,
)
from decoupled_diloco.merge.fragments import Segment
from decoupled_diloco.merge.plan import token_weight
from decoupled_diloco.privacy.secure_sum import (
    Cohort,
    Opening,
    SumMember,
    claim_text,
    names_text,
    read_cohort,
    read_shares,
    shares_text,
)

NUMEL = 1_000_000
COUNTS = (8, 32, 128)
DROPOUTS = (0.0, 0.1, 0.3)
STEPS = ("shares", "masks", "opening")
STEPS_MAX = 96

Row = dict[str, Any]
_T = TypeVar("_T")


class Clock:
    """Seconds and bytes of each kind of work."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.bytes: defaultdict[str, int] = defaultdict(int)

    def take(self, kind: str, work: Callable[[], _T]) -> _T:
        begun = time.perf_counter()
        result = work()
        self.seconds[kind] += time.perf_counter() - begun
        return result


def sum_once(count: int, share: float, seed: int, numel: int) -> Row:
    """Run one sum; return its costs per learner and of the shard."""
    rng, clock = random.Random(seed), Clock()
    segments = (Segment(0, numel, "rda"),)
    form = FixedPoint.of(None, count)
    names = [f"learner-{number:03}" for number in range(count)]
    gone = {name: rng.choice(STEPS) for name in rng.sample(names, round(share * count))}
    base = torch.zeros(numel)
    vector = torch.randn(numel, generator=torch.Generator().manual_seed(seed))
    threshold = count // 2 + 1
    members = {name: SumMember(name, threshold, os.urandom) for name in names}
    claims = [clock.take("keys", lambda m=m: m.claim("sum", 24, 240)) for m in members.values()]
    clock.bytes["control up"] += sum(len(claim_text(claim)) for claim in claims)
    cohort = Cohort("sum", tuple(claims), first_bounds(segments, base), threshold)
    text = cohort.to_text()
    clock.bytes["control down"] += len(text) * count
    shares: dict[str, dict[str, bytes]] = {}
    for name in names:
        if gone.get(name) != "shares":
            shares[name] = clock.take("shares", lambda n=name: members[n].share(read_cohort(text)))
            clock.bytes["control up"] += len(shares_text(shares[name]))
    total, survivors = zeros(form, segments), list[str]()
    row: Row = {"learners": count, "dropouts": share, "abandoned": False}
    try:
        for name in shares:
            mine = shares_text({s: each[name] for s, each in shares.items() if name in each})
            clock.bytes["control down"] += len(mine)
            if gone.get(name) == "masks":
                continue
            integers = clock.take(
                "rounding",
                lambda: quantize(form, segments, vector, base, 1.0, cohort.bounds),
            )
            masked = clock.take(
                "masks", lambda n=name, i=integers, m=mine: members[n].mask(read_shares(m), i)
            )
            body = write(form, masked)
            clock.bytes["payload"] += body.numel()
            clock.take("adding", lambda b=body: total.add(read(form, segments, b)))
            survivors.append(name)
        answers = {}
        for name in survivors:
            clock.bytes["control down"] += len(names_text(survivors))
            if gone.get(name) != "opening":
                answers[name] = clock.take("answer", lambda n=name: members[n].open(survivors))
                clock.bytes["control up"] += len(shares_text(answers[name]))
        opening = Opening(cohort, tuple(shares), tuple(survivors), answers, STEPS_MAX)
        clock.take("opening", lambda: opening.unmask(total))
        args = (*opening.weights(token_weight), cohort.bounds)
        clock.take("opening", lambda: opened(form, segments, total, base, *args))
    except (MergeError, ProtocolError):
        row["abandoned"] = True
    learner = ("keys", "shares", "rounding", "masks", "answer")
    return row | {
        "learner_ms": 1e3 * sum(clock.seconds[kind] for kind in learner) / count,
        "shard_ms": 1e3 * (clock.seconds["adding"] + clock.seconds["opening"]),
        "payload_bytes": form.nbytes(segments),
        "control_bytes": (clock.bytes["control up"] + clock.bytes["control down"]) / count,
        "seconds": dict(clock.seconds),
    }


def plain_once(count: int, numel: int) -> Row:
    """Return the costs of single contributions in bf16."""
    clock, wire = Clock(), codec("bf16")
    segments = (Segment(0, numel, "rda"),)
    vector = torch.randn(numel)
    accumulator = Accumulator(numel, segments)
    for _ in range(count):
        body = clock.take("encoding", lambda: wire.encode(vector))

        def fold(body: Any = body) -> None:
            contribution = Contribution(numel, segments)
            contribution.add(0, wire.decode(body, numel))
            accumulator.add_contribution(contribution, 1.0)

        clock.take("folding", fold)
    return {
        "learner_ms": 1e3 * clock.seconds["encoding"] / count,
        "shard_ms": 1e3 * clock.seconds["folding"],
        "payload_bytes": wire.nbytes(numel),
    }


def spread(rows: list[Row], name: str) -> list[float]:
    values = [row[name] for row in rows]
    return [min(values), statistics.median(values), max(values)]


def main() -> None:
    arguments = options(repeats=5, numel=NUMEL, name="secure")
    torch.set_num_threads(1)
    result: dict[str, Row] = {}
    raw: list[Row] = []
    for count in COUNTS:
        plain = [plain_once(count, arguments.numel) for _ in range(arguments.repeats)]
        for share in DROPOUTS:
            rows = [sum_once(count, share, n, arguments.numel) for n in range(arguments.repeats)]
            raw += rows
            result[f"{count} learners, {share:.0%} dropouts"] = {
                "learner_ms": spread(rows, "learner_ms"),
                "shard_ms": spread(rows, "shard_ms"),
                "plain_learner_ms": spread(plain, "learner_ms"),
                "plain_shard_ms": spread(plain, "shard_ms"),
                "payload_times": rows[0]["payload_bytes"] / plain[0]["payload_bytes"],
                "control_kb": statistics.median(row["control_bytes"] for row in rows) / 1e3,
                "abandoned": sum(row["abandoned"] for row in rows),
                "rounds": len(rows),
            }
            print(count, share, result[f"{count} learners, {share:.0%} dropouts"], flush=True)
    config = {"repeats": arguments.repeats, "numel": arguments.numel}
    print(keep(arguments.name, of="secure", config=config, raw=raw, result=result))


if __name__ == "__main__":
    main()
