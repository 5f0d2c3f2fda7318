"""A real Prometheus watches a real run: it scrapes every process, and an alert fires and clears."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import encrypted
from free_ports import free_ports
from process.process_runs import config_of, local_run, output_of, stopped_at_exit, until
from unit.monitor.promtool import needs_prometheus, promtool


def ask(address: str, path: str, **query: str) -> Any:
    """Return the answer of Prometheus; ``None`` while it does not answer."""
    url = f"{address}/api/v1/{path}?{urllib.parse.urlencode(query)}"
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return json.load(answer)["data"]
    except urllib.error.HTTPError as error:
        error.close()
    except OSError:
        pass
    return None


def value(address: str, query: str) -> dict[str, float]:
    """Return a query's value by run, shard and learner."""
    found = ask(address, "query", query=query) or {"result": []}
    return {
        each["metric"].get("shard", "") + each["metric"].get("learner", ""): float(each["value"][1])
        for each in found["result"]
    }


def firing(address: str) -> dict[str, dict[str, str]]:
    alerts = (ask(address, "alerts") or {"alerts": []})["alerts"]
    found = {a["labels"]["alertname"]: a["labels"] for a in alerts if a["state"] == "firing"}
    found.pop("DilocoGoodputLow", None)  # It is late on a busy machine.
    return found


def neighbours() -> int:
    """Return a free port whose next port is free too."""
    while True:
        (port,) = free_ports(1)
        with contextlib.suppress(OSError, OverflowError):
            socket.create_server(("127.0.0.1", port + 1)).close()
            return port


@contextlib.contextmanager
def prometheus(folder: Path, run: Path) -> Iterator[str]:
    """Run a Prometheus that watches a run with the shipped files and short intervals."""
    config = output_of("metrics", "config", str(run)).replace("15s", "1s")
    rules = re.sub(r"for: \w+", "for: 1s", output_of("metrics", "rules")).replace("> 60", "> 3")
    (folder / "prometheus.yml").write_text(config)
    (folder / "ddiloco-rules.yml").write_text(rules)
    assert "SUCCESS" in promtool("check", "config", str(folder / "prometheus.yml"))
    (port,) = free_ports(1)
    process = subprocess.Popen(
        [
            "prometheus",
            f"--config.file={folder / 'prometheus.yml'}",
            f"--web.listen-address=127.0.0.1:{port}",
            f"--storage.tsdb.path={folder / 'data'}",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    with stopped_at_exit(process):
        yield f"http://127.0.0.1:{port}"


@needs_prometheus
def test_prometheus_watches_a_run_and_alerts_on_a_lost_learner(tmp_path: Path) -> None:
    config = config_of(
        tmp_path / "run",
        run={"max_steps": 1_000_000},
        syncer={"shards": 2},
        learner={"metrics_address": f"127.0.0.1:{neighbours()}"},
    )
    with local_run(config) as run:

        def seen(condition: Callable[[], object]) -> Callable[[], object]:
            def look() -> object:
                run.supervisor.poll()
                return condition()

            return look

        run.start()
        run.wait_for_shards()
        with prometheus(tmp_path, run.path) as there:
            up = {"0": 1.0, "1": 1.0, "learner-0": 1.0, "learner-1": 1.0}
            until(seen(lambda: value(there, "up") == up), "all processes are scraped", 60)
            rate = "rate(ddiloco_shard_tokens_total[10s]) > 0"
            until(seen(lambda: value(there, rate).keys() == {"0", "1"}), "tokens are counted", 60)
            step = "ddiloco_learner_steps_total > 20"
            until(seen(lambda: len(value(there, step)) == 2), "learners step", 60)
            merged = 'ddiloco_shard_rounds_total{verdict="merged"} > 4'
            until(seen(lambda: len(value(there, merged)) == 2), "rounds are merged", 60)
            assert not firing(there)

            run.supervisor.take_down("learner-1")
            until(seen(lambda: "DilocoLearnerSilent" in firing(there)), "the alert fires", 90)
            assert firing(there)["DilocoLearnerSilent"]["learner"] == "learner-1"
            assert firing(there).keys() == {"DilocoLearnerSilent"}
            up = value(there, "up")
            assert (up["learner-0"], up["learner-1"]) == (1.0, 0.0)

            until(seen(lambda: run.supervisor.bring_back("learner-1")), "its process has ended")
            until(seen(lambda: not firing(there)), "the alert is over", 60)


@needs_prometheus
def test_prometheus_alerts_before_certificates_expire(tmp_path: Path) -> None:
    """Mutual TLS without an auth token: Prometheus presents a separate certificate."""
    tls = tmp_path / "tls"
    output_of("certs", "create-ca", str(tls), "--valid-days", "3")
    output_of("certs", "add", str(tls), "learner-0", "learner-1", "prometheus", "--valid-days", "3")
    config = config_of(
        tmp_path / "run",
        run={"max_steps": 1_000_000},
        learner={"metrics_address": f"127.0.0.1:{neighbours()}"},
        tls=encrypted.tables(tls),
    )
    alert = "DilocoCertificateEnds"
    left = "min by (shard, learner) (ddiloco_certificate_expiry_timestamp_seconds) - time()"
    with local_run(config) as run:
        run.start()
        run.wait_for_shards()
        with prometheus(tmp_path, run.path) as there:
            everyone = {"0", "learner-0", "learner-1"}
            until(lambda: value(there, "up == 1").keys() == everyone, "all are scraped", 60)
            until(lambda: alert in firing(there), "the alert fires", 30)
            assert firing(there).keys() == {alert}
            days = {round(seconds / 86_400) for seconds in value(there, left).values()}
            assert days == {3}

            output_of("certs", "renew", str(tls), "--valid-days", "90")
            until(lambda: not firing(there), "the alert is over", 60)
            days = {round(seconds / 86_400) for seconds in value(there, left).values()}
            assert days == {90}


@pytest.mark.smoke
def test_metrics_require_the_auth_token(tmp_path: Path) -> None:
    config = config_of(tmp_path / "run", run={"max_steps": 1_000_000})
    with local_run(config) as run:
        run.start()
        run.wait_for_shards()
        request = urllib.request.Request(f"{run.addresses[0]}/metrics")
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(request, timeout=5)
        assert refused.value.code == 401
        refused.value.close()
        request.add_header("Authorization", f"Bearer {run.secret_file.read_text().strip()}")
        with urllib.request.urlopen(request, timeout=5) as answer:
            assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
            promtool_says(answer.read().decode())


def promtool_says(text: str) -> None:
    """Return the findings of Prometheus's linter, where it is installed."""
    if not needs_prometheus.args[0]:
        promtool("check", "metrics", given=text)
    assert "# HELP ddiloco_shard_clock_steps" in text
