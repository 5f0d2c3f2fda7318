"""The Kubernetes objects of a run, as plain dicts: what `kubectl apply` gets.

```
Service, StatefulSet, PodDisruptionBudget, NetworkPolicy   RUN-syncer: the shards
Job (Indexed)                                              RUN-learners: learners of one host
JobSet, or TrainingRuntime and TrainJob                    RUN-learner-N: one of several hosts
Job                                                        RUN-evaluator
```

The Helm chart in `deploy/helm` makes the same objects; a test compares them.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from decoupled_diloco.config import RunConfig
from decoupled_diloco.config.where import RoleResources
from decoupled_diloco.engines import kubernetes_tls
from decoupled_diloco.errors import ConfigError
from decoupled_diloco.units import MIB

Manifest = dict[str, Any]

INSTANCE = "app.kubernetes.io/instance"
PORT = 7070
MEETING_PORT = 29_500
"""Where the ranks of a learner on several hosts meet."""

SETTINGS_FOLDER = "/etc/decoupled-diloco/settings"
SECRET_FOLDER = "/etc/decoupled-diloco/secret"
DATA_FOLDER = "/var/lib/decoupled-diloco"
RUN_FOLDER = f"{DATA_FOLDER}/run"
"""Not the volume's own root: a new one may have a lost+found in it."""

USER = 10_001
SHARD_GRACE_SECONDS = 60

FAILURES_MAX = 50
"""Times that one learner may fail; lost nodes, and being told to go, do not count."""

RESTARTS_MAX = 1000
"""Times that a learner of several hosts begins again: torchrun's exit code tells no reason."""

NAME_MAX = 40
_NAME = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")
_SHARD = "${SHARD:-${HOSTNAME##*-}}"
"""By the pod's label, which Kubernetes before 1.28 does not set, or else by the pod's name."""


def require_placeable(config: RunConfig) -> None:
    """Refuses what no cluster could give.

    Raises:
        ConfigError: with what to change.
    """
    name, settings, learner = config.run.name, config.where.kubernetes, config.where.learner
    if not _NAME.fullmatch(name) or len(name) > NAME_MAX:
        raise ConfigError(
            f"name={name!r} in [run] is no name of Kubernetes objects: use a-z, 0-9 and '-', at "
            f"most {NAME_MAX}, a letter first"
        )
    if config.syncer.standbys or config.syncer.principals_file is not None:
        key = "standbys" if config.syncer.standbys else "principals_file"
        raise ConfigError(
            f"{key} in [syncer] does not go with Kubernetes yet, which starts a shard again by "
            f"itself, and gives all pods one secret: leave {key} out"
        )
    if learner.hosts > 1 and settings.learners == "job":
        raise ConfigError(
            f'hosts={learner.hosts} in [where.learner] does not go with learners="job", whose '
            'learners are one pod each: write learners = "jobset" or "trainjob" in '
            "[where.kubernetes], or hosts = 1"
        )
    if learner.gpus % learner.hosts:
        raise ConfigError(
            f"gpus={learner.gpus} in [where.learner] cannot be spread evenly over "
            f"hosts={learner.hosts}: choose a multiple"
        )


def labels_of(config: RunConfig, role: str = "") -> dict[str, str]:
    """What all objects of a run have, and those of one role."""
    labels = {"app.kubernetes.io/name": "decoupled-diloco", INSTANCE: config.run.name}
    return {**labels, "app.kubernetes.io/component": role} if role else labels


def addresses_of(config: RunConfig) -> tuple[str, ...]:
    """Where the pods find the shards."""
    name, namespace = f"{config.run.name}-syncer", config.where.kubernetes.namespace
    scheme = "https" if config.tls.serves else "http"
    inside = [
        f"{scheme}://{name}-{shard}.{name}.{namespace}.svc:{port_of(config)}"
        for shard in range(config.syncer.shards)
    ]
    return config.syncer.addresses or tuple(inside)


def port_of(config: RunConfig) -> int:
    """The port of every shard; each has an address of its own."""
    return config.syncer.port or PORT


