"""The Kubernetes objects of a run, as plain dicts for `kubectl apply`.

```
Service, StatefulSet, PodDisruptionBudget, NetworkPolicy   RUN-syncer: the shards
Service, NetworkPolicy                                     RUN-relays: the relays of all sites
Deployment                                                 RUN-relay-SITE: the relay of a site
Job (Indexed)                                              RUN-learners, and RUN-learners-SITE for
                                                           those of a site: single-host learners
JobSet, or TrainingRuntime and TrainJob                    RUN-learner-N: a multi-host learner
Job                                                        RUN-evaluator
```
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from decoupled_diloco.config import RunConfig
from decoupled_diloco.config.launch import RoleResources
from decoupled_diloco.config.run import SiteSettings
from decoupled_diloco.errors import ConfigError
from decoupled_diloco.units import MIB
from decoupled_diloco_engines import kubernetes_tls

Manifest = dict[str, Any]

INSTANCE = "app.kubernetes.io/instance"
SITE = "decoupled-diloco/site"
"""Label of a relay's pod."""

PORT = 7070
MEETING_PORT = 29_500
"""Rendezvous port of the ranks of a multi-host learner."""

SETTINGS_FOLDER = "/etc/decoupled-diloco/settings"
SECRET_FOLDER = "/etc/decoupled-diloco/secret"
DATA_FOLDER = "/var/lib/decoupled-diloco"
RUN_FOLDER = f"{DATA_FOLDER}/run"
"""Run folder. It is not the root of the volume, which may contain a lost+found folder."""

USER = 10_001
SHARD_GRACE_SECONDS = 60

FAILURES_MAX = 50
"""Maximum number of failures per learner, without lost nodes and requested stops (SIGTERM)."""

RESTARTS_MAX = 1000
"""Maximum number of restarts of a multi-host learner; torchrun's exit code has no reason."""

NAME_MAX = 40
NAMES_MAX = 46
"""Maximum length of the names of run and site together. They and an index are a host name."""

_NAME = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")
_SHARD = "${SHARD:-${HOSTNAME##*-}}"
"""The pod-index label if Kubernetes sets it (1.28 and later), otherwise the end of the pod's name.
"""


def require_placeable(config: RunConfig) -> None:
    """Reject settings that no cluster can satisfy.

    Raises:
        ConfigError: A setting cannot be satisfied; the message has the fix.
    """
    name, settings, learner = config.run.name, config.launch.kubernetes, config.launch.learner
    if not _NAME.fullmatch(name) or len(name) > NAME_MAX:
        raise ConfigError(
            f"name={name!r} in [run] is not a valid name for Kubernetes objects: use a-z, 0-9 and "
            f"'-', at most {NAME_MAX} characters, starting with a letter"
        )
    for site in config.sites:
        if not _NAME.fullmatch(site.name) or len(name + site.name) > NAMES_MAX:
            raise ConfigError(
                f"name={site.name!r} in [[sites]] is not a valid name for Kubernetes objects: use "
                f"a-z, 0-9 and '-', at most {NAMES_MAX - len(name)} characters with this name of "
                "the run, starting with a letter"
            )
    if config.syncer.standby or config.syncer.principals_file is not None:
        key = "standby" if config.syncer.standby else "principals_file"
        raise ConfigError(
            f"{key} in [syncer] cannot be combined with Kubernetes, which restarts shards itself "
            f"and gives all pods the same secret: leave {key} out"
        )
    if config.learner.max_preemptions is not None:
        raise ConfigError(
            f"max_preemptions={config.learner.max_preemptions} in [learner] would be ignored, "
            "because Kubernetes replaces preempted pods without a count: leave max_preemptions out"
        )
    if config.learner.max_failures is not None and settings.learners != "job":
        raise ConfigError(
            f"max_failures={config.learner.max_failures} in [learner] cannot be combined with "
            f'learners="{settings.learners}" in [launch.kubernetes], whose count of restarts '
            'includes preemptions: leave max_failures out, or set learners = "job"'
        )
    if learner.hosts > 1 and settings.learners == "job":
        raise ConfigError(
            f'hosts={learner.hosts} in [launch.learner] cannot be combined with learners="job" '
            '(one pod per learner): set learners = "jobset" or "trainjob" in '
            "[launch.kubernetes], or hosts = 1"
        )


def labels_of(config: RunConfig, role: str = "") -> dict[str, str]:
    """Return the labels of all objects of a run, plus the role's label if a role is given."""
    labels = {"app.kubernetes.io/name": "decoupled-diloco", INSTANCE: config.run.name}
    return {**labels, "app.kubernetes.io/component": role} if role else labels


