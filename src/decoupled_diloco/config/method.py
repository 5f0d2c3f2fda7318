"""From a run's settings to what the state machines and the merge arithmetic are told.

Shards read the run's file; learners and observers get its public part from the coordinator, as JSON
text. Both go through the same two functions, so that all agree on the schedule and on the cut.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from decoupled_diloco.config.run import OuterSettings, RunConfig, SyncSettings
from decoupled_diloco.errors import ConfigError, ProtocolError
from decoupled_diloco.protocol.options import Options

if TYPE_CHECKING:
    from decoupled_diloco.merge import Layout
    from decoupled_diloco.merge.plan import MergePlan

Public = Mapping[str, Any]

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 200
_SHORT.maxlevel = 3


def public_text(config: RunConfig) -> str:
    """The public settings with the number of shards, as JSON text."""
    return json.dumps(config.public() | {"shards": config.syncer.shards}, default=str)


def read_public(text: str) -> Public:
    """The public settings from what another process sent; trusts nothing.

    Raises:
        ProtocolError: it is not what `public_text` writes.
    """
    try:
        public = dict(json.loads(text))
        options_of(public)
        OuterSettings(**public["outer"])
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
        raise ProtocolError(f"the run's settings cannot be read: {error!r}") from error
    except RecursionError:
        raise ProtocolError("the run's settings cannot be read: nested too deep") from None
    except ConfigError as error:
        raise ProtocolError(
            f"the run's settings cannot be read: {error}: are all processes of the same version?"
        ) from error
    return public


def difference_of(ours: Public, theirs: Public) -> str:
    """The first setting in which two runs differ, in words; empty if there is none.

    >>> difference_of({"sync": {"period": 24}}, {"sync": {"period": 12}})
    'sync.period is 24 here and 12 there'
    """
    for key in sorted(ours.keys() | theirs.keys()):
        mine, other = ours.get(key), theirs.get(key)
        if isinstance(mine, Mapping) and isinstance(other, Mapping):
            inner = difference_of(mine, other)
            if inner:
                return f"{key}.{inner}"
        elif key != "digest" and mine != other:
            return f"{key} is {_shown(mine)} here and {_shown(other)} there"
    return ""


def _shown(value: Any) -> str:
    """A setting in a sentence; a peer's may be of any size and depth."""
    return "not set" if value is None else _SHORT.repr(value)


def options_of(public: Public) -> Options:
    """What the state machines need to know."""
    sync = SyncSettings(**public["sync"])
    return Options(
        fragments=sync.fragments,
        period=sync.period,
        overlap=sync.overlap,
        quorum=sync.quorum,
        shards=int(public["shards"]),
        grace_margin=sync.grace_margin if sync.grace else 0.0,
        participants=sync.participants,
        alignment=sync.alignment,
        missed=sync.missed,
        apply=sync.apply,
        wait=sync.wait,
        counter_cap_periods=sync.counter_cap_periods,
        late=sync.late,
        late_rounds_max=sync.late_rounds_max,
        late_discount=sync.late_discount,
        norm_gate=sync.norm_gate if sync.wait == "never" else 0.0,
        oversized=sync.oversized,
        uplink_codec=sync.uplink_codec,
        budget_steps=public["run"].get("budget_steps"),
        budget_tokens=public["run"].get("budget_tokens"),
        checkpoint_every_seconds=float(public["run"].get("checkpoint_every_seconds", 0.0)),
    )


def plan_of(layout: Layout, public: Public) -> MergePlan:
    """How the run's tensors are cut, encoded and merged.

    Raises:
        ConfigError: the layout cannot be cut into so many fragments.
    """
    from decoupled_diloco.merge import make_outer  # torch takes seconds: a launcher needs none
    from decoupled_diloco.merge.plan import MergePlan

    sync, outer = SyncSettings(**public["sync"]), OuterSettings(**public["outer"])
    return MergePlan.make(
        synchronised(layout, public),
        fragments=sync.fragments,
        strategy=sync.partition,
        uplink=sync.uplink_codec,
        downlink=sync.downlink_codec,
        method=sync.merge,
        weighting=sync.weighting,
        outer=make_outer(outer.optimizer, outer.lr, outer.momentum, outer.options),
        buffers="one" if sync.buffers == "one" else "mean",
    )


def synchronised(layout: Layout, public: Public) -> Layout:
    """What of a model's layout the run synchronises: buffers only if it merges them."""
    local = SyncSettings(**public["sync"]).buffers == "local"
    return layout.without_buffers() if local else layout


def blend_alpha_of(public: Public) -> float:
    """α, the learner's own share of a blend."""
    return SyncSettings(**public["sync"]).blend_alpha
