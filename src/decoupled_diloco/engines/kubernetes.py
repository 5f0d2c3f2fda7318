"""Kubernetes: what is submitted, how it is, and its end, all by `kubectl`.

The launch folder is a kustomization: `kubectl apply -k RUN.launch` is all that `submit` does. The
settings and the secret are read from the folder's own files, so that they are in no manifest.

```
RUN.launch/kustomization.yaml   names the others; makes ConfigMap and Secrets of the folder's files
           syncer.yaml          the shards
           learners.yaml        the learners, and the evaluator
           tls/                 copies of the certificates and keys, if the run has any
```
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from decoupled_diloco.config import RunConfig
from decoupled_diloco.engines import kubernetes_tls
from decoupled_diloco.engines.base import SETTINGS, TOKEN, Job, JobState
from decoupled_diloco.engines.kubernetes_objects import (
    INSTANCE,
    Manifest,
    addresses_of,
    labels_of,
    learner_objects,
    require_placeable,
    syncer_objects,
)
from decoupled_diloco.errors import ConfigError

ANSWER_SECONDS = 60
"""How long a command of kubectl may take that waits for nothing."""

DRAIN_SECONDS = 300
"""How long the learners' pods may take to end before the syncer is deleted."""

_KINDS = {
    "statefulset.apps": "",
    "job.batch": "",
    "jobset.jobset.x-k8s.io": "the JobSet operator",
    "trainjob.trainer.kubeflow.org": "Kubeflow Trainer",
}
"""What is a job of the run, and who has to be in the cluster for it."""

_OPERATED = {"job": "job.batch", "jobset": "jobset.jobset.x-k8s.io"}
_OPERATED["trainjob"] = "trainjob.trainer.kubeflow.org"

_REST = "service,poddisruptionbudget,networkpolicy,configmap,secret"
"""What else has the run's label; its volumes are kept."""


class Kubernetes:
    """See `base.PlacingEngine`. A job's id is ``namespace/kind/name``."""

    def require(self, config: RunConfig) -> None:
        """Looks for kubectl, the namespace, and the right to make what the run needs."""
        require_placeable(config)
        _require_yaml()
        settings = config.where.kubernetes
        _kubectl("get", "namespace", settings.namespace, "-o", "name")
        learners = _OPERATED[settings.learners]
        if _KINDS[learners]:
            self._require_operator(learners)
        for kind in ("statefulset.apps", learners):
            told = _kubectl("auth", "can-i", "create", kind, "-n", settings.namespace, ask=True)
            if told.strip() != "yes":
                raise ConfigError(
                    f"you may not create {kind} in the namespace {settings.namespace!r}: ask for "
                    "the role 'edit' there, or choose another namespace in [where.kubernetes]"
                )

    @staticmethod
    def _require_operator(kind: str) -> None:
        plural, _, group = kind.partition(".")
        known = _kubectl("api-resources", "--api-group", group, "-o", "name").split()
        if f"{plural}s.{group}" not in known:
            raise ConfigError(
                f"the cluster knows no {kind}: have {_KINDS[kind]} installed, or write "
                'learners = "job" in [where.kubernetes] (learners of one host)'
            )

    def files(self, config: RunConfig, folder: Path) -> Mapping[str, str]:
        """The manifests; settings and secret are files of the folder already."""
        require_placeable(config)
        secret = config.syncer.token_file
        if secret not in (None, folder / TOKEN):
            raise ConfigError(
                f"token_file={str(secret)!r} in [syncer] is not in the launch folder, and kubectl "
                f"reads only what is: leave token_file out, and put the secret into {folder}/token"
            )
        kubernetes_tls.require_certificates(config, addresses_of(config))
        return {
            "kustomization.yaml": _documents([_kustomization(config)]),
            "syncer.yaml": _documents(syncer_objects(config)),
            "learners.yaml": _documents(learner_objects(config)),
        }

    def copies(self, config: RunConfig) -> dict[str, Path]:
        """Certificates and keys: kubectl reads only what is in the folder."""
        return {
            f"{kubernetes_tls.COPIES}/{kubernetes_tls.copy_of(key)}": path
            for files in kubernetes_tls.secret_files(config).values()
            for key, path in files.items()
        }

    def logs(self, config: RunConfig, folder: Path) -> str:
        """A command, since Kubernetes has them."""
        namespace = config.where.kubernetes.namespace
        return f"kubectl logs -n {namespace} -l {INSTANCE}={config.run.name} --prefix"

    def submit(self, config: RunConfig, folder: Path, *, resume: bool = False) -> list[Job]:
        """Applies them; the run folders are on the shards' volumes."""
        if resume:
            raise ConfigError(
                "a run on Kubernetes goes on by itself, with what is on its volumes, when it is "
                "launched again: leave --resume out"
            )
        told = _kubectl("apply", "-k", str(folder), "-o", "json", what=f"{folder}: ")
        found = json.loads(told)
        objects = found["items"] if found["kind"] == "List" else [found]
        jobs = [_job_of(each) for each in objects if _kind_of(each) in _KINDS]
        return sorted(jobs, key=lambda job: not job.id.count("/statefulset.apps/"))

    def states(self, jobs: Sequence[Job]) -> list[JobState]:
        return [state for job in jobs if (state := _state_of(job)) is not None]

    def stop(self, jobs: Sequence[Job]) -> None:
        """Deletes what trains, waits until its pods are gone, and then the syncer and the rest.

        Each pod has the grace period of its manifest between SIGTERM and SIGKILL. The shards'
        volumes stay, and with them the weights.
        """
        syncers = [job for job in jobs if "/statefulset.apps/" in job.id]
        for job in [*(job for job in jobs if job not in syncers), *syncers]:
            namespace, kind, name = job.id.split("/")
            _delete(namespace, f"{kind}/{name}")
        for job in syncers:
            namespace, _, name = job.id.split("/")
            run = name.removesuffix("-syncer")
            if any("/trainjob" in each.id for each in jobs):
                _delete(namespace, "trainingruntime", "-l", f"{INSTANCE}={run}")
            _delete(namespace, _REST, "-l", f"{INSTANCE}={run}")


