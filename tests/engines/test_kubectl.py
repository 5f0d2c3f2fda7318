"""The Kubernetes engine with a real kubectl and an in-memory API server."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from decoupled_diloco.config import dump_config
from decoupled_diloco.errors import ConfigError
from decoupled_diloco.launch.engine import Job
from decoupled_diloco_engines.kubernetes import Kubernetes
from engines.api_server import JOBSET, KINDS, ApiServer, serving
from engines.manifests import output_of, placed, tool, write

DDILOCO = (sys.executable, "-m", "decoupled_diloco.cli")


def use(address: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Configure kubectl for this server."""
    cluster: Any = {"name": "here", "cluster": {"server": address}}
    context = {"name": "here", "context": {"cluster": "here", "user": ""}}
    config = {"clusters": [cluster], "contexts": [context], "current-context": "here"}
    (folder / "kubeconfig").write_text(json.dumps(config))
    monkeypatch.setenv("KUBECONFIG", str(folder / "kubeconfig"))
    monkeypatch.setenv("PATH", f"{Path(tool('kubectl')).parent}:/bin:/usr/bin")
    monkeypatch.setenv("HOME", str(folder))


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiServer]:
    with serving() as server:
        use(f"http://127.0.0.1:{server.server_port}", tmp_path, monkeypatch)
        yield server


def test_a_run_is_submitted_shown_and_stopped(api: ApiServer, tmp_path: Path) -> None:
    engine, config = Kubernetes(), placed(sites=[{"name": "a", "learners": [0]}])
    engine.require(config)
    jobs = engine.submit(config, write(config, tmp_path / "spread.launch"))
    assert jobs[0] == Job("syncer", "default/statefulset.apps/spread-syncer")
    assert set(jobs[1:]) == {
        Job("relay-a", "default/deployment.apps/spread-relay-a"),
        Job("evaluator", "default/job.batch/spread-evaluator"),
        Job("learners", "default/job.batch/spread-learners"),
        Job("learners-a", "default/job.batch/spread-learners-a"),
    }
    made = {path.rpartition("/")[2] for path in api.objects}
    assert made >= {"spread-settings", "spread-secret", "spread-syncer", "spread-learners"}

    def states() -> dict[str, str]:
        return {state.name: state.state for state in engine.states(jobs)}

    assert states() == {
        "syncer": "0 of 2 ready",
        "relay-a": "0 of 1 ready",
        **dict.fromkeys(("evaluator", "learners", "learners-a"), "0 active, 0 of 1 complete"),
    }
    base = "/apis/batch/v1/namespaces/default/jobs/spread-learners"
    api.objects[base]["status"] = {"conditions": [{"type": "Complete", "status": "True"}]}
    assert states()["learners"] == "Complete"

    engine.stop(jobs)
    assert engine.states(jobs) == []
    assert [path.rpartition("/")[2] for path in api.deleted][3:5] == [
        "spread-relay-a",
        "spread-syncer",
    ], "the learners and the evaluator end first, so that the syncer receives their contributions"
    assert list(api.objects) == ["/api/v1/namespaces/default"]
    engine.stop(jobs)  # deleted objects are no error


def test_a_namespace_that_does_not_exist(api: ApiServer) -> None:
    with pytest.raises(ConfigError, match="create it, or choose another"):
        Kubernetes().require(placed(kubernetes={"namespace": "elsewhere"}))


def test_a_missing_permission_is_reported(api: ApiServer) -> None:
    api.refused.add("jobs")
    with pytest.raises(ConfigError, match=r"creating job\.batch .* is forbidden: .* role 'edit'"):
        Kubernetes().require(placed())


def test_a_missing_operator_is_reported(
    api: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = placed(kubernetes={"learners": "jobset"})
    with pytest.raises(ConfigError, match="install the JobSet operator"):
        Kubernetes().require(config)
    with serving({**KINDS, **JOBSET}) as server:
        use(f"http://127.0.0.1:{server.server_port}", tmp_path, monkeypatch)
        Kubernetes().require(config)
        jobs = Kubernetes().submit(config, write(config, tmp_path / "spread.launch"))
        assert [job.name for job in jobs] == ["syncer", "evaluator", "learner-0", "learner-1"]
        assert [each.state for each in Kubernetes().states(jobs)][2:] == ["Pending", "Pending"]


def test_the_commands_launch_and_stop_a_run(api: ApiServer, tmp_path: Path) -> None:
    file, folder = tmp_path / "spread.toml", tmp_path / "runs" / "spread"
    file.write_text(dump_config(placed(run={"folder": folder})))
    output = output_of(*DDILOCO, "launch", str(file), "--dry-run")
    assert "kind: StatefulSet" in output
    assert api.objects.keys() == {"/api/v1/namespaces/default"}, "nothing is submitted"
    output = output_of(*DDILOCO, "launch", f"{folder}.launch")
    assert "syncer: job default/statefulset.apps/spread-syncer of kubernetes" in output
    assert "kubectl logs -n default -l app.kubernetes.io/instance=spread" in output
    assert "asked 3 jobs to stop" in output_of(*DDILOCO, "stop", str(folder))
    assert api.objects.keys() == {"/api/v1/namespaces/default"}
