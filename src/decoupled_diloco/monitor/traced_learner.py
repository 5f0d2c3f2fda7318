"""A learner's part of the traces: what it sends, fetches and takes into its parameters.

| span | from | to |
|---|---|---|
| `upload` | it has the pull and the snapshot (`SendBody`) | the shard has it, or it failed |
| `fetch` | it begins to fetch the new copy (`Fetch`) | the copy is here, verified, or failed |
| `apply` | the copy is here (`Fetched`) | the boundary at which it is taken (`Apply`) |

An `upload` begins by the learner's clock and ends by the shard's, the other two are by the
learner's alone.
"""

from __future__ import annotations

from typing import Any

from decoupled_diloco.monitor.joints import Draft, Joints, asking_key, version_key
from decoupled_diloco.monitor.spans import Process, Span, SpanEvent
from decoupled_diloco.protocol import effects as do
from decoupled_diloco.protocol import events as fact
from decoupled_diloco.protocol.versions import Asking, Version

LOOKS_AT = frozenset(
    cls.__name__
    for cls in (
        do.SendBody, fact.BodyEncoded, fact.UploadFailed, do.Fetch, fact.Fetched,
        fact.FetchFailed, do.Apply,
    )
)  # fmt: skip


class TracedLearner:
    """Takes in one life of a learner, record by record."""

    def __init__(self, process: Process, joints: Joints) -> None:
        self.process = process
        self._joints = joints
        self._sent: dict[int, tuple[str, Asking, Draft]] = {}  # by fragment, the latest
        self._fetches: dict[int, tuple[Version, Draft]] = {}
        self._staged: dict[int, tuple[Version, Draft]] = {}

    def take(self, at: int, record: int, value: Any) -> list[Span]:
        """One record, and its number; ``at`` in nanoseconds since 1970."""
        match value:
            case do.SendBody():
                return self._sends(at, record, value)
            case fact.BodyEncoded(fragment, ask):
                return self._sent_more(fragment, ask, SpanEvent("encoded", at))
            case fact.UploadFailed(fragment, ask, reason):
                return self._sent_more(fragment, ask, SpanEvent("failed", at), reason)
            case do.Fetch(fragment=fragment, version=version, whole=whole):
                draft = self._draft("fetch", record, at)
                draft.kind = "consumer"
                draft.attributes |= {
                    "ddiloco.version": str(version),
                    "ddiloco.body": "whole" if whole else "difference",
                }
                self._fetches[fragment] = (version, draft)
            case fact.Fetched(fragment, version):
                draft = self._draft("apply", record, at)
                draft.attributes["ddiloco.version"] = str(version)
                self._staged[fragment] = (version, draft)
                return self._fetched(at, fragment, version, "")
            case fact.FetchFailed(fragment, version, reason):
                return self._fetched(at, fragment, version, reason)
            case do.Apply():
                return self._applied(at, value)
        return []

    def _draft(self, name: str, record: int, at: int) -> Draft:
        return Draft(self.process, name, "internal", record, at)

    def _sends(self, at: int, record: int, order: do.SendBody) -> list[Span]:
        draft = self._draft("upload", record, at)
        draft.kind, draft.whole = "server", False
        draft.attributes |= {
            "ddiloco.fragment": order.fragment,
            "ddiloco.version.base": str(order.base),
            "ddiloco.steps": order.steps,
            "ddiloco.tokens": order.tokens,
            "ddiloco.codec": order.codec,
            "ddiloco.reason": order.why,
        }
        shard = f"shard-{order.shard}"
        self._sent[order.fragment] = (shard, order.ask, draft)
        return self._joints.draft(asking_key(shard, order.ask), draft)

    def _sent_more(
        self, fragment: int, ask: Asking, event: SpanEvent, problem: str = ""
    ) -> list[Span]:
        shard, latest, draft = self._sent.get(fragment, ("", None, None))
        if draft is None or latest != ask:
            return []
        draft.events.append(event)
        draft.whole = True
        if problem:
            del self._sent[fragment]
            draft.error, draft.end = problem, event.at
        return self._joints.draft(asking_key(shard, ask), draft)

    def _fetched(self, at: int, fragment: int, version: Version, problem: str) -> list[Span]:
        latest, draft = self._fetches.get(fragment, (None, None))
        if draft is None or latest != version:
            return []
        del self._fetches[fragment]
        draft.end, draft.error = at, problem
        return self._joints.draft(version_key(fragment, version), draft)

    def _applied(self, at: int, order: do.Apply) -> list[Span]:
        version, draft = self._staged.get(order.fragment, (None, None))
        if draft is None or version != order.version:
            return []
        del self._staged[order.fragment]
        draft.end = at
        draft.attributes |= {
            "ddiloco.mode": order.mode,
            "ddiloco.discarded_tokens": order.discarded_tokens,
            "ddiloco.reason": order.why,
        }
        return self._joints.draft(version_key(order.fragment, order.version), draft)