def addresses_of(config: RunConfig) -> tuple[str, ...]:
    """Return the shards' addresses for the pods."""
    name, namespace = f"{config.run.name}-syncer", config.launch.kubernetes.namespace
    inside = [
        f"{config.tls.scheme}://{name}-{shard}.{name}.{namespace}.svc:{port_of(config)}"
        for shard in range(config.syncer.shards)
    ]
    return config.syncer.addresses or tuple(inside)


def relay_address(config: RunConfig, site: SiteSettings) -> str:
    """Return the address of a site's relay for the pods."""
    domain = f"{config.run.name}-relays.{config.launch.kubernetes.namespace}.svc"
    return f"{config.tls.scheme}://{site.name}.{domain}:{site.port or port_of(config)}"


def port_of(config: RunConfig) -> int:
    """Return the port of every shard; each shard has a separate address."""
    return config.syncer.port or PORT


def syncer_objects(config: RunConfig) -> list[Manifest]:
    """Return the shards, their Service, and the rules for access and disruption."""
    name, labels = f"{config.run.name}-syncer", labels_of(config, "syncer")
    budget = {"maxUnavailable": 1, "selector": {"matchLabels": labels}}
    make = _maker(config, "syncer", name)
    service, policy = _access(config, "syncer", name)
    return [
        service,
        make("apps/v1", "StatefulSet", _shards(config, name)),
        make("policy/v1", "PodDisruptionBudget", budget),
        policy,
    ]


def relay_objects(config: RunConfig) -> list[Manifest]:
    """Return the relays, with the names of their pods and the rules for access."""
    relays = [_relay(config, site) for site in config.sites]
    return [*_access(config, "relay", f"{config.run.name}-relays"), *relays] if relays else []


def _access(config: RunConfig, role: str, name: str) -> tuple[Manifest, Manifest]:
    """Return the Service that names the pods of a role, and the NetworkPolicy for them."""
    labels, make = labels_of(config, role), _maker(config, role, name)
    service = {
        "clusterIP": "None",
        # The processes look each other up before any of them is ready.
        "publishNotReadyAddresses": True,
        "selector": labels,
        "ports": [{"name": role, "port": port_of(config), "targetPort": role}],
    }
    peers: list[Manifest] = [{"podSelector": {"matchLabels": labels_of(config)}}]
    peers += [{"ipBlock": {"cidr": each}} for each in config.launch.kubernetes.allowed_networks]
    policy = {
        "podSelector": {"matchLabels": labels},
        "policyTypes": ["Ingress"],
        "ingress": [{"from": peers, "ports": [{"protocol": "TCP", "port": role}]}],
    }
    return make("v1", "Service", service), make("networking.k8s.io/v1", "NetworkPolicy", policy)


def _relay(config: RunConfig, site: SiteSettings) -> Manifest:
    labels = {**labels_of(config, "relay"), SITE: site.name}
    port = site.port or port_of(config)
    upstream = next((each for each in config.sites if each.name == site.upstream), None)
    place = ("--name", site.name, "--port", str(port))
    command = _with_syncer(config, "relay", *place, site=upstream, option="--upstream")
    container = {
        **_container(config, "relay", "relay", config.launch.syncer, 1),
        "command": [*command, *_sets({"syncer.host": "0.0.0.0"})],
        "ports": [{"name": "relay", "containerPort": port}],
        "startupProbe": _probe(config, "relay", period=2, failures=150),
        "livenessProbe": _probe(config, "relay", period=10, failures=6),
    }
    tls = kubernetes_tls.volume(config, "relay", site.name)
    pod = {
        **_pod(config, container, SHARD_GRACE_SECONDS, tls),
        **_nodes(config, site),
        "hostname": site.name,
        "subdomain": f"{config.run.name}-relays",
    }
    spec = {
        "replicas": 1,
        "strategy": {"type": "Recreate"},  # two relays of one name would exclude each other
        "selector": {"matchLabels": labels},
        "template": {"metadata": {"labels": labels}, "spec": pod},
    }
    return _maker(config, "relay", f"{config.run.name}-relay-{site.name}")(
        "apps/v1", "Deployment", spec
    )


