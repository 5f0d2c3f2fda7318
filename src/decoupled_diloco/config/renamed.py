"""Earlier names of settings, and what each of them is called now.

A file or an override with an earlier name is refused with one sentence that gives the new name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

TABLES: Mapping[str, str] = MappingProxyType(
    {
        "where": "launch",
        "adapt": "sync.adapt",
        "codec": "sync.codec",
        "merge": "sync.merge",
        "late": "sync.late",
        "apply": "sync.apply",
        "partition": "sync.partition",
    }
)
"""Earlier names of whole tables, and tables that are written without the one around them."""

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
        "sync.codec": "sync.codec.uplink",
        "sync.codec_up": "sync.codec.uplink",
        "sync.codec_down": "sync.codec.downlink",
        "sync.codec.up": "sync.codec.uplink",
        "sync.codec.down": "sync.codec.downlink",
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
        "data.leased": "data.elastic",
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

_IN_NEW_TABLES = {
    f"{new.rpartition('.')[0]}.{old.rpartition('.')[2]}": new for old, new in KEYS.items()
}
"""Earlier keys that are written in their present table."""

_AT_THE_TOP = {old.rpartition(".")[2]: new for old, new in reversed(list(KEYS.items()))}
"""Earlier keys that are written without a table; the first of several counts."""

LISTS = ("run.trackers", "launch.kubernetes.tolerations", "launch.kubernetes.allowed_networks")
"""Present keys that hold a list of texts, where the earlier ones may have held one text."""

VALUES: Mapping[str, Mapping[Any, Any]] = MappingProxyType(
    {
        "sync.participation": {"reported": "active", "own": "async"},
        "sync.apply.when": {"at_tau": "at_overlap"},
    }
)
"""Earlier values, by the present names of their keys. `syncer.standby` was a number, too."""


def sentence_for(table: str, key: str, value: Any) -> str | None:
    """The refusal of an earlier name or value; ``None`` if it is not one.

    Args:
        table: The table as it is written in the file; empty at the top of the file.
        key: The key, or the name of a table at the top.
        value: What the file gives it.

    >>> sentence_for("[sync]", "period", 12)
    "'period' in [sync] is called 'sync_every' now: rename it"
    >>> sentence_for("[sync.merge]", "merge", "mean")
    "'merge' in [sync.merge] is called 'rule' now: rename it"
    >>> sentence_for("", "period", 12)
    "'period' at the top of the file is called 'sync_every' in [sync] now: move it there"
    >>> sentence_for("[sync]", "participants", "own")
    'participants="own" in [sync] is called participation="async" now: change it'
    """
    if not table and key in TABLES and not (key in _AT_THE_TOP and _is_setting(value)):
        return f"[{key}] is called [{TABLES[key]}] now: rename it"
    dotted = f"{table.strip('[]')}.{key}" if table else key
    new = _present_key(dotted, value)
    new_table, _, new_key = new.rpartition(".")
    told = _present_value(new, value)
    changes = told is not value
    if new == dotted and (not changes or new in LISTS):
        return None
    place = "" if f"[{new_table}]" == table else f" in [{new_table}]"
    where = f"in {table}" if table else "at the top of the file"
    if changes:
        subject = f"{key}={toml_text(value)} {where} is called {new_key}={toml_text(told)}"
    elif key == new_key:
        return f"{key!r} {where} belongs to [{new_table}] now: move it there"
    else:
        subject = f"{key!r} {where} is called {new_key!r}"
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


def toml_text(value: Any) -> str:
    """Return a value as it is written in a TOML file.

    >>> print(toml_text({"a": ["bf16", 1, True]}))
    {a = ["bf16", 1, true]}
    """
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {toml_text(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(toml_text(each) for each in value) + "]"
    if isinstance(value, str | bool):
        return json.dumps(value, ensure_ascii=False)
    try:
        return str(value)
    except ValueError:  # Python refuses to write a number with thousands of digits
        return "a number of thousands of digits"


def _present_key(dotted: str, value: Any) -> str:
    names = KEYS if "." in dotted else _AT_THE_TOP
    new = names.get(dotted) or _IN_NEW_TABLES.get(dotted, dotted)
    is_table_now = new.startswith(dotted + ".")
    return dotted if is_table_now and not _is_setting(value) else new


def _is_setting(value: Any) -> bool:
    """Whether a value is that of a key. A table is none, and no value removes the whole table."""
    return not isinstance(value, Mapping) and value is not None


def _present_value(key: str, value: Any) -> Any:
    """The present form of a value; the value itself if it has not changed."""
    if key == "syncer.standby" and isinstance(value, int):
        return value > 0
    if key in LISTS and isinstance(value, str):
        return [value]
    return VALUES.get(key, {}).get(value, value) if isinstance(value, str) else value
