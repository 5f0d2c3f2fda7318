"""What happened at one global step, in words: what set the clock, who reported, what was due."""

from __future__ import annotations

from decoupled_diloco.errors import ConfigError
from decoupled_diloco.observe.explain import name_of, options_in, shards_of
from decoupled_diloco.observe.run_model import RunModel
from decoupled_diloco.observe.shard_data import RoundLog, ShardLog, TickLog
from decoupled_diloco.observe.words import BULLET, listing, many, when
from decoupled_diloco.protocol.options import Options
from decoupled_diloco.units import format_duration


def explain_step(run: RunModel, step: int, shard: int | None = None) -> list[str]:
    """What happened at a global step, at every shard: each has a clock of its own.

    Raises:
        ConfigError: No shard's clock has been there; the message says how far they are.
    """
    logs = shards_of(run, shard)
    reached = [(log, tick) for log in logs for tick in _ticks(log, step)]
    if step < 1 or not reached:
        clocks = ", ".join(f"{log.name} at {log.clock_max}" for log in logs)
        raise ConfigError(
            f"no clock on this tape has been at step {step}; they are: {clocks or 'none'}"
        )
    options = options_in(run)
    lines = [f"Global step {step}"]
    for log, tick in reached:
        lines += ["", _clock(run, log, tick, step, options)]
        lines += _reports(run, log, tick, step)
        lines += _rounds(log, tick, step, options)
    return lines


def _ticks(shard: ShardLog, step: int) -> list[TickLog]:
    """The tick of each life of a shard by which its clock came to a step.

    A shard that was started again goes on where its learners are: what lies before the first tick
    of a later life was another life's, unless none saw it.
    """
    found: list[TickLog] = []
    for life in range(1, shard.life + 1):
        tick = next((tick for tick in shard.ticks_of(life) if tick.clock >= step), None)
        passed = tick is not None and tick.before is None and tick.clock > step
        if tick is not None and not (passed and found):
            found.append(tick)
    return found


def _clock(
    run: RunModel, shard: ShardLog, tick: TickLog, step: int, options: Options | None
) -> str:
    text = f"{name_of(shard, tick.life)}: its clock came to step {step} "
    text += f"{when(tick.at)} into the run"
    if tick.before is None and tick.clock > step:
        text += f", or before: it was at {tick.clock} when it was first heard of in this life"
    elif tick.before is not None and tick.clock > tick.before + 1:
        text += f", in one jump from {tick.before} to {tick.clock}"
    if tick.setter:
        text += f", by the report of {tick.setter}"
        if options is not None:
            text += f": {_kth(options.quorum, tick.live)}"
    else:
        text += f" ({tick.why})"
    return text + "."


def _kth(quorum: int, live: int) -> str:
    if quorum == 1:
        return f"the clock is the largest run step of the {live} that were live (K = 1)"
    return f"the clock is the {quorum}. largest run step of the {live} that were live"


def _reports(run: RunModel, shard: ShardLog, tick: TickLog, step: int) -> list[str]:
    lines = []
    for name in run.learners:
        reports = shard.reports_of(tick.life, name)
        at = next((at for own, at in reports if own >= step), None)
        if at is None:
            lines.append(f"{BULLET}{name} has not reported step {step} there.")
            continue
        seconds = at - tick.at
        if abs(seconds) < 1e-6:
            relation = "and set the clock" if name == tick.setter else "at that instant"
        elif seconds < 0:
            relation = f"{format_duration(-seconds)} before"
        else:
            relation = f"{format_duration(seconds)} later"
        lines.append(f"{BULLET}{name} reported it {relation}.")
    return lines


def _rounds(shard: ShardLog, tick: TickLog, step: int, options: Options | None) -> list[str]:
    rounds = [*shard.rounds, *shard.open.values(), *shard.lost]
    lines = []
    due = [r for r in rounds if r.tick == step and r.life == tick.life]
    if options is not None:
        own = [p for p in options.due(step) if options.owner(p) == shard.index]
        if own:
            lines.append(f"{BULLET}due: fragment {listing([str(p) for p in own])}.")
        else:
            lines.append(f"{BULLET}due: no fragment of this shard.")
    lines += [f"{BULLET}{_round(round)}." for round in due]
    at_once = [
        r
        for r in rounds
        if r.opened_at <= tick.at < r.finished_at and r.life == tick.life and r not in due
    ]
    if at_once:
        told = listing([f"{r.number} (fragment {r.fragment}, step {r.tick})" for r in at_once])
        lines.append(f"{BULLET}open besides: {many(len(at_once), 'round')}: {told}.")
    return lines


def _round(round: RoundLog) -> str:
    text = f"round {round.number} (fragment {round.fragment})"
    result = round.result
    if result is None:
        return f"{text}: not over"
    seconds = format_duration(result.finished_seconds)
    if result.verdict == "merged":
        folded = [p.learner for p in result.participants if p.state == "folded"]
        return f"{text}: merged after {seconds} from {listing(folded)}, version {result.version}"
    return f"{text}: given up after {seconds}: {result.reason}"