def syncer_objects(config: RunConfig) -> list[Manifest]:
    """The shards, how they are reached, and by whom."""
    name, labels = f"{config.run.name}-syncer", labels_of(config, "syncer")
    port = {"name": "syncer", "port": port_of(config)}
    service = {
        "clusterIP": "None",
        # Shards and learners look for one another before any of them is ready.
        "publishNotReadyAddresses": True,
        "selector": labels,
        "ports": [{**port, "targetPort": "syncer"}],
    }
    budget = {"maxUnavailable": 1, "selector": {"matchLabels": labels}}
    peers: list[Manifest] = [{"podSelector": {"matchLabels": labels_of(config)}}]
    peers += [{"ipBlock": {"cidr": each}} for each in config.where.kubernetes.sources]
    policy = {
        "podSelector": {"matchLabels": labels},
        "policyTypes": ["Ingress"],
        "ingress": [{"from": peers, "ports": [{"protocol": "TCP", "port": "syncer"}]}],
    }
    make = _maker(config, "syncer", name)
    return [
        make("v1", "Service", service),
        make("apps/v1", "StatefulSet", _shards(config, name)),
        make("policy/v1", "PodDisruptionBudget", budget),
        make("networking.k8s.io/v1", "NetworkPolicy", policy),
    ]


def _shards(config: RunConfig, name: str) -> Manifest:
    labels, where = labels_of(config, "syncer"), config.where
    claim: Manifest = {
        "accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": f"{where.syncer.folder_gib}Gi"}},
    }
    if where.kubernetes.storage_class:
        claim["storageClassName"] = where.kubernetes.storage_class
    tls = kubernetes_tls.volume(config, "syncer")
    label = "metadata.labels['apps.kubernetes.io/pod-index']"
    container = {
        **_container(config, "syncer", "syncer", where.syncer, 1),
        # The shell only says which shard it is, and is that process then: SIGTERM reaches it.
        "command": ["/bin/sh", "-c", f"exec {_shard_command(config)}"],
        "ports": [{"name": "syncer", "containerPort": port_of(config)}],
        "startupProbe": _probe(config, period=2, failures=150),
        "readinessProbe": _probe(config, period=5, failures=2),
        "livenessProbe": _probe(config, period=10, failures=6),
    }
    container["env"] = [
        {"name": "SHARD", "valueFrom": {"fieldRef": {"fieldPath": label}}},
        *container["env"],
    ]
    # Keys of where the run is logged, if somebody has made such a secret.
    container["envFrom"] = [
        {"secretRef": {"name": f"{config.run.name}-environment", "optional": True}}
    ]
    return {
        "serviceName": name,
        "replicas": config.syncer.shards,
        "podManagementPolicy": "Parallel",
        "selector": {"matchLabels": labels},
        "template": {
            "metadata": {"labels": labels},
            "spec": {
                **_pod(config, container, SHARD_GRACE_SECONDS, tls, "data"),
                "topologySpreadConstraints": [
                    {
                        "maxSkew": 1,
                        "topologyKey": "kubernetes.io/hostname",
                        "whenUnsatisfiable": "ScheduleAnyway",
                        "labelSelector": {"matchLabels": labels},
                    }
                ],
            },
        },
        "volumeClaimTemplates": [{"metadata": {"name": "data", "labels": labels}, "spec": claim}],
    }


def _shard_command(config: RunConfig) -> str:
    settings = {
        "run.folder": RUN_FOLDER,
        "run.learners": config.run.learners,
        "syncer.shards": config.syncer.shards,
        "syncer.host": "0.0.0.0",
        **kubernetes_tls.pod_settings(config, "syncer"),
    }
    told = [
        *("ddiloco", "syncer", f"{SETTINGS_FOLDER}/run.toml"),
        *("--port", str(port_of(config)), "--addresses", ",".join(addresses_of(config))),
        *("--token-file", f"{SECRET_FOLDER}/token", "--linger"),
        *_sets(settings),
    ]
    return f'{shlex.join(told)} --shard "{_SHARD}"'


def _probe(config: RunConfig, *, period: int, failures: int) -> Manifest:
    """The kubelet shows no certificate, and verifies none: `/healthz` answers it all the same."""
    scheme = {"scheme": "HTTPS"} if config.tls.serves else {}
    return {
        "httpGet": {"path": "/healthz", "port": "syncer", **scheme},
        "periodSeconds": period,
        "timeoutSeconds": 5,
        "failureThreshold": failures,
    }


def learner_objects(config: RunConfig) -> list[Manifest]:
    """What trains, and what evaluates."""
    kind, learners = config.where.kubernetes.learners, range(config.run.learners)
    if kind == "job":
        found = [_learners_job(config)]
    elif kind == "jobset":
        found = [_jobset(config, index) for index in learners]
    else:
        found = [each for index in learners for each in _trainjob(config, index)]
    return [*found, _evaluator(config)] if config.run.evaluator else found


