"""Each alert rule, by Prometheus' own unit tests."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from decoupled_diloco.monitor.scraping import shipped_file
from unit.monitor.promtool import needs_prometheus, promtool

CASES = Path(__file__).parent / "alerts_test.yml"


@needs_prometheus
def test_each_alert_fires_when_it_should(tmp_path: Path) -> None:
    (tmp_path / "alerts.yml").write_text(shipped_file("alerts.yml"))
    shutil.copy(CASES, tmp_path)
    assert "SUCCESS" in promtool("test", "rules", str(tmp_path / CASES.name))


def test_each_alert_has_a_case_in_which_it_fires_and_one_in_which_it_does_not() -> None:
    alerts = set(re.findall(r"alert: (\w+)", shipped_file("alerts.yml")))
    text = CASES.read_text()
    fires = set(re.findall(r"alertname: (\w+)\n +exp_alerts:\n", text))
    rests = set(re.findall(r"alertname: (\w+), exp_alerts: \[\]", text))
    assert fires == rests == alerts
