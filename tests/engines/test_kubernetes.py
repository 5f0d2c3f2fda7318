"""The manifests of a run: by the schemas of Kubernetes, and the same as the Helm chart's."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from kubeflow_trainer_api import models

import encrypted
from decoupled_diloco.config import RunConfig
from decoupled_diloco.engines import kubernetes_tls
from decoupled_diloco.engines.kubernetes import Kubernetes
from decoupled_diloco.engines.launch import write_launch
from decoupled_diloco.errors import ConfigError
from engines.manifests import (
    TOKEN,
    Manifest,
    certificates,
    named,
    output_of,
    placed,
    pod_of,
    rendered,
    tool,
)

CHART = Path(__file__).parents[2] / "deploy" / "helm" / "decoupled-diloco"
VERSIONS = ("1.31", "1.34", "1.37")
OPERATORS = {
    "JobSet": models.JobsetV1alpha2JobSet,
    "TrainJob": models.TrainerV1alpha1TrainJob,
    "TrainingRuntime": models.TrainerV1alpha1TrainingRuntime,
}

GPUS = {"learner": {"gpus": 4, "cpus": 8, "memory": "64GiB"}, "syncer": {"memory": "4GiB"}}
SEVERAL = {"learner": {"gpus": 4, "cpus": 8, "memory": "64GiB", "hosts": 2}}
MUTUAL = encrypted.tables(certificates())
ENCRYPTED = {key: MUTUAL[key] for key in ("certificate", "key", "authority")}
RUNS: dict[str, RunConfig] = {
    "plain": placed(),
    "everything": placed(
        where=GPUS,
        run={"evaluator": False},
        syncer={"port": 8000, "addresses": ["http://a.example:8000", "http://b.example:8000"]},
        learner={"hand_in_seconds": 45.0},
        kubernetes={
            "image": "registry.example/diloco:1",
            "storage_class": "ssd",
            "learner_nodes": {"cloud.google.com/gke-spot": "true"},
            "tolerated": ["nvidia.com/gpu", "spot=true"],
            "sources": ["203.0.113.0/24"],
        },
    ),
    **{
        kind: placed(
            where=SEVERAL,
            kubernetes={"learners": kind},
            learner={"ranks": 4},
            data={"leases": False},
        )
        for kind in ("jobset", "trainjob")
    },
    "jobset of one rank": placed(kubernetes={"learners": "jobset"}),
    "encrypted": placed(tls=ENCRYPTED),
    **{
        f"certificates in a {kind}": placed(tls=MUTUAL, kubernetes={"learners": kind})
        for kind in ("job", "jobset", "trainjob")
    },
}
EACH = pytest.mark.parametrize("config", RUNS.values(), ids=RUNS.keys())


@EACH
def test_the_objects_fit_the_schemas(config: RunConfig, tmp_path: Path) -> None:
    for manifest in rendered(config, tmp_path / "launch"):
        model = OPERATORS.get(manifest["kind"])
        if model is None:
            for version in VERSIONS:
                kubernetes_validate.validate(manifest, version, strict=True)
        else:
            assert not lost(manifest, model.from_dict(manifest).to_dict())


def lost(told: Any, known: Any, path: str = "") -> list[str]:
    """What a model does not know of: it drops it without a word."""
    if isinstance(told, dict):
        return [
            each
            for key, value in told.items()
            for each in (
                lost(value, known[key], f"{path}/{key}") if key in known else [f"{path}/{key}"]
            )
        ]
    if isinstance(told, list):
        pairs = enumerate(zip(told, known, strict=True))
        return [each for i, (a, b) in pairs for each in lost(a, b, f"{path}/{i}")]
    return []


def test_what_a_model_drops_is_found() -> None:
    manifest = {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "spec": {"netwrok": {}}}
    assert lost(manifest, models.JobsetV1alpha2JobSet.from_dict(manifest).to_dict()) == [
        "/spec/netwrok"
    ]


def values_of(config: RunConfig) -> Manifest:
    """The chart's values that mean the same."""
    where, learner = config.where, config.where.learner
    settings = where.kubernetes

    def memory(gets: Any, hosts: int = 1) -> str:
        return f"{gets.memory_bytes // hosts // 2**20}Mi" if gets.memory_bytes else ""

    return {
        "image": settings.image,
        "tls": {
            "secret": f"{config.run.name}-tls" if config.tls.serves else "",
            "clients": f"{config.run.name}-clients" if config.tls.clients else "",
        },
        "port": config.syncer.port,
        "addresses": list(config.syncer.addresses),
        "sources": list(settings.sources),
        "evaluator": config.run.evaluator,
        "syncer": {
            "shards": config.syncer.shards,
            "cpus": where.syncer.cpus,
            "memory": memory(where.syncer),
            "folderGib": where.syncer.folder_gib,
            "storageClass": settings.storage_class,
        },
        "learner": {
            "count": config.run.learners,
            "kind": settings.learners,
            "hosts": learner.hosts,
            "ranks": config.learner.ranks_of(0),
            "cpus": learner.cpus // learner.hosts,
            "memory": memory(learner, learner.hosts),
            "gpus": learner.gpus // learner.hosts,
            "handInSeconds": config.learner.hand_in_seconds,
            "nodes": dict(settings.learner_nodes),
            "tolerated": list(settings.tolerated),
        },
    }


