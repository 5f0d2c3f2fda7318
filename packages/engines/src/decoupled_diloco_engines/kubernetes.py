"""Kubernetes engine: submit, query and delete the objects of a run with `kubectl`.

The launch folder is a kustomization, so `submit` only runs `kubectl apply -k RUN.launch`. The
settings and the secret are read from the folder's files, so they are in no manifest.

```
RUN.launch/kustomization.yaml   lists the others; makes ConfigMap and Secrets from the folder's
files
           syncer.yaml          the shards
           learners.yaml        the learners and the evaluator
           relays.yaml          the relays, if the run has sites
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
from decoupled_diloco.errors import ConfigError
from decoupled_diloco.launch.engine import SETTINGS, TOKEN, Job, JobState
from decoupled_diloco_engines import kubernetes_tls
from decoupled_diloco_engines.kubernetes_objects import (
    INSTANCE,
    Manifest,
    addresses_of,
    labels_of,
    learner_objects,
    relay_address,
    relay_objects,
    require_placeable,
    syncer_objects,
)

ANSWER_SECONDS = 60
"""Time limit of a kubectl command that does not wait for pods."""

DRAIN_SECONDS = 300
"""Time limit for the learners' pods to end before the syncer is deleted."""

_KINDS = {
    "statefulset.apps": "",
    "deployment.apps": "",
    "job.batch": "",
    "jobset.jobset.x-k8s.io": "the JobSet operator",
    "trainjob.trainer.kubeflow.org": "Kubeflow Trainer",
}
"""Kinds of a run's jobs, and the operator that each kind needs in the cluster."""

_OPERATED = {"job": "job.batch", "jobset": "jobset.jobset.x-k8s.io"}
_OPERATED["trainjob"] = "trainjob.trainer.kubeflow.org"

_REST = "service,poddisruptionbudget,networkpolicy,configmap,secret"
"""Other kinds of objects with the run's label. Volumes are kept."""


class Kubernetes:
    """Kubernetes engine; see `PlacingEngine`. A job's id is ``namespace/kind/name``."""

    leaves = ("*.yaml",)

    def require(self, config: RunConfig) -> None:
        """Check that kubectl, the namespace and the permissions for the run's objects are there."""
        require_placeable(config)
        _require_yaml()
        settings = config.launch.kubernetes
        _kubectl("get", "namespace", settings.namespace, "-o", "name")
        learners = _OPERATED[settings.learners]
        if _KINDS[learners]:
            self._require_operator(learners)
        relays = ("deployment.apps",) if config.sites else ()
        for kind in ("statefulset.apps", *relays, learners):
            answer = _kubectl(
                "auth", "can-i", "create", kind, "-n", settings.namespace, question=True
            )
            if answer.strip() != "yes":
                raise ConfigError(
                    f"creating {kind} in namespace {settings.namespace!r} is forbidden: request "
                    "the role 'edit' there, or choose another namespace in [launch.kubernetes]"
                )

    @staticmethod
    def _require_operator(kind: str) -> None:
        plural, _, group = kind.partition(".")
        known = _kubectl("api-resources", "--api-group", group, "-o", "name").split()
        if f"{plural}s.{group}" not in known:
            raise ConfigError(
                f"the cluster has no {kind}: install {_KINDS[kind]}, or set "
                'learners = "job" in [launch.kubernetes] (single-host learners)'
            )

    def files(self, config: RunConfig, folder: Path) -> Mapping[str, str]:
        """Return the manifests; settings and secret are already files of the folder."""
        require_placeable(config)
        secret = config.syncer.token_file
        if secret not in (None, folder / TOKEN):
            raise ConfigError(
                f"token_file={str(secret)!r} in [syncer] is not in the launch folder, the only "
                "place that kubectl reads: leave token_file out, and put the secret into "
                f"{folder}/token"
            )
        relays = {site.name: relay_address(config, site) for site in config.sites}
        kubernetes_tls.require_certificates(config, addresses_of(config), relays)
        objects = {"syncer.yaml": syncer_objects(config), "learners.yaml": learner_objects(config)}
        if config.sites:
            objects["relays.yaml"] = relay_objects(config)
        objects["kustomization.yaml"] = [_kustomization(config, sorted(objects))]
        return {name: _documents(each) for name, each in objects.items()}

    def copies(self, config: RunConfig) -> dict[str, Path]:
        """Return certificates and keys, because kubectl reads only files in the folder."""
        return {
            f"{kubernetes_tls.COPIES}/{kubernetes_tls.copy_of(key)}": path
            for files in kubernetes_tls.secret_files(config).values()
            for key, path in files.items()
        }

    def logs(self, config: RunConfig, folder: Path) -> str:
        """Return the command that shows the logs."""
        namespace = config.launch.kubernetes.namespace
        return f"kubectl logs -n {namespace} -l {INSTANCE}={config.run.name} --prefix"

    def submit(self, config: RunConfig, folder: Path, *, resume: bool = False) -> list[Job]:
        """Apply the manifests; the run folders are on the shards' volumes."""
        if resume:
            raise ConfigError(
                "a run on Kubernetes resumes from its volumes when it is launched again: "
                "leave --resume out"
            )
        output = _kubectl("apply", "-k", str(folder), "-o", "json", context=f"{folder}: ")
        found = json.loads(output)
        objects = found["items"] if found["kind"] == "List" else [found]
        jobs = [_job_of(each) for each in objects if _kind_of(each) in _KINDS]
        return sorted(jobs, key=lambda job: not job.id.count("/statefulset.apps/"))

    def states(self, jobs: Sequence[Job]) -> list[JobState]:
        return [state for job in jobs if (state := _state_of(job)) is not None]

    def stop(self, jobs: Sequence[Job]) -> None:
        """Delete the learners and the evaluator, wait until their pods end, then delete the others.

        The order lets the syncer receive the learners' last contributions through the relays. Each
        pod has the grace period of its manifest between SIGTERM and SIGKILL. The shards' volumes,
        with the weights, are kept.
        """
        syncers = [job for job in jobs if "/statefulset.apps/" in job.id]
        relays = [job for job in jobs if "/deployment.apps/" in job.id]
        for job in [*(job for job in jobs if job not in syncers + relays), *relays, *syncers]:
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