def _learners_job(config: RunConfig) -> Manifest:
    spec = {
        "completionMode": "Indexed",
        "completions": config.run.learners,
        "parallelism": config.run.learners,
        "backoffLimitPerIndex": FAILURES_MAX,
        "podFailurePolicy": _failure_policy("FailIndex"),
        "template": _learner_template(
            config, _dialled(config, "learner", "--index", "$(JOB_COMPLETION_INDEX)")
        ),
    }
    return _maker(config, "learner", f"{config.run.name}-learners")("batch/v1", "Job", spec)


def _failure_policy(action: str) -> Manifest:
    """Exit code 2: the settings are wrong. 130: it was told to go, and is to come back."""
    lost = {"type": "DisruptionTarget", "status": "True"}
    return {
        "rules": [
            {"action": action, "onExitCodes": {"operator": "In", "values": [2]}},
            {"action": "Ignore", "onPodConditions": [lost]},
            {"action": "Ignore", "onExitCodes": {"operator": "In", "values": [130]}},
        ]
    }


def _jobset(config: RunConfig, index: int) -> Manifest:
    """A learner whose hosts are started again together."""
    name = f"{config.run.name}-learner-{index}"
    meeting = f"{name}-node-0-0.{name}"
    command = _dialled(config, "learner", "--index", str(index))
    if config.learner.ranks_of(index) > 1:
        command = _over_hosts(config, index, meeting, command)
    spec = _jobset_spec(config, _learner_template(config, command, f"learner-{index}"), {})
    return _maker(config, "learner", name)("jobset.x-k8s.io/v1alpha2", "JobSet", spec)


def _over_hosts(config: RunConfig, index: int, meeting: str, command: Sequence[str]) -> list[str]:
    """Torchrun on each host; it starts nothing again, since that is for all hosts at once."""
    hosts = config.where.learner.hosts
    return [
        *("torchrun", f"--nnodes={hosts}"),
        f"--nproc-per-node={config.learner.ranks_of(index) // hosts}",
        *("--node-rank=$(JOB_COMPLETION_INDEX)", f"--master-addr={meeting}"),
        *(f"--master-port={MEETING_PORT}", "--max-restarts=0"),
        *("-m", "decoupled_diloco.cli", *command[1:]),
    ]


def _jobset_spec(config: RunConfig, template: Manifest, labels: Mapping[str, str]) -> Manifest:
    hosts = config.where.learner.hosts
    job = {
        "completionMode": "Indexed",
        "completions": hosts,
        "parallelism": hosts,
        "backoffLimit": 0,
        "template": template,
    }
    node = {"name": "node", "replicas": 1, "template": {"spec": job}}
    if labels:
        node["template"] = {"metadata": {"labels": dict(labels)}, "spec": job}
    return {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "failurePolicy": {"maxRestarts": RESTARTS_MAX},
        "replicatedJobs": [node],
    }


