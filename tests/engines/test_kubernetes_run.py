"""The processes of rendered manifests, started locally, from a run's start beyond its end."""

from __future__ import annotations

import signal
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest

import encrypted
from decoupled_diloco.launch.certificates import CertificateFolder
from engines.manifests import Cluster, placed, rendered
from process import own_script
from process.process_runs import records, relays_of, scalars, until


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    # Long enough that a restarted pod still trains, although a start takes seconds.
    config = placed(
        run={"max_steps": 400, "evaluator": False, "trackers": ("tensorboard",)},
        sites=[{"name": "site-a", "learners": [1]}],
    )
    cluster = Cluster(rendered(config, tmp_path / "spread.launch"), tmp_path)
    yield cluster
    cluster.kill()


SHARDS = (0, 1)


def phases(cluster: Cluster) -> set[object]:
    return {cluster.healthy(shard).get("phase") for shard in SHARDS}


def logs(cluster: Cluster) -> str:
    found = sorted(cluster.folder.glob("*.log"))
    return "\n".join(f"--- {path.name}\n{path.read_text()[-2000:]}" for path in found)


def merged_from(run: Path, learner: str) -> bool:
    """Whether shard 0 has merged a contribution of this learner."""
    tape = run / "tape" / "shard-0.jsonl"
    folds = [r for r in records(run, "shard-0") if r.type == "Fold"] if tape.exists() else []
    return any(repr(learner) in repr(fold.data) for fold in folds)


def test_the_pods_of_the_manifests_train_a_run_to_its_end(cluster: Cluster) -> None:
    shards = [cluster.shard(0), cluster.shard(1, labelled=False)]
    relay = cluster.relay("site-a")
    learners = [cluster.learner(0), cluster.learner(0, "spread-learners-site-a")]
    own = cluster.folder / "spread-syncer-0-data" / "run"
    until(lambda: relays_of(own, "learner-1") == ["site-a"], "it takes part", 120)
    until(lambda: merged_from(own, "learner-1"), "its contribution is merged", 120)

    relay.kill()
    until(lambda: relays_of(own, "learner-1")[-1] == "", "it dials the shards")
    relay = cluster.relay("site-a")  # like the Deployment
    learners[1].kill()
    learners[1].wait()
    # like the Job: a new pod with empty folders
    learners[1] = cluster.learner(0, "spread-learners-site-a")

    for learner in learners:
        assert learner.wait(240) == 0, logs(cluster)

    until(lambda: phases(cluster) == {"finished"}, "both shards report the end of the run")
    for shard in SHARDS:
        log = cluster.folder / f"spread-syncer-{shard}.log"
        until(lambda log=log: "lingers until SIGTERM" in log.read_text(), "it lingers")
        run = cluster.folder / f"spread-syncer-{shard}-data" / "run"
        assert (run / "checkpoints" / f"shard-{shard}.safetensors").exists()
    logged = scalars(own / "tensorboard")
    assert logged["diloco/run_step"][-1][1] >= 400
    assert {"learner-0/loss", "learner-1/loss"} <= logged.keys()
    assert any("learner-1" in str(record.data) for record in records(own, "coordinator"))

    shards[1].kill()  # its node is lost; the StatefulSet restarts it on its volume
    shards[1].wait()
    shards[1] = cluster.shard(1)
    until(lambda: phases(cluster) == {"finished"}, "it finds that the run is over")
    late = cluster.learner(0, "spread-learners-site-a")  # a pod that was lost at the very end
    assert late.wait(240) == 0, logs(cluster)

    assert relays_of(own, "learner-1")[-1] == "site-a", "it has returned"
    for shard in (*shards, relay):
        assert shard.poll() is None, "a shard does not end by itself, because it would be restarted"
        shard.send_signal(signal.SIGTERM)
    assert [shard.wait(240) for shard in shards] == [0, 0], logs(cluster)
    # The signal may come while it exits by itself, because the shards have ended.
    assert relay.wait(240) in (0, 130, -signal.SIGTERM), logs(cluster)


