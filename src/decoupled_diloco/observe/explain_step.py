"""What happened at one global step, in words: what set the clock, which reports, what was due."""

from __future__ import annotations

from decoupled_diloco.errors import ConfigError
from decoupled_diloco.observe.explain import name_of, options_in, revision_at, shards_of
from decoupled_diloco.observe.run_model import RunModel
from decoupled_diloco.observe.shard_data import RoundLog, ShardLog, TickLog
from decoupled_diloco.observe.words import BULLET, listing, many, ordinal, when
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
    options, plan = options_in(run, step), revision_at(run, step)
    lines = [f"Global step {step}"]
    if plan is not None:
        revision, why = plan
        lines += [
            "",
            f"{revision} since step {revision.tick}, by revision {revision.number}: {why}.",
        ]
    for log, tick in reached:
        lines += ["", _clock(log, tick, step, options)]
        told = [_report(log, tick, step, name) for name in run.learners]
        lines += [f"{BULLET}{text}." for text in (*told, *_rounds(log, tick, step, options))]
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


def _clock(shard: ShardLog, tick: TickLog, step: int, options: Options | None) -> str:
    text = (
        f"{name_of(shard, tick.life)}: its clock came to step {step}, {when(tick.at)} into the run"
    )
    if tick.before is None and tick.clock > step:
        text += f", or before: it was at {tick.clock} when it was first heard of in this life"
    elif tick.before is not None and tick.clock > tick.before + 1:
        text += f", in one jump from {tick.before} to {tick.clock}"
    if not tick.setter:
        return f"{text} ({tick.why})."
    text += f", by the report of {tick.setter}"
    if options is None:
        return text + "."
    kth = "largest" if options.quorum == 1 else f"{ordinal(options.quorum)} largest"
    sole = " (K = 1)" if options.quorum == 1 else ""
    return f"{text}: the clock is the {kth} run step of the {tick.live} that were live{sole}."


def _report(shard: ShardLog, tick: TickLog, step: int, name: str) -> str:
    at = next((at for own, at in shard.reports_of(tick.life, name) if own >= step), None)
    if at is None:
        return f"{name} has not reported step {step} there"
    seconds = at - tick.at
    if abs(seconds) < 1e-6:
        relation = "and set the clock" if name == tick.setter else "at that instant"
    else:
        relation = f"{format_duration(abs(seconds))} {'before' if seconds < 0 else 'later'}"
    return f"{name} reported it {relation}"


def _rounds(shard: ShardLog, tick: TickLog, step: int, options: Options | None) -> list[str]:
    rounds = [*shard.rounds, *shard.open.values(), *shard.lost]
    rounds = [r for r in rounds if r.life == tick.life]
    lines = []
    if options is not None:
        own = [str(p) for p in options.due(step) if options.owner(p) == shard.index]
        due = f"fragment {listing(own)}" if own else "no fragment of this shard"
        lines.append(f"due: {due}")
    lines += [_round(round) for round in rounds if round.tick == step]
    besides = [r for r in rounds if r.opened_at <= tick.at < r.finished_at and r.tick != step]
    if besides:
        told = listing([f"{r.number} (fragment {r.fragment}, step {r.tick})" for r in besides])
        lines.append(f"open besides: {many(len(besides), 'round')}: {told}")
    return lines


def _round(round: RoundLog) -> str:
    text = f"round {round.number} (fragment {round.fragment})"
    result = round.result
    if result is None:
        return f"{text}: not over"
    seconds = format_duration(result.finished_seconds)
    if round.merged:
        learners = listing([participant.learner for participant in round.folded])
        return f"{text}: merged after {seconds} from {learners}, version {result.version}"
    return f"{text}: given up after {seconds}: {result.reason}"