def by_name(manifests: list[Manifest]) -> dict[tuple[str, str], Manifest]:
    return {(m["kind"], m["metadata"]["name"]): m for m in manifests if m}


@EACH
def test_the_chart_makes_the_same_objects(config: RunConfig, tmp_path: Path) -> None:
    folder, helm, values = tmp_path / "launch", tool("helm"), tmp_path / "values.json"
    ours = by_name(rendered(config, folder))
    values.write_text(json.dumps(values_of(config)))
    given = ("-f", str(values), "--namespace", "default")
    given += ("--set-file", f"settings={folder}/run.toml,token={folder}/token")
    text = output_of(helm, "template", config.run.name, str(CHART), *given)
    theirs = by_name(list(yaml.safe_load_all(text)))
    keys = {("Secret", f"{config.run.name}-{each}") for each in ("tls", "clients")}
    assert theirs.keys() == ours.keys() - keys, "a chart has no private keys"
    for name, manifest in theirs.items():
        assert ours[name] == manifest, name
    assert "0 chart(s) failed" in output_of(helm, "lint", str(CHART), "--strict", *given)


def test_the_secret_is_in_no_manifest_and_no_command(tmp_path: Path) -> None:
    folder = tmp_path / "launch"
    manifests = rendered(placed(), folder)
    secret = named(manifests, "Secret", "spread-secret")
    for manifest in manifests:
        text = json.dumps(manifest)
        assert TOKEN not in text
        assert manifest is secret or secret["data"]["token"] not in text
    for path in folder.glob("*.yaml"):
        assert TOKEN not in path.read_text()


def test_only_pods_of_the_run_and_told_networks_reach_the_shards(tmp_path: Path) -> None:
    manifests = rendered(RUNS["everything"], tmp_path / "launch")
    (rule,) = named(manifests, "NetworkPolicy", "spread-syncer")["spec"]["ingress"]
    pods, network = rule["from"]
    assert network == {"ipBlock": {"cidr": "203.0.113.0/24"}}
    chosen = pods["podSelector"]["matchLabels"].items()
    template = named(manifests, "Job", "spread-learners")["spec"]["template"]
    assert chosen <= template["metadata"]["labels"].items()
    assert chosen >= {("app.kubernetes.io/instance", "spread")}


@pytest.mark.parametrize("name", ["plain", "everything"])
def test_a_learner_has_the_time_to_hand_in(name: str, tmp_path: Path) -> None:
    config = RUNS[name]
    pod = pod_of(named(rendered(config, tmp_path / "launch"), "Job", "spread-learners"))
    assert pod["terminationGracePeriodSeconds"] >= config.learner.hand_in_seconds + 10


def test_every_process_is_confined(tmp_path: Path) -> None:
    manifests = rendered(placed(), tmp_path / "launch")
    pods = [pod_of(m) for m in manifests if "template" in m.get("spec", {})]
    assert len(pods) == 3
    for pod in pods:
        assert pod["securityContext"]["runAsNonRoot"] is True
        (container,) = pod["containers"]
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }


