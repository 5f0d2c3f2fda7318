"""The manifests of a run match the Kubernetes schemas."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
from kubeflow_trainer_api import models

import encrypted
from decoupled_diloco.config import RunConfig
from decoupled_diloco.errors import ConfigError
from decoupled_diloco.launch.certificates import CertificateFolder
from decoupled_diloco.launch.launch_folder import write_launch
from decoupled_diloco_engines import kubernetes_tls
from decoupled_diloco_engines.kubernetes import Kubernetes
from engines.manifests import (
    TOKEN,
    certificates,
    named,
    placed,
    pod_of,
    rendered,
    tool,
)

VERSIONS = ("1.31", "1.34", "1.37")
OPERATORS = {
    "JobSet": models.JobsetV1alpha2JobSet,
    "TrainJob": models.TrainerV1alpha1TrainJob,
    "TrainingRuntime": models.TrainerV1alpha1TrainingRuntime,
}

GPUS = {"learner": {"gpus": 4, "cpus": 8, "memory": "64GiB"}, "syncer": {"memory": "4GiB"}}
SEVERAL = {"learner": {"gpus": 4, "cpus": 8, "memory": "64GiB", "hosts": 2}}
MUTUAL = encrypted.tables(certificates())
SITES = [
    {"name": "site-a", "learners": [1], "nodes": {"zone": "a"}},
    {"name": "site-b", "learners": [0], "upstream": "site-a", "port": 7080},
]
ENCRYPTED = {key: MUTUAL[key] for key in ("cert", "key", "ca_cert")}
RUNS: dict[str, RunConfig] = {
    "plain": placed(),
    "everything": placed(
        launch=GPUS,
        run={"evaluator": False},
        syncer={"port": 8000, "addresses": ["http://a.example:8000", "http://b.example:8000"]},
        learner={"flush_seconds": 45.0},
        kubernetes={
            "image": "registry.example/diloco:1",
            "storage_class": "ssd",
            "learner_nodes": {"cloud.google.com/gke-spot": "true"},
            "tolerations": ["nvidia.com/gpu", "spot=true"],
            "allowed_networks": ["203.0.113.0/24"],
        },
    ),
    **{
        kind: placed(
            launch=SEVERAL,
            kubernetes={"learners": kind},
            learner={"ranks": 4},
            data={"elastic": False},
        )
        for kind in ("jobset", "trainjob")
    },
    "jobset of one rank": placed(kubernetes={"learners": "jobset"}),
    "sites": placed(sites=SITES, kubernetes={"learner_nodes": {"spot": "true"}}),
    "jobset at sites": placed(sites=SITES, kubernetes={"learners": "jobset"}),
    "encrypted": placed(tls=ENCRYPTED),
    "encrypted sites": placed(tls=MUTUAL, sites=SITES),
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


def lost(given: Any, known: Any, path: str = "") -> list[str]:
    """Return the fields that a model silently drops because it does not know them."""
    if isinstance(given, dict):
        return [
            each
            for key, value in given.items()
            for each in (
                lost(value, known[key], f"{path}/{key}") if key in known else [f"{path}/{key}"]
            )
        ]
    if isinstance(given, list):
        pairs = enumerate(zip(given, known, strict=True))
        return [each for i, (a, b) in pairs for each in lost(a, b, f"{path}/{i}")]
    return []


def test_dropped_fields_are_found() -> None:
    manifest = {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "spec": {"netwrok": {}}}
    assert lost(manifest, models.JobsetV1alpha2JobSet.from_dict(manifest).to_dict()) == [
        "/spec/netwrok"
    ]


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


def test_only_the_runs_pods_and_given_networks_reach_the_shards(tmp_path: Path) -> None:
    manifests = rendered(RUNS["everything"], tmp_path / "launch")
    (rule,) = named(manifests, "NetworkPolicy", "spread-syncer")["spec"]["ingress"]
    pods, network = rule["from"]
    assert network == {"ipBlock": {"cidr": "203.0.113.0/24"}}
    chosen = pods["podSelector"]["matchLabels"].items()
    template = named(manifests, "Job", "spread-learners")["spec"]["template"]
    assert chosen <= template["metadata"]["labels"].items()
    assert chosen >= {("app.kubernetes.io/instance", "spread")}


@pytest.mark.parametrize("name", ["plain", "everything"])
def test_a_learner_has_time_to_flush(name: str, tmp_path: Path) -> None:
    config = RUNS[name]
    pod = pod_of(named(rendered(config, tmp_path / "launch"), "Job", "spread-learners"))
    assert pod["terminationGracePeriodSeconds"] >= config.learner.flush_seconds + 10


def test_every_process_is_confined(tmp_path: Path) -> None:
    manifests = rendered(RUNS["sites"], tmp_path / "launch")
    pods = [pod_of(m) for m in manifests if "template" in m.get("spec", {})]
    assert len(pods) == 6
    for pod in pods:
        assert pod["securityContext"]["runAsNonRoot"] is True
        (container,) = pod["containers"]
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }


def test_a_site_gets_a_relay_on_the_nodes_of_its_learners(tmp_path: Path) -> None:
    manifests = rendered(RUNS["sites"], tmp_path / "launch")
    relay = pod_of(named(manifests, "Deployment", "spread-relay-site-b"))
    learners = pod_of(named(manifests, "Job", "spread-learners-site-a"))
    upstream = pod_of(named(manifests, "Deployment", "spread-relay-site-a"))
    assert upstream["nodeSelector"] == learners["nodeSelector"] == {"spot": "true", "zone": "a"}
    assert relay["nodeSelector"] == {"spot": "true"}
    near, domain = "http://site-a.spread-relays.default.svc:7070,", "spread-relays"
    assert (upstream["hostname"], upstream["subdomain"]) == ("site-a", domain)
    assert near in " ".join(relay["containers"][0]["command"])
    (learner,) = learners["containers"]
    assert near in learner["command"][2]
    assert learner["command"][-2:] == ["learner", "1"], "the number of the first pod's learner"
    (rule,) = named(manifests, "NetworkPolicy", domain)["spec"]["ingress"]
    assert [port["port"] for port in rule["ports"]] == ["relay"]


MISTAKES = {
    "site": (
        {"sites": [{"name": "Site_A", "learners": [0]}]},
        "name='Site_A' in [[sites]] is not a valid name for",
    ),
    "long site": (
        {"run": {"name": "a" * 40}, "sites": [{"name": "b" * 7, "learners": [0]}]},
        "at most 6 characters with this name of the run",
    ),
    "hosts": (
        {"launch": SEVERAL, "learner": {"ranks": 2}, "data": {"elastic": False}},
        'set learners = "jobset" or "trainjob"',
    ),
    "uneven": (
        {
            "launch": {"learner": {"hosts": 2, "gpus": 3}},
            "learner": {"ranks": 2},
            "data": {"elastic": False},
            "kubernetes": {"learners": "jobset"},
        },
        "gpus=3 in [launch.learner] is not a multiple of hosts=2",
    ),
    "name": ({"run": {"name": "Big_run"}}, "name='Big_run' in [run] is not a valid name for"),
    "preemptions": ({"learner": {"max_preemptions": 3}}, "leave max_preemptions out"),
    "failures of job sets": (
        {
            "learner": {"max_failures": 3},
            "launch": {"backend": "kubernetes", "kubernetes": {"learners": "jobset"}},
        },
        "leave max_failures out, or set learners",
    ),
    "standbys": ({"syncer": {"standby": True}}, "leave standby out"),
    "principals": ({"syncer": {"principals_file": "p"}}, "leave principals_file out"),
    "token": ({"syncer": {"token_file": "elsewhere"}}, "leave token_file out"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_settings_that_no_cluster_can_satisfy_are_rejected(mistake: str, tmp_path: Path) -> None:
    tables, sentence = MISTAKES[mistake]
    with pytest.raises(ConfigError) as error:
        Kubernetes().files(placed(**tables), tmp_path)
    assert sentence in str(error.value)


TLS_MISTAKES = {
    "no authority": ({"ca_cert": None}, "set ca_cert, too"),
    "no clients": ({"clients": None}, "set clients to the folder"),
    "another host": ({}, "renew FOLDER syncer --host '*.spread-syncer.default.svc'"),
    "an address": ({}, "renew FOLDER syncer --host 10.0.0.1"),
    "another relay": ({}, "renew FOLDER site-a --host '*.spread-relays.default.svc'"),
    "too large": ({}, "would have"),
}


@pytest.mark.parametrize("mistake", TLS_MISTAKES)
def test_certificates_that_pods_cannot_use_are_rejected(
    mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes, sentence = TLS_MISTAKES[mistake]
    tls, syncer, sites = encrypted.tables(certificates()), {}, []
    if mistake == "another host":
        tls = encrypted.tables(encrypted.folder())
    if mistake == "an address":
        syncer = {"addresses": ["https://10.0.0.1:7070", "https://127.0.0.1:7071"]}
    if mistake == "another relay":
        path = encrypted.made(tmp_path / "tls", host="*.spread-syncer.default.svc")
        CertificateFolder(path).add(["site-a"], 30, [], ["learner-0"])
        tls, sites = encrypted.tables(path), [{"name": "site-a", "learners": [0]}]
    if mistake == "too large":
        monkeypatch.setattr(kubernetes_tls, "SECRET_BYTES_MAX", 2_000)
    tls = {k: v for k, v in (tls | changes).items() if v}
    config = placed(tls=tls, syncer=syncer, sites=sites)
    with pytest.raises(ConfigError) as error:
        Kubernetes().files(config, tmp_path)
    assert sentence in str(error.value)


def test_a_single_learner_gets_only_its_key_and_no_learner_gets_the_shards(tmp_path: Path) -> None:
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


def test_a_relay_gets_its_own_key_or_that_of_the_shards(tmp_path: Path) -> None:
    """With its own, it needs none of the shards. Without one, it must serve with theirs."""
    for name, tls in (("own", MUTUAL), ("shared", ENCRYPTED)):
        manifests = rendered(placed(tls=tls, sites=SITES), tmp_path / name)
        pod = pod_of(named(manifests, "Deployment", "spread-relay-site-a"))
        (volume,) = (each for each in pod["volumes"] if each["name"] == "tls")
        if name == "shared":
            assert volume["secret"]["secretName"] == "spread-tls"
            continue
        sources = [each["secret"] for each in volume["projected"]["sources"]]
        keys = [[item["key"] for item in each["items"]] for each in sources]
        assert keys == [["ca.crt", "client-ca.crt"], ["site-a.pem", "site-a.key"]]


def test_private_keys_are_in_no_manifest_and_readable_only_by_the_user(tmp_path: Path) -> None:
    config = placed(run={"folder": tmp_path / "spread"}, tls=MUTUAL)
    folder = write_launch(config).folder
    keys = sorted(path.name for path in (folder / "tls").glob("*.key"))
    assert keys == ["evaluator.key", "learner-0.key", "learner-1.key", "syncer.key"]
    for path in (folder / "tls").iterdir():
        assert path.stat().st_mode & 0o077 == 0
    for path in folder.glob("*.yaml"):
        assert "PRIVATE KEY" not in path.read_text()


def test_without_kubectl_the_error_has_a_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match="kubectl is not installed: install it"):
        Kubernetes().require(placed())


def test_an_unreachable_cluster_is_reported_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kubectl = Path(tool("kubectl"))
    nowhere = {"name": "nowhere", "cluster": {"server": "http://127.0.0.1:1"}}
    context = {"name": "nowhere", "context": {"cluster": "nowhere", "user": ""}}
    config = {"clusters": [nowhere], "contexts": [context], "current-context": "nowhere"}
    (tmp_path / "config").write_text(json.dumps(config))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    monkeypatch.setenv("PATH", f"{kubectl.parent}:/bin:/usr/bin")
    with pytest.raises(ConfigError, match="use-context") as error:
        Kubernetes().require(placed())
    assert "\n" not in str(error.value)
