"""The shipped dashboard and alert rules are current, and use existing metrics."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest

from decoupled_diloco.monitor.metric_table import LEARNER, PROCESS, SHARD
from decoupled_diloco.monitor.scraping import shipped_file
from unit.monitor.promtool import needs_prometheus, promtool

ROOT = Path(__file__).parents[3]
SERIES = {name: each for each in (*SHARD, *LEARNER) for name in each.series}
TARGET_LABELS = {"run", "shard", "learner", "job", "instance"}


def dashboard_maker():
    spec = importlib.util.spec_from_file_location("d", ROOT / "docs" / "pictures" / "dashboard.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    import sys

    sys.modules["d"] = module
    spec.loader.exec_module(module)
    return module


def queries() -> list[str]:
    panels = json.loads(shipped_file("dashboard.json"))["panels"]
    found = [each["expr"] for panel in panels for each in panel.get("targets", ())]
    assert len(found) > 20
    return found


def rules() -> list[str]:
    """Yield each rule's expression, with folded lines joined."""
    text = shipped_file("alerts.yml")
    return re.findall(r"expr: (.*?)\n        (?:for|labels):", text, flags=re.DOTALL)


def test_the_dashboard_is_the_output_of_its_script() -> None:
    assert dashboard_maker().text() == shipped_file("dashboard.json"), (
        "run python docs/pictures/dashboard.py"
    )


@pytest.mark.parametrize("text", [*queries(), *rules()])
def test_queried_metrics_exist(text: str) -> None:
    asked = re.findall(r"(?:ddiloco|process)_\w+", text)
    assert asked or "up{" in text
    assert set(asked) <= {*SERIES, *PROCESS}
    labels = {each for name in asked for each in (SERIES[name].labels if name in SERIES else ())}
    for by in re.findall(r"by \(([^)]*)\)", text):
        assert set(by.split(", ")) <= labels | TARGET_LABELS | {"le"}


def test_counters_are_queried_as_rates() -> None:
    """Its raw value starts again with its process."""
    for text in (*queries(), *rules()):
        for name in re.findall(r"ddiloco_\w+_total", text):
            assert re.search(rf"rate\(\s*{name}", text), text


@needs_prometheus
def test_promtool_accepts_the_rules(tmp_path: Path) -> None:
    (tmp_path / "rules.yml").write_text(shipped_file("alerts.yml"))
    assert "9 rules found" in promtool("check", "rules", str(tmp_path / "rules.yml"))


@needs_prometheus
def test_promtool_accepts_every_query_of_the_dashboard(tmp_path: Path) -> None:
    told = [
        {"record": f"panel:{number}", "expr": re.sub(r"\$__\w+", "1m", text)}
        for number, text in enumerate(queries())
    ]
    (tmp_path / "panels.yml").write_text(json.dumps({"groups": [{"name": "all", "rules": told}]}))
    promtool("check", "rules", str(tmp_path / "panels.yml"))