def _shards(config: RunConfig, name: str) -> Manifest:
    labels, launch = labels_of(config, "syncer"), config.launch
    claim: Manifest = {
        "accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": f"{launch.syncer.folder_gib}Gi"}},
    }
    if launch.kubernetes.storage_class:
        claim["storageClassName"] = launch.kubernetes.storage_class
    tls = kubernetes_tls.volume(config, "syncer")
    label = "metadata.labels['apps.kubernetes.io/pod-index']"
    container = {
        **_container(config, "syncer", "syncer", launch.syncer, 1),
        # The shell only computes the shard number. `exec` replaces it, so SIGTERM reaches ddiloco.
        "command": ["/bin/sh", "-c", f"exec {_shard_command(config)}"],
        "ports": [{"name": "syncer", "containerPort": port_of(config)}],
        "startupProbe": _probe(config, "syncer", period=2, failures=150),
        "readinessProbe": _probe(config, "syncer", period=5, failures=2),
        "livenessProbe": _probe(config, "syncer", period=10, failures=6),
    }
    container["env"] = [
        {"name": "SHARD", "valueFrom": {"fieldRef": {"fieldPath": label}}},
        *container["env"],
    ]
    # API keys for experiment logging, if the cluster has such a secret.
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
    command = [
        *("ddiloco", "syncer", f"{SETTINGS_FOLDER}/run.toml"),
        *("--port", str(port_of(config)), "--addresses", ",".join(addresses_of(config))),
        *("--auth-token-file", f"{SECRET_FOLDER}/token", "--linger"),
        *_sets(settings),
    ]
    return f'{shlex.join(command)} --shard "{_SHARD}"'


def _probe(config: RunConfig, port: str, *, period: int, failures: int) -> Manifest:
    """Return a health probe at a named port.

    The kubelet has no client certificate; `/healthz` requires none.
    """
    scheme = {"scheme": "HTTPS"} if config.tls.serves else {}
    return {
        "httpGet": {"path": "/healthz", "port": port, **scheme},
        "periodSeconds": period,
        "timeoutSeconds": 5,
        "failureThreshold": failures,
    }


def learner_objects(config: RunConfig) -> list[Manifest]:
    """Return the learners, and the evaluator if the run has one."""
    kind, learners = config.launch.kubernetes.learners, range(config.run.learners)
    if kind == "job":
        found = _learners_jobs(config)
    elif kind == "jobset":
        found = [_jobset(config, index) for index in learners]
    else:
        found = [each for index in learners for each in _trainjob(config, index)]
    return [*found, _evaluator(config)] if config.run.evaluator else found


def _learners_jobs(config: RunConfig) -> list[Manifest]:
    """Return a Job for the learners of each site, and one for all others."""
    others = [index for index in range(config.run.learners) if not config.relay_of(index)]
    jobs = [_learners_job(config, site.learners, site) for site in config.sites]
    return [*jobs, _learners_job(config, others)] if others else jobs


def _learners_job(
    config: RunConfig, indices: Sequence[int], site: SiteSettings | None = None
) -> Manifest:
    if list(indices) == list(range(config.run.learners)):
        command = _with_syncer(config, "learner", "--index", "$(JOB_COMPLETION_INDEX)", site=site)
    else:  # The shell only finds the learner's number. `exec` replaces it; see `_shards`.
        learner = shlex.join(_with_syncer(config, "learner", site=site))
        script = f'shift "$JOB_COMPLETION_INDEX"; exec {learner} --index "$1"'
        command = ["/bin/sh", "-c", script, "learner", *map(str, indices)]
    most = config.learner.max_failures
    spec = {
        "completionMode": "Indexed",
        "completions": len(indices),
        "parallelism": len(indices),
        "backoffLimitPerIndex": FAILURES_MAX if most is None else most,
        "podFailurePolicy": _failure_policy("FailIndex"),
        "template": _learner_template(config, command, site),
    }
    name = f"{config.run.name}-learners" + (f"-{site.name}" if site else "")
    return _maker(config, "learner", name)("batch/v1", "Job", spec)


def _failure_policy(action: str) -> Manifest:
    """Return the policy: exit code 2 (wrong settings) is final, 130 (SIGTERM) is ignored."""
    lost = {"type": "DisruptionTarget", "status": "True"}
    return {
        "rules": [
            {"action": action, "onExitCodes": {"operator": "In", "values": [2]}},
            {"action": "Ignore", "onPodConditions": [lost]},
            {"action": "Ignore", "onExitCodes": {"operator": "In", "values": [130]}},
        ]
    }


def _jobset(config: RunConfig, index: int) -> Manifest:
    """Return a learner whose hosts are restarted together."""
    name = f"{config.run.name}-learner-{index}"
    meeting = f"{name}-node-0-0.{name}"
    site = config.site_of(index)
    command = _with_syncer(config, "learner", "--index", str(index), site=site)
    if config.learner.ranks_of(index) > 1:
        command = _over_hosts(config, index, meeting, command)
    spec = _jobset_spec(config, _learner_template(config, command, site, f"learner-{index}"), {})
    return _maker(config, "learner", name)("jobset.x-k8s.io/v1alpha2", "JobSet", spec)


