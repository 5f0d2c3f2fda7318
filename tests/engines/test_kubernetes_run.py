"""The processes of rendered manifests, started as they say: a run to its end, and beyond."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from engines.manifests import Cluster, placed, rendered
from process.runs import health, records, until
from process.test_log import scalars

pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    config = placed(run={"budget_steps": 120, "evaluator": False, "log": ("tensorboard",)})
    cluster = Cluster(rendered(config, tmp_path / "spread.launch"), tmp_path)
    yield cluster
    cluster.kill()


def logs(cluster: Cluster) -> str:
    found = sorted(cluster.folder.glob("*.log"))
    return "\n".join(f"--- {path.name}\n{path.read_text()[-2000:]}" for path in found)


def test_the_pods_of_the_manifests_train_a_run_to_its_end(cluster: Cluster) -> None:
    shards = [cluster.shard(0), cluster.shard(1, labelled=False)]
    learners = [cluster.learner(0), cluster.learner(1)]
    until(lambda: health(cluster.address(0)).get("clock", 0) > 5, "the run is under way", 60)

    learners[1].kill()
    learners[1].wait()
    learners[1] = cluster.learner(1)  # as the Job does: a new pod, whose folders are empty

    for learner in learners:
        assert learner.wait(120) == 0, logs(cluster)

    def phases() -> set[object]:
        return {health(cluster.address(shard)).get("phase") for shard in (0, 1)}

    until(lambda: phases() == {"finished"}, "both shards say that it is over")
    for shard in (0, 1):
        log = cluster.folder / f"spread-syncer-{shard}.log"
        until(lambda log=log: "lingers until SIGTERM" in log.read_text(), "it lingers")
        run = cluster.folder / f"spread-syncer-{shard}-data" / "run"
        assert (run / "checkpoints" / f"shard-{shard}.safetensors").exists()
    logged = scalars(cluster.folder / "spread-syncer-0-data/run/tensorboard")
    assert logged["diloco/run_step"][-1][1] >= 120
    assert {"learner-0/loss", "learner-1/loss"} <= logged.keys()
    joined = records(cluster.folder / "spread-syncer-0-data" / "run", "coordinator")
    assert any("learner-1" in str(record.data) for record in joined)

    shards[1].kill()  # its node is lost; the StatefulSet starts it again, on its volume
    shards[1].wait()
    shards[1] = cluster.shard(1)
    until(lambda: phases() == {"finished"}, "it finds that the run is over")
    late = cluster.learner(1)  # a pod that had been lost at the very end
    assert late.wait(60) == 0, logs(cluster)

    for shard in shards:
        assert shard.poll() is None, "nothing ends that would be started again"
        shard.send_signal(signal.SIGTERM)
    assert [shard.wait(30) for shard in shards] == [0, 0], logs(cluster)