def _kustomization(config: RunConfig, resources: Sequence[str]) -> Manifest:
    name = config.run.name
    return {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "namespace": config.launch.kubernetes.namespace,
        "resources": list(resources),
        "generatorOptions": {"disableNameSuffixHash": True, "labels": labels_of(config)},
        "configMapGenerator": [{"name": f"{name}-settings", "files": [f"run.toml={SETTINGS}"]}],
        "secretGenerator": [
            {"name": f"{name}-secret", "files": [TOKEN]},
            *kubernetes_tls.generators(config),
        ],
    }


def _documents(manifests: Iterable[Manifest]) -> str:
    """Return YAML with keys in the given order."""
    yaml = _require_yaml()

    class Plain(yaml.SafeDumper):  # type: ignore[misc, name-defined]
        """Dumper without anchors: repeated values are written out."""

        def ignore_aliases(self, data: object) -> bool:
            return True

    texts = [yaml.dump(each, Dumper=Plain, sort_keys=False, width=100) for each in manifests]
    return "---\n".join(texts)


def _require_yaml() -> Any:
    try:
        import yaml
    except ImportError:
        raise ConfigError(
            'backend="kubernetes" in [launch] needs PyYAML: '
            "run pip install -e 'packages/engines[kubernetes]' in the clone"
        ) from None
    return yaml


def _kind_of(found: Mapping[str, Any]) -> str:
    """Return the kind with its group for ``kubectl get``; other operators have jobs, too."""
    group = found["apiVersion"].rpartition("/")[0]
    return f"{found['kind'].lower()}.{group}"


def _job_of(found: Mapping[str, Any]) -> Job:
    meta = found["metadata"]
    name = meta["name"].removeprefix(meta["labels"][INSTANCE] + "-")
    return Job(name, f"{meta['namespace']}/{_kind_of(found)}/{meta['name']}")


def _state_of(job: Job) -> JobState | None:
    namespace, kind, name = job.id.split("/")
    answer = _kubectl("get", kind, name, "-n", namespace, "--ignore-not-found", "-o", "json")
    return JobState(job.name, job.id, _state_text(json.loads(answer))) if answer.strip() else None


def _state_text(found: Mapping[str, Any]) -> str:
    """Describe an object's state: its final condition, or its number of active pods."""
    status, spec = found.get("status", {}), found["spec"]
    if "deletionTimestamp" in found["metadata"]:
        return "Terminating"
    ended = [each for each in status.get("conditions", ()) if each["status"] == "True"]
    for condition in ended:
        if condition["type"] in ("Complete", "Completed", "Failed", "Suspended"):
            reason = f": {condition['reason']}" if condition["type"] == "Failed" else ""
            return f"{condition['type']}{reason}"
    if found["kind"] in ("StatefulSet", "Deployment"):
        return f"{status.get('readyReplicas', 0)} of {spec['replicas']} ready"
    if found["kind"] == "Job":
        done = status.get("succeeded", 0)
        return f"{status.get('active', 0)} active, {done} of {spec['completions']} complete"
    return "Running" if status else "Pending"


def _kubectl(
    *arguments: str, seconds: float = ANSWER_SECONDS, context: str = "", question: bool = False
) -> str:
    """Return the output of kubectl.

    Args:
        arguments: The command line.
        seconds: Time limit.
        context: Prefix of error messages.
        question: Accept the answer "no", for which kubectl exits with an error code.

    Raises:
        ConfigError: kubectl is not installed, the cluster refuses, or it does not answer.
    """
    if shutil.which("kubectl") is None:
        raise ConfigError(
            "kubectl is not installed: install it and configure access to the cluster, or only "
            "write the manifests with ddiloco launch --dry-run"
        )
    try:
        ended = subprocess.run(
            ["kubectl", *arguments], capture_output=True, text=True, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"kubectl {arguments[0]} did not answer within {seconds:.0f} s: try kubectl "
            "cluster-info"
        ) from None
    if ended.returncode != 0 and not (question and ended.stdout.strip() == "no"):
        raise ConfigError(f"{context}{_describe_failure(ended.stderr)}")
    return ended.stdout


def _describe_failure(stderr: str) -> str:
    """Return kubectl's last error in one sentence, with a fix if the error is known."""
    lines = [line for line in stderr.strip().splitlines() if line] or ["no reason given"]
    error = lines[-1].removeprefix("error: ").removeprefix("Error from server ")
    fixes = {
        "(NotFound)": "create it, or choose another in [launch.kubernetes]",
        "orbidden": "request the role 'edit' in the namespace",
        "no matches for kind": "install its operator in the cluster",
        "refused": "select the right cluster for kubectl (kubectl config use-context)",
        "nable to connect": "select the right cluster for kubectl (kubectl config use-context)",
    }
    fix = next((f": {fix}" for text, fix in fixes.items() if text in stderr), "")
    return f"kubectl reports: {error.rstrip('.?')}{fix}"