MISTAKES = {
    "hosts": (
        {"where": SEVERAL, "learner": {"ranks": 2}, "data": {"leases": False}},
        'write learners = "jobset" or "trainjob"',
    ),
    "uneven": (
        {
            "where": {"learner": {"hosts": 2, "gpus": 3}},
            "learner": {"ranks": 2},
            "data": {"leases": False},
            "kubernetes": {"learners": "jobset"},
        },
        "gpus=3 in [where.learner] cannot be spread evenly over hosts=2",
    ),
    "name": ({"run": {"name": "Big_run"}}, "name='Big_run' in [run] is no name of Kubernetes"),
    "standbys": ({"syncer": {"standbys": 1}}, "leave standbys out"),
    "principals": ({"syncer": {"principals_file": "p"}}, "leave principals_file out"),
    "token": ({"syncer": {"token_file": "elsewhere"}}, "leave token_file out"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_no_cluster_gives_is_refused(mistake: str, tmp_path: Path) -> None:
    tables, sentence = MISTAKES[mistake]
    with pytest.raises(ConfigError) as told:
        Kubernetes().files(placed(**tables), tmp_path)
    assert sentence in str(told.value)


TLS_MISTAKES = {
    "no authority": ({"authority": None}, "give authority, too"),
    "no clients": ({"clients": None}, "set clients to the folder"),
    "another host": ({}, "renew FOLDER syncer --name '*.spread-syncer.default.svc'"),
    "an address": ({}, "renew FOLDER syncer --name 10.0.0.1"),
    "too large": ({}, "would have"),
}


@pytest.mark.parametrize("mistake", TLS_MISTAKES)
def test_certificates_that_no_pod_could_use_are_refused(
    mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes, sentence = TLS_MISTAKES[mistake]
    tls, syncer = encrypted.tables(certificates()), {}
    if mistake == "another host":
        tls = encrypted.tables(encrypted.folder())
    if mistake == "an address":
        syncer = {"addresses": ["https://10.0.0.1:7070", "https://127.0.0.1:7071"]}
    if mistake == "too large":
        monkeypatch.setattr(kubernetes_tls, "SECRET_BYTES_MAX", 2_000)
    config = placed(tls={k: v for k, v in (tls | changes).items() if v}, syncer=syncer)
    with pytest.raises(ConfigError) as told:
        Kubernetes().files(config, tmp_path)
    assert sentence in str(told.value)


def test_a_learner_alone_gets_its_own_key_and_no_learner_gets_the_shards(tmp_path: Path) -> None:
    for kind, keys in (("job", None), ("jobset", ["learner-0.pem", "learner-0.key"])):
        config = placed(tls=MUTUAL, kubernetes={"learners": kind})
        manifests = rendered(config, tmp_path / kind)
        name = "spread-learners" if kind == "job" else "spread-learner-0"
        found = json.dumps(next(m for m in manifests if m["metadata"]["name"] == name))
        (volume,) = re.findall(r'"projected": (\{.*?\]\})', found)
        authority, own = json.loads(volume)["sources"]
        assert authority["secret"]["items"] == [{"key": "ca.crt", "path": "ca.crt"}]
        items = own["secret"].get("items")
        assert (items and [item["key"] for item in items]) == keys


def test_private_keys_are_in_no_manifest_and_are_readable_by_the_user_alone(tmp_path: Path) -> None:
    config = placed(run={"folder": tmp_path / "spread"}, tls=MUTUAL)
    folder = write_launch(config).folder
    keys = sorted(path.name for path in (folder / "tls").glob("*.key"))
    assert keys == ["evaluator.key", "learner-0.key", "learner-1.key", "syncer.key"]
    for path in (folder / "tls").iterdir():
        assert path.stat().st_mode & 0o077 == 0
    for path in folder.glob("*.yaml"):
        assert "PRIVATE KEY" not in path.read_text()


def test_without_kubectl_the_way_out_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match="kubectl is not here: install it"):
        Kubernetes().require(placed())


def test_a_cluster_that_is_not_there_is_told_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kubectl = Path(tool("kubectl"))
    nowhere = {"name": "nowhere", "cluster": {"server": "http://127.0.0.1:1"}}
    context = {"name": "nowhere", "context": {"cluster": "nowhere", "user": ""}}
    config = {"clusters": [nowhere], "contexts": [context], "current-context": "nowhere"}
    (tmp_path / "config").write_text(json.dumps(config))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    monkeypatch.setenv("PATH", f"{kubectl.parent}:/bin:/usr/bin")
    with pytest.raises(ConfigError, match="use-context") as told:
        Kubernetes().require(placed())
    assert "\n" not in str(told.value)