def _delete(namespace: str, *what: str) -> None:
    options = ("--ignore-not-found", "--cascade=foreground", f"--timeout={DRAIN_SECONDS}s")
    _kubectl("delete", *what, "-n", namespace, *options, seconds=DRAIN_SECONDS + ANSWER_SECONDS)


def _kustomization(config: RunConfig) -> Manifest:
    name = config.run.name
    return {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "namespace": config.where.kubernetes.namespace,
        "resources": ["syncer.yaml", "learners.yaml"],
        "generatorOptions": {"disableNameSuffixHash": True, "labels": labels_of(config)},
        "configMapGenerator": [{"name": f"{name}-settings", "files": [f"run.toml={SETTINGS}"]}],
        "secretGenerator": [
            {"name": f"{name}-secret", "files": [TOKEN]},
            *kubernetes_tls.generators(config),
        ],
    }


def _documents(manifests: Iterable[Manifest]) -> str:
    """YAML, in the order that people write it."""
    yaml = _require_yaml()

    class Plain(yaml.SafeDumper):  # type: ignore[misc, name-defined]
        """What occurs twice is written twice."""

        def ignore_aliases(self, data: object) -> bool:
            return True

    texts = [yaml.dump(each, Dumper=Plain, sort_keys=False, width=100) for each in manifests]
    return "---\n".join(texts)


def _require_yaml() -> Any:
    try:
        import yaml
    except ImportError:
        raise ConfigError(
            'engine="kubernetes" in [where] needs PyYAML: '
            "pip install 'decoupled-diloco[kubernetes]' (in a clone: "
            "pip install -e '.[kubernetes]')"
        ) from None
    return yaml


def _kind_of(found: Mapping[str, Any]) -> str:
    """As ``kubectl get`` takes it: with the group, since other operators have jobs, too."""
    group = found["apiVersion"].rpartition("/")[0]
    return f"{found['kind'].lower()}.{group}"


def _job_of(found: Mapping[str, Any]) -> Job:
    meta = found["metadata"]
    name = meta["name"].removeprefix(meta["labels"][INSTANCE] + "-")
    return Job(name, f"{meta['namespace']}/{_kind_of(found)}/{meta['name']}")


def _state_of(job: Job) -> JobState | None:
    namespace, kind, name = job.id.split("/")
    told = _kubectl("get", kind, name, "-n", namespace, "--ignore-not-found", "-o", "json")
    return JobState(job.name, job.id, _told(json.loads(told))) if told.strip() else None


def _told(found: Mapping[str, Any]) -> str:
    """How it is: what has become of it, or how many of its pods are at work."""
    status, spec = found.get("status", {}), found["spec"]
    if "deletionTimestamp" in found["metadata"]:
        return "Terminating"
    ended = [each for each in status.get("conditions", ()) if each["status"] == "True"]
    for condition in ended:
        if condition["type"] in ("Complete", "Completed", "Failed", "Suspended"):
            reason = f": {condition['reason']}" if condition["type"] == "Failed" else ""
            return f"{condition['type']}{reason}"
    if found["kind"] == "StatefulSet":
        return f"{status.get('readyReplicas', 0)} of {spec['replicas']} ready"
    if found["kind"] == "Job":
        done = status.get("succeeded", 0)
        return f"{status.get('active', 0)} active, {done} of {spec['completions']} complete"
    return "Running" if status else "Pending"


def _kubectl(
    *arguments: str, seconds: float = ANSWER_SECONDS, what: str = "", ask: bool = False
) -> str:
    """The output of kubectl; ``ask``: a question that it answers "no" with an exit code, too.

    Raises:
        ConfigError: there is none, the cluster refuses, or it does not answer.
    """
    if shutil.which("kubectl") is None:
        raise ConfigError(
            "kubectl is not here: install it and give it the cluster's kubeconfig, or write the "
            "manifests only, with ddiloco launch --dry-run"
        )
    try:
        ended = subprocess.run(
            ["kubectl", *arguments], capture_output=True, text=True, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"kubectl {arguments[0]} gives no answer within {seconds:.0f} s: try kubectl "
            "cluster-info"
        ) from None
    if ended.returncode != 0 and not (ask and ended.stdout.strip() == "no"):
        raise ConfigError(f"{what}{_way_out(ended.stderr)}")
    return ended.stdout


def _way_out(stderr: str) -> str:
    """What kubectl said, in one sentence, and what to do about it."""
    lines = [line for line in stderr.strip().splitlines() if line] or ["it does not say why"]
    said = lines[-1].removeprefix("error: ").removeprefix("Error from server ")
    ways = {
        "(NotFound)": "create it, or choose another in [where.kubernetes]",
        "orbidden": "ask for the role 'edit' in the namespace",
        "no matches for kind": "have its operator installed in the cluster",
        "refused": "give kubectl the right cluster (kubectl config use-context)",
        "nable to connect": "give kubectl the right cluster (kubectl config use-context)",
    }
    way = next((f": {way}" for word, way in ways.items() if word in stderr), "")
    return f"kubectl says: {said.rstrip('.?')}{way}"
