"""Earlier names of settings, and what each of them is called now.

A file or an override with an earlier name is refused with one sentence that gives the new name.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

TABLES: Mapping[str, str] = MappingProxyType({"where": "launch"})
"""Earlier names of whole tables."""

KEYS: Mapping[str, str] = MappingProxyType(
    {
        "run.budget_steps": "run.max_steps",
        "run.budget_tokens": "run.max_tokens",
        "run.checkpoint_every_seconds": "run.checkpoint_interval_seconds",
        "run.evaluate_every_seconds": "run.evaluate_interval_seconds",
        "run.log": "run.trackers",
        "run.spare": "run.fork_server",
        "sync.period": "sync.sync_every",
        "sync.overlap": "sync.overlap_steps",
        "sync.participants": "sync.participation",
        "sync.adapt.period": "sync.adapt.sync_every",
        "sync.adapt.overlap": "sync.adapt.overlap_steps",
        "sync.adapt.carried_by": "sync.adapt.learner_share",
        "sync.uplink_codec": "sync.codec.uplink",
        "sync.uplink_codecs": "sync.codec.uplink",
        "sync.downlink_codec": "sync.codec.downlink",
        "sync.error_feedback": "sync.codec.error_feedback",
        "sync.feedback_decay": "sync.codec.feedback_decay",
        "sync.merge": "sync.merge.rule",
        "sync.weighting": "sync.merge.weighting",
        "sync.counter_cap_periods": "sync.merge.counter_cap_periods",
        "sync.norm_gate": "sync.merge.norm_gate",
        "sync.oversized": "sync.merge.oversized",
        "sync.buffers": "sync.merge.buffers",
        "sync.late": "sync.late.policy",
        "sync.late_rounds_max": "sync.late.max_versions",
        "sync.late_discount": "sync.late.discount",
        "sync.apply": "sync.apply.when",
        "sync.alignment": "sync.apply.alignment",
        "sync.blend_alpha": "sync.apply.blend_alpha",
        "sync.missed": "sync.apply.missed",
        "sync.partition": "sync.partition.scheme",
        "sync.fragment_map": "sync.partition.map",
        "sync.phases": "sync.partition.phases",
        "learner.give_up_seconds": "learner.disconnect_seconds",
        "learner.checkpoint_every_seconds": "learner.checkpoint_interval_seconds",
        "learner.metrics": "learner.metrics_address",
        "learner.hand_in_seconds": "learner.flush_seconds",
        "learner.carriers": "learner.sync_ranks",
        "data.leases": "data.elastic",
        "data.leases_ahead": "data.prefetch",
        "data.parts": "data.partitions",
        "syncer.durable": "syncer.persist",
        "syncer.standbys": "syncer.standby",
        "launch.engine": "launch.backend",
        "launch.kubernetes.tolerated": "launch.kubernetes.tolerations",
        "launch.kubernetes.sources": "launch.kubernetes.allowed_networks",
        "tls.authority": "tls.ca_cert",
        "tls.certificate": "tls.cert",
        "tls.client_authority": "tls.client_ca_cert",
    }
)
"""Earlier keys with their tables. A key that is a table now is an earlier one unless it holds a
table."""

VALUES: Mapping[str, Mapping[Any, Any]] = MappingProxyType(
    {
        "sync.participation": {"reported": "active", "own": "async"},
        "sync.apply.when": {"at_tau": "at_overlap"},
        "syncer.standby": {0: False, 1: True},
    }
)
"""Earlier values, by the present names of their keys."""


def sentence_for(table: str, key: str, value: Any) -> str | None:
    """The refusal of an earlier name or value; ``None`` if it is not one.

    Args:
        table: The table as it is written in the file; empty at the top of the file.
        key: The key, or the name of a table at the top.
        value: What the file gives it.

    >>> sentence_for("[sync]", "period", 12)
    "'period' in [sync] is called 'sync_every' now: rename it"
    >>> sentence_for("[sync]", "merge", "mean")
    "'merge' in [sync] is called 'rule' in [sync.merge] now: move it there"
    >>> sentence_for("[sync]", "participants", "own")
    "participants='own' in [sync] is called participation='async' now: change it"
    """
    if not table:
        return f"[{key}] is called [{TABLES[key]}] now: rename it" if key in TABLES else None
    dotted = f"{table.strip('[]')}.{key}"
    new = _present_key(dotted, value)
    new_table, _, new_key = new.rpartition(".")
    changes = _has_changed(new, value)
    if new == dotted and not changes:
        return None
    place = "" if f"[{new_table}]" == table else f" in [{new_table}]"
    if changes:
        told = _present_value(new, value)
        told = str(told).lower() if isinstance(told, bool) else repr(told)
        subject = f"{key}={value!r} in {table} is called {new_key}={told}"
    elif key == new_key:
        return f"{key!r} in {table} belongs to [{new_table}] now: move it there"
    else:
        subject = f"{key!r} in {table} is called {new_key!r}"
    fix = "move it there" if place else "change it" if changes else "rename it"
    return f"{subject}{place} now: {fix}"


def override_for(dotted: str, value: Any) -> tuple[str, Any] | None:
    """The present key and value of an override with an earlier key; ``None`` if it has none.

    >>> override_for("sync.participants", "own"), override_for("where.engine", "ray")
    (('sync.participation', 'async'), ('launch.backend', 'ray'))
    >>> override_for("sync.quorum", 1)
    """
    top, dot, rest = dotted.partition(".")
    new = _present_key(TABLES.get(top, top) + dot + rest, value)
    return None if new == dotted else (new, _present_value(new, value))


def _present_key(dotted: str, value: Any) -> str:
    new = KEYS.get(dotted, dotted)
    is_table_now = new.startswith(dotted + ".")
    return dotted if is_table_now and not _is_setting(value) else new


def _is_setting(value: Any) -> bool:
    """Whether a value is that of a key. A table is none, and no value removes the whole table."""
    return not isinstance(value, Mapping) and value is not None


def _has_changed(key: str, value: Any) -> bool:
    return isinstance(value, str | int) and value in VALUES.get(key, {})


def _present_value(key: str, value: Any) -> Any:
    return VALUES[key][value] if _has_changed(key, value) else value