def _trainjob(config: RunConfig, index: int) -> list[Manifest]:
    """A runtime that says what a host of this learner is, and the job."""
    name, hosts = f"{config.run.name}-learner-{index}", config.where.learner.hosts
    ranks = config.learner.ranks_of(index)
    command = _dialled(config, "learner", "--index", str(index))
    if ranks > 1:  # the operator tells torchrun of the hosts, by its environment
        command = ["torchrun", "-m", "decoupled_diloco.cli", *command[1:]]
    template = _learner_template(config, command, f"learner-{index}", container="node")
    step = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    runtime = {
        "mlPolicy": {"numNodes": hosts, "torch": {}},
        "template": {"spec": _jobset_spec(config, template, step)},
    }
    job = {
        "runtimeRef": {
            "apiGroup": "trainer.kubeflow.org",
            "kind": "TrainingRuntime",
            "name": name,
        },
        "trainer": {"numNodes": hosts, "numProcPerNode": ranks // hosts},
    }
    make = _maker(config, "learner", name)
    version = "trainer.kubeflow.org/v1alpha1"
    return [make(version, "TrainingRuntime", runtime), make(version, "TrainJob", job)]


def _evaluator(config: RunConfig) -> Manifest:
    container = {
        **_container(config, "evaluator", "evaluator", config.where.syncer, 1),
        "command": _dialled(config, "evaluator"),
    }
    tls = kubernetes_tls.volume(config, "evaluator", "evaluator")
    spec = {
        "completions": 1,
        "backoffLimit": FAILURES_MAX,
        "podFailurePolicy": _failure_policy("FailJob"),
        "template": {
            "metadata": {"labels": labels_of(config, "evaluator")},
            "spec": {**_pod(config, container, 30, tls), "restartPolicy": "Never"},
        },
    }
    return _maker(config, "evaluator", f"{config.run.name}-evaluator")("batch/v1", "Job", spec)


def _dialled(config: RunConfig, role: str, *options: str) -> list[str]:
    return [
        *("ddiloco", role, f"{SETTINGS_FOLDER}/run.toml", *options),
        *("--syncer", ",".join(addresses_of(config)), "--token-file", f"{SECRET_FOLDER}/token"),
        *_sets({"run.folder": RUN_FOLDER, "run.learners": config.run.learners}),
        *_sets(kubernetes_tls.pod_settings(config, role)),
    ]


def _sets(settings: Mapping[str, object]) -> list[str]:
    return [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]


def _learner_template(
    config: RunConfig, command: Sequence[str], alone: str = "", container: str = "learner"
) -> Manifest:
    """The pods of all learners, or of the one that they are alone of."""
    settings, hosts = config.where.kubernetes, config.where.learner.hosts
    gets = config.where.learner
    each = _container(config, "learner", container, gets, hosts, gets.gpus)
    each["command"] = list(command)
    each["volumeMounts"] = [*each["volumeMounts"], {"name": "shm", "mountPath": "/dev/shm"}]
    grace = int(config.learner.leave_seconds_max)
    tls = kubernetes_tls.volume(config, "learner", alone)
    pod = {**_pod(config, each, grace, tls), "restartPolicy": "Never"}
    # Ranks of one host speak to one another there.
    pod["volumes"] = [*pod["volumes"], {"name": "shm", "emptyDir": {"medium": "Memory"}}]
    if settings.learner_nodes:
        pod["nodeSelector"] = dict(settings.learner_nodes)
    if settings.tolerated:
        pod["tolerations"] = [_toleration(taint) for taint in settings.tolerated]
    return {"metadata": {"labels": labels_of(config, "learner")}, "spec": pod}


def _toleration(taint: str) -> Manifest:
    key, equals, value = taint.partition("=")
    if equals:
        return {"key": key, "operator": "Equal", "value": value}
    return {"key": key, "operator": "Exists"}


def _container(
    config: RunConfig, role: str, name: str, gets: RoleResources, hosts: int, gpus: int = 0
) -> Manifest:
    requests: Manifest = {"cpu": str(max(1, gets.cpus // hosts))}
    limits: Manifest = {}
    if gets.memory_bytes:
        requests["memory"] = limits["memory"] = f"{gets.memory_bytes // hosts // MIB}Mi"
    if gpus:
        limits["nvidia.com/gpu"] = str(gpus // hosts)
    mounts = [("settings", SETTINGS_FOLDER), ("secret", SECRET_FOLDER), ("data", DATA_FOLDER)]
    mounts.append(("tmp", "/tmp"))
    if kubernetes_tls.pod_settings(config, role):
        mounts.append(("tls", kubernetes_tls.MOUNTED))
    return {
        "name": name,
        "image": config.where.kubernetes.image,
        # The root file system is read-only: caches of libraries go to a folder of the pod.
        "env": [{"name": "HOME", "value": "/tmp"}],
        "resources": {"requests": requests, **({"limits": limits} if limits else {})},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [{"name": name, "mountPath": path} for name, path in mounts],
    }


def _pod(
    config: RunConfig, container: Manifest, grace: int, tls: list[Manifest], claimed: str = ""
) -> Manifest:
    """A pod of one container; ``claimed``: the volume that a claim gives it."""
    name = config.run.name
    volumes: list[Manifest] = [
        {"name": "settings", "configMap": {"name": f"{name}-settings"}},
        {"name": "secret", "secret": {"secretName": f"{name}-secret", "defaultMode": 0o440}},
        *({"name": each, "emptyDir": {}} for each in ("data", "tmp") if each != claimed),
        *tls,
    ]
    return {
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": grace,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": volumes,
    }


def _maker(config: RunConfig, role: str, name: str) -> Callable[[str, str, Manifest], Manifest]:
    """What makes objects of this name."""

    def make(version: str, kind: str, spec: Manifest) -> Manifest:
        meta = {
            "name": name,
            "namespace": config.where.kubernetes.namespace,
            "labels": labels_of(config, role),
        }
        return {"apiVersion": version, "kind": kind, "metadata": meta, "spec": spec}

    return make
