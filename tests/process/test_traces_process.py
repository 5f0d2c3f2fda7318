"""`ddiloco traces` as a command: a run's rounds at a real collector of OTLP over HTTP."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest

from otlp_collector import ReceivingCollector, receiving
from process.process_runs import command


def ended(*arguments: str) -> tuple[int, str]:
    process = command(*arguments)
    output, _ = process.communicate(timeout=110)
    return process.returncode, output


def traced(collector: ReceivingCollector) -> dict[bytes, set[str]]:
    """Return the processes with spans in each trace."""
    found = defaultdict(set)
    for told, span in collector.spans:
        found[span.trace_id].add(told["service.name"])
    return found


@pytest.mark.smoke
def test_a_finished_run_is_sent_completely(tmp_path: Path) -> None:
    run, short = str(tmp_path / "run"), ("--set", "run.max_steps=40")
    code, output = ended("simulate", "flaky-link", "--protocol-only", *short, "--tape", run)
    assert code == 0, output
    with receiving() as collector:
        code, output = ended(
            "traces", run, "--collector", collector.url, "--interval-seconds", "0.2"
        )
    assert code == 0, output
    roots = [span for _, span in collector.spans if not span.parent_span_id]
    assert (
        f"sent {len(roots)} rounds with {len(collector.spans)} spans to {collector.url}" in output
    )
    ids = {(span.trace_id, span.span_id) for _, span in collector.spans}
    assert len(ids) == len(collector.spans)
    for _, span in collector.spans:
        assert not span.parent_span_id or (span.trace_id, span.parent_span_id) in ids
        assert (len(span.trace_id), len(span.span_id)) == (16, 8)
    both = [each for each in traced(collector).values() if len(each) > 1]
    assert both, "shard and learners are in the same trace"
    assert all(any(name.startswith("shard-") for name in each) for each in both)
    assert any(any(name.startswith("learner-") for name in each) for each in both)