@pytest.mark.long
def test_the_pods_run_a_users_program(tmp_path: Path) -> None:
    settings = ["run.name='spread'", "launch.backend='kubernetes'", "run.max_steps=300"]
    config = own_script.config_of("train", tmp_path / "own", *settings)
    cluster = Cluster(rendered(config, tmp_path / "spread.launch"), tmp_path)
    try:
        shard = cluster.shard(0)
        learners = [cluster.learner(0), cluster.learner(1)]
        until(lambda: cluster.healthy(0).get("clock", 0) > 5, "the run makes progress", 120)
        learners[1].kill()
        learners[1].wait()
        learners[1] = cluster.learner(1)  # like the Job
        assert [learner.wait(240) for learner in learners] == [0, 0], logs(cluster)
        until(lambda: cluster.healthy(0).get("phase") == "finished", "the shard reports the end")
        assert "the run's final weights" in logs(cluster), "the last line of the program"
        shard.send_signal(signal.SIGTERM)
        assert shard.wait(240) == 0, logs(cluster)
    finally:
        cluster.kill()


@pytest.mark.long
def test_certificates_are_used_in_the_cluster_and_renewed_in_running_pods(tmp_path: Path) -> None:
    """Mutual TLS from the run's Secrets; one learner is a new pod after the renewal."""
    tls = encrypted.made(tmp_path / "tls", host="*.spread-syncer.default.svc")
    CertificateFolder(tls).add(["site-a"], 30, ["*.spread-relays.default.svc"], ["learner-1"])
    config = placed(
        run={"max_steps": 400, "evaluator": True, "evaluate_interval_seconds": 1.0},
        tls=encrypted.tables(tls),
        sites=[{"name": "site-a", "learners": [1]}],
    )
    cluster = Cluster(rendered(config, tmp_path / "spread.launch"), tmp_path)
    try:
        shards = [cluster.shard(shard) for shard in SHARDS]
        cluster.relay("site-a")
        learners = [cluster.learner(0), cluster.learner(0, "spread-learners-site-a")]
        evaluator = cluster.evaluator()
        until(lambda: cluster.healthy(0).get("clock", 0) > 5, "the run makes progress", 120)
        first = [certificate_of(cluster, shard, tls) for shard in SHARDS]
        assert listed(tmp_path, "learners-0") >= {"learner-0.key", "learner-1.key", "ca.crt"}
        assert listed(tmp_path, "relay-site-a") == {
            *("site-a.pem", "site-a.key", "ca.crt", "client-ca.crt")
        }
        own = tmp_path / "spread-syncer-0-data" / "run"
        until(lambda: relays_of(own, "learner-1")[-1:] == ["site-a"], "the relay represents it")
        assert listed(tmp_path, "evaluator") == {"evaluator.pem", "evaluator.key", "ca.crt"}

        CertificateFolder(tls).renew([], 60)
        cluster.renew(rendered(config, tmp_path / "spread.launch"))
        new = [certificate_of(cluster, shard, tls) for shard in SHARDS]
        assert not set(first) & set(new), "no process was restarted"
        learners[1].kill()
        learners[1].wait()
        learners[1] = cluster.learner(0, "spread-learners-site-a")
        for process in (*learners, evaluator):
            assert process.wait(240) == 0, logs(cluster)
        until(lambda: phases(cluster) == {"finished"}, "both shards report the end of the run")
        for shard in shards:
            shard.send_signal(signal.SIGTERM)
        assert [shard.wait(240) for shard in shards] == [0, 0], logs(cluster)
    finally:
        cluster.kill()


def certificate_of(cluster: Cluster, shard: int, tls: Path) -> bytes | None:
    """Return the certificate that a shard presents to a client that verifies its cluster name."""
    name = f"spread-syncer-{shard}.spread-syncer.default.svc"
    context = ssl.create_default_context(cafile=tls / "authority.pem")
    place = ("127.0.0.1", cluster.ports[shard])
    with (
        socket.create_connection(place, timeout=10) as plain,
        context.wrap_socket(plain, server_hostname=name) as connection,
    ):
        return connection.getpeercert(binary_form=True)


def listed(folder: Path, pod: str) -> set[str]:
    """Return the names of a pod's certificate files."""
    (mounted, *_) = folder.glob(f"spread-{pod}.*/tls")
    return {path.name for path in mounted.iterdir() if not path.name.startswith("..")}
