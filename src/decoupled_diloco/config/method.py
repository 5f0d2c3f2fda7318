"""Maps a run's settings to the options of the state machines and of the merge arithmetic.

A shard reads the run's file. Learners and observers receive its public part from the coordinator as
JSON text, and validate it into the same model. So all processes use the same schedule and layout.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from decoupled_diloco.config.plugins import (
    MissingCodecError,
    provide_codecs,
    registered,
    require_codecs,
)
from decoupled_diloco.config.run import RunConfig
from decoupled_diloco.config.sync import DeviceSettings, OuterSettings
from decoupled_diloco.errors import ConfigError, ProtocolError
from decoupled_diloco.protocol.machine_options import ApplyAt, Options
from decoupled_diloco.protocol.quotas import Quota

if TYPE_CHECKING:
    from decoupled_diloco.merge import Layout
    from decoupled_diloco.merge.fixed_point import FixedPoint
    from decoupled_diloco.merge.outer import OuterFactory
    from decoupled_diloco.merge.plan import MergePlan
    from decoupled_diloco.privacy.dp import Mechanism

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 200
_SHORT.maxlevel = 3


def public_text(config: RunConfig) -> str:
    """The public settings as JSON text."""
    return json.dumps(config.public())


def read_public(text: str) -> RunConfig:
    """The settings that another process sent, fully validated. Private settings have defaults.

    A module that the text names is never imported.

    Raises:
        MissingCodecError: This program does not have a codec of the run.
        ProtocolError: The text does not come from `public_text`.
    """
    try:
        settings = json.loads(text)
        require_codecs(settings)
        return read_settings(settings)
    except MissingCodecError:
        raise
    except ConfigError as error:
        raise ProtocolError(
            f"the run's settings cannot be read: {error}: are all processes of the same version?"
        ) from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ProtocolError(f"the run's settings cannot be read: {error!r}") from error
    except RecursionError:
        raise ProtocolError("the run's settings cannot be read: nested too deep") from None


def read_settings(public: Mapping[str, Any]) -> RunConfig:
    """The settings from the values of `RunConfig.public`, such as those in the header of a tape.

    Raises:
        ConfigError: A setting is not valid.
        KeyError, TypeError: The values are not settings.
    """
    provide_codecs(public)
    tables = {name: value for name, value in public.items() if name not in ("shards", "digest")}
    return RunConfig(**{**tables, "syncer": {"shards": public["shards"]}})


def difference_of(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    """The first setting in which two runs differ, in words; empty if there is none.

    >>> difference_of({"sync": {"sync_every": 24}}, {"sync": {"sync_every": 12}})
    'sync.sync_every is 24 here and 12 there'
    """
    for key in sorted(ours.keys() | theirs.keys()):
        mine, other = ours.get(key), theirs.get(key)
        if isinstance(mine, Mapping) and isinstance(other, Mapping):
            inner = difference_of(mine, other)
            if inner:
                return f"{key}.{inner}"
        elif mine != other:
            return f"{key} is {_shown(mine)} here and {_shown(other)} there"
    return ""


def difference_of_work(ours: RunConfig, theirs: RunConfig) -> str:
    """The first difference in what all learners share: their number, the data, the workload."""
    mine, other = (
        {"learners": c.run.learners, **{name: c.public()[name] for name in ("data", "workload")}}
        for c in (ours, theirs)
    )
    return difference_of(mine, other)


def _shown(value: Any) -> str:
    """A setting in a sentence; a peer's may be of any size and depth."""
    return "not set" if value is None else _SHORT.repr(value)


_APPLY: dict[str, ApplyAt] = {"on_arrival": "on_arrival", "at_overlap": "at_tau"}