def _over_hosts(config: RunConfig, index: int, meeting: str, command: Sequence[str]) -> list[str]:
    """Return torchrun's command per host; it restarts no ranks, because all hosts must restart."""
    hosts = config.launch.learner.hosts
    return [
        *("torchrun", f"--nnodes={hosts}"),
        f"--nproc-per-node={config.learner.ranks_of(index) // hosts}",
        *("--node-rank=$(JOB_COMPLETION_INDEX)", f"--master-addr={meeting}"),
        *(f"--master-port={MEETING_PORT}", "--max-restarts=0"),
        *("-m", "decoupled_diloco.cli", *command[1:]),
    ]


def _jobset_spec(config: RunConfig, template: Manifest, labels: Mapping[str, str]) -> Manifest:
    hosts = config.launch.learner.hosts
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
    """Return a runtime that defines this learner's hosts, and the job."""
    name, hosts = f"{config.run.name}-learner-{index}", config.launch.learner.hosts
    ranks, site = config.learner.ranks_of(index), config.site_of(index)
    command = _with_syncer(config, "learner", "--index", str(index), site=site)
    if ranks > 1:  # The operator passes the hosts to torchrun in environment variables.
        command = ["torchrun", "-m", "decoupled_diloco.cli", *command[1:]]
    template = _learner_template(config, command, site, f"learner-{index}", container="node")
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
        **_container(config, "evaluator", "evaluator", config.launch.syncer, 1),
        "command": _with_syncer(config, "evaluator"),
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


def _with_syncer(
    config: RunConfig,
    role: str,
    *options: str,
    site: SiteSettings | None = None,
    option: str = "--syncer",
) -> list[str]:
    """Return the command of a process that dials the relay of a site, if any, and the shards."""
    near = () if site is None else (relay_address(config, site),)
    return [
        *("ddiloco", role, f"{SETTINGS_FOLDER}/run.toml", *options),
        *(option, ",".join((*near, *addresses_of(config)))),
        *("--auth-token-file", f"{SECRET_FOLDER}/token"),
        *_sets({"run.folder": RUN_FOLDER, "run.learners": config.run.learners}),
        *_sets(kubernetes_tls.pod_settings(config, role)),
    ]


def _sets(settings: Mapping[str, object]) -> list[str]:
    return [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]


def _learner_template(
    config: RunConfig,
    command: Sequence[str],
    site: SiteSettings | None,
    alone: str = "",
    container: str = "learner",
) -> Manifest:
    """Return the pods of several learners, or of the single learner `alone`."""
    gets, hosts = config.launch.learner, config.launch.learner.hosts
    each = _container(config, "learner", container, gets, hosts, gets.gpus)
    each["command"] = list(command)
    each["volumeMounts"] = [*each["volumeMounts"], {"name": "shm", "mountPath": "/dev/shm"}]
    grace = int(config.learner.leave_seconds_max)
    tls = kubernetes_tls.volume(config, "learner", alone)
    pod = {**_pod(config, each, grace, tls), **_nodes(config, site), "restartPolicy": "Never"}
    # Ranks on one host communicate through shared memory.
    pod["volumes"] = [*pod["volumes"], {"name": "shm", "emptyDir": {"medium": "Memory"}}]
    return {"metadata": {"labels": labels_of(config, "learner")}, "spec": pod}


def _nodes(config: RunConfig, site: SiteSettings | None) -> Manifest:
    """Return the choice of nodes for a learner, or for the relay of its site."""
    settings = config.launch.kubernetes
    labels = settings.learner_nodes | (site.nodes if site else {})
    taints = [_toleration(taint) for taint in settings.tolerations]
    chosen = {"nodeSelector": labels, "tolerations": taints}
    return {field: value for field, value in chosen.items() if value}


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
        "image": config.launch.kubernetes.image,
        # The root file system is read-only, so library caches go to a folder of the pod.
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
    """Return a pod with one container; ``claimed`` is the volume that a claim provides."""
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
    """Return a function that makes objects with this name."""

    def make(version: str, kind: str, spec: Manifest) -> Manifest:
        meta = {
            "name": name,
            "namespace": config.launch.kubernetes.namespace,
            "labels": labels_of(config, role),
        }
        return {"apiVersion": version, "kind": kind, "metadata": meta, "spec": spec}

    return make
