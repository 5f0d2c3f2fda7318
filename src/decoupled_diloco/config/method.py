"""From a run's settings to what the state machines and the merge arithmetic are told.

A shard reads the run's file. Learners and observers get its public part from the coordinator, as
JSON text, and validate it back into the same model. So all agree on the schedule and on the cut.
"""

from __future__ import annotations

import dataclasses
import json
import reprlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from decoupled_diloco.config.plugins import MissingCodecError, provide_codecs, require_codecs
from decoupled_diloco.config.run import RunConfig
from decoupled_diloco.config.sync import OuterSettings
from decoupled_diloco.errors import ConfigError, ProtocolError
from decoupled_diloco.protocol.options import Options

if TYPE_CHECKING:
    from decoupled_diloco.merge import Layout
    from decoupled_diloco.merge.outer import OuterFactory
    from decoupled_diloco.merge.plan import MergePlan

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 200
_SHORT.maxlevel = 3


def public_text(config: RunConfig) -> str:
    """The public settings as JSON text."""
    return json.dumps(config.public())


def read_public(text: str) -> RunConfig:
    """The settings that another process sent; trusts nothing. What is private has its default.

    No module is imported because it is named there.

    Raises:
        MissingCodecError: this program does not have a codec of the run.
        ProtocolError: it is not what `public_text` writes.
    """
    try:
        settings = json.loads(text)
        require_codecs(settings)
        return read_settings(settings)
    except MissingCodecError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ProtocolError(f"the run's settings cannot be read: {error!r}") from error
    except RecursionError:
        raise ProtocolError("the run's settings cannot be read: nested too deep") from None
    except ConfigError as error:
        raise ProtocolError(
            f"the run's settings cannot be read: {error}: are all processes of the same version?"
        ) from error


def read_settings(public: Mapping[str, Any]) -> RunConfig:
    """The settings that `RunConfig.public` told, as in the header of a tape.

    Raises:
        ConfigError: a setting does not fit.
        KeyError, TypeError: they are no settings.
    """
    provide_codecs(public)
    tables = {name: value for name, value in public.items() if name not in ("shards", "digest")}
    return RunConfig(**{**tables, "syncer": {"shards": public["shards"]}})


def difference_of(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
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
        elif mine != other:
            return f"{key} is {_shown(mine)} here and {_shown(other)} there"
    return ""


def difference_of_work(ours: RunConfig, theirs: RunConfig) -> str:
    """The first difference in what all learners must have alike: number, data and workload."""
    mine, other = (
        {"learners": c.run.learners, **{name: c.public()[name] for name in ("data", "workload")}}
        for c in (ours, theirs)
    )
    return difference_of(mine, other)


def _shown(value: Any) -> str:
    """A setting in a sentence; a peer's may be of any size and depth."""
    return "not set" if value is None else _SHORT.repr(value)


def options_of(config: RunConfig) -> Options:
    """What the state machines need to know: the settings of the same names."""
    told = {**dict(config.run), **dict(config.sync), "shards": config.syncer.shards}
    told["ladder"] = config.sync.ladder
    told["chain"] = config.sync.chain
    told["adapt"] = config.sync.limits
    told["error_feedback"] = config.sync.feedback is not None
    if config.sync.wait != "never":
        told["norm_gate"] = 0.0  # synchronous runs have no gate
    return Options(**{field.name: told[field.name] for field in dataclasses.fields(Options)})


def plan_of(layout: Layout, config: RunConfig) -> MergePlan:
    """How the run's tensors are cut, encoded and merged.

    Raises:
        ConfigError: the layout cannot be cut into so many fragments.
    """
    from decoupled_diloco.merge import make_outer  # torch takes seconds: a launcher needs none
    from decoupled_diloco.merge.plan import MergePlan

    sync, outer = config.sync, config.outer

    def factory(outer: OuterSettings) -> OuterFactory:
        return make_outer(outer.optimizer, outer.lr, outer.momentum, outer.options)

    return MergePlan.make(
        synchronised(layout, config),
        fragments=sync.fragments,
        strategy=sync.partition,
        uplink=sync.uplinks[0],
        coarser=sync.uplinks[1:],
        downlink=sync.downlink_codec,
        method=sync.merge,
        weighting=sync.weighting,
        outer=factory(outer),
        other_outers={p: factory(each) for p, each in outer.of_fragments().items()},
        modules=sync.fragment_map,
        buffers="one" if sync.buffers == "one" else "mean",
        feedback=sync.feedback,
    )


def synchronised(layout: Layout, config: RunConfig) -> Layout:
    """What of a model's layout the run synchronises: buffers only if it merges them."""
    return layout.without_buffers() if config.sync.buffers == "local" else layout