def options_of(config: RunConfig) -> Options:
    """The settings for the state machines, by the names that these use."""
    run, sync = config.run, config.sync
    devices = sync.devices or DeviceSettings()
    secure, threshold = config.privacy.secure_sums, config.threshold
    return Options(
        fragments=sync.fragments,
        period=sync.sync_every,
        overlap=sync.overlap_steps,
        quorum=max(sync.quorum, threshold),
        shards=config.syncer.shards,
        grace_margin=sync.grace_margin,
        phases=sync.partition.phases,
        participants="own" if sync.participation == "async" else "reported",
        rule=None
        if sync.participation == "async"
        else registered("participation rule", sync.participation),
        alignment=sync.apply.alignment,
        missed=sync.apply.missed,
        apply=_APPLY[sync.apply.when],
        wait=sync.wait,
        late="drop" if secure else sync.late.policy,
        late_rounds_max=sync.late.max_versions,
        late_discount=sync.late.discount,
        discount_of=sync.late.discount_of,
        probation_periods=config.trust.probation_periods,
        trust=config.trust.act,
        score_limit=config.trust.score_limit,
        counter_cap_periods=sync.merge.counter_cap_periods,
        norm_gate=sync.merge.norm_gate if sync.wait == "never" and not secure else 0.0,
        oversized=sync.merge.oversized,
        uplink_codec=sync.codec.uplinks[0],
        error_feedback=sync.codec.feedback is not None and not secure,
        ladder=() if secure else sync.codec.ladder,
        threshold=threshold,
        chain=sync.codec.chain,
        adapt=sync.limits,
        schedule=None if sync.schedule is None else registered("schedule", sync.schedule),
        history=sync.history,
        cohort=devices.cohort,
        draw=devices.draw,
        visit_seconds=devices.visit_seconds,
        merges_max=None if config.privacy.dp is None else config.privacy.dp.periods,
        seed=run.seed,
        max_steps=run.max_steps,
        max_tokens=run.max_tokens,
        checkpoint_every_seconds=run.checkpoint_interval_seconds,
        weighting=sync.merge.weighting,
        quotas=_quotas(config),
    )


def _quotas(config: RunConfig) -> tuple[Quota, ...]:
    parties = config.privacy.agreed
    if parties is None or not parties.has_quotas:
        return ()
    return tuple(Quota(p.name, p.learners, p.share_min, p.share_max) for p in parties.parties)


def plan_of(layout: Layout, config: RunConfig) -> MergePlan:
    """How the run's tensors are divided, encoded and merged.

    Raises:
        ConfigError: The layout cannot be divided into this number of fragments, or a secure sum has
            no room for the noise of a fragment.
    """
    from decoupled_diloco.merge import codec, make_outer  # torch, which a launcher does not need
    from decoupled_diloco.merge.plan import MergePlan, MomentPlan

    sync, outer = config.sync, config.outer

    def factory(outer: OuterSettings) -> OuterFactory:
        return make_outer(outer.optimizer, outer.lr, outer.momentum, outer.options)

    plan = MergePlan.make(
        synchronised(layout, config),
        fragments=sync.fragments,
        strategy=sync.partition.scheme,
        uplink=sync.codec.uplinks[0],
        coarser=sync.codec.uplinks[1:],
        downlink=sync.codec.downlink,
        method=sync.merge.rule,
        weighting=sync.merge.weighting,
        outer=factory(outer),
        other_outers={p: factory(each) for p, each in outer.of_fragments().items()},
        modules=sync.partition.map,
        buffers="one" if sync.merge.buffers == "one" else "mean",
        feedback=None if config.privacy.secure_sums else sync.codec.feedback,
        trim=sync.merge.trim,
        moments=None
        if sync.moments is None
        else MomentPlan(sync.moments.every, codec(sync.moments.codec), sync.moments.names),
    )
    return replace(plan, secure=_fixed_point(plan, config), average=outer.average)


def _fixed_point(plan: MergePlan, config: RunConfig) -> FixedPoint | None:
    """The format of masked contributions; `None` without secure sums."""
    if not config.privacy.secure_sums:
        return None
    from decoupled_diloco.merge.fixed_point import FixedPoint

    mechanism, noise = mechanism_of(plan, config), 0.0
    if mechanism is not None:
        noise = max(mechanism.noise_of_sum(fragment.numel) for fragment in plan.fragments)
    return FixedPoint.of(config.privacy.bits, config.run.learners, noise)


def mechanism_of(plan: MergePlan, config: RunConfig) -> Mechanism | None:
    """How contributions are clipped and merges get noise; `None` without `[privacy.dp]`."""
    dp = config.privacy.dp
    return None if dp is None else dp.mechanism(sum(each.numel for each in plan.fragments))


def synchronised(layout: Layout, config: RunConfig) -> Layout:
    """The part of a model's layout that the run syncs: buffers only if they are merged."""
    model = layout.of_model
    return model.without_buffers() if config.sync.merge.buffers == "local" else model
