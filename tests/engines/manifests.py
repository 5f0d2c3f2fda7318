"""Manifests of small runs, and their processes, started on this machine."""

from __future__ import annotations

import atexit
import base64
import functools
import json
import os
import re
import shutil
import ssl
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml

import encrypted
from decoupled_diloco.config import RunConfig, dump_config
from decoupled_diloco.launch.certificates import CertificateFolder
from decoupled_diloco_engines.kubernetes import Kubernetes
from free_ports import free_ports
from process.process_runs import SMALL

Manifest = dict[str, Any]
TOKEN = "hush-hush-hush"

RELAYS = {"site-a": ["learner-1", "site-b", "learner-0"], "site-b": ["learner-0"]}
"""The processes that each relay's certificate names."""

BIN = Path(sys.executable).parent


def tool(name: str) -> str:
    """Return a program of this environment or machine; skip the test if it is not installed."""
    found = shutil.which(name, path=f"{BIN}:{os.environ['PATH']}")
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


def output_of(*command: str) -> str:
    ended = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@functools.cache
def certificates() -> Path:
    """Return a folder with certificates for the shards of `placed` and for their clients."""
    path = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    encrypted.made(path, host="*.spread-syncer.default.svc")
    found = CertificateFolder(path)
    found.renew(["syncer"], 30, ["*.spread-relays.default.svc"])
    for site, represents in RELAYS.items():
        found.add([site], 30, ["*.spread-relays.default.svc"], represents)
    return path


def placed(*, kubernetes: Manifest | None = None, **tables: Any) -> RunConfig:
    """Return a run with two shards and two learners for Kubernetes."""
    launch = {"kubernetes": kubernetes or {}, **tables.pop("launch", {})}
    return RunConfig(
        run={"name": "spread", "learners": 2, "max_steps": 60, **tables.pop("run", {})},
        sync={"fragments": 4, "sync_every": 4, "overlap_steps": 1},
        syncer={"shards": 2, **tables.pop("syncer", {})},
        workload={"name": "paced", "options": SMALL},
        launch={"backend": "kubernetes", **launch},
        **tables,
    )


def write(config: RunConfig, folder: Path) -> Path:
    """Write the launch folder, and return it."""
    folder.mkdir(exist_ok=True)
    files = {"run.toml": dump_config(config), "token": TOKEN + "\n"}
    for name, text in {**files, **Kubernetes().files(config, folder)}.items():
        (folder / name).write_text(text)
    for name, path in Kubernetes().copies(config).items():
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copy(path, folder / name)
    return folder


def rendered(config: RunConfig, folder: Path) -> list[Manifest]:
    """Return the objects as `kubectl apply -k` sends them."""
    text = output_of(tool("kubectl"), "kustomize", str(write(config, folder)))
    return list(yaml.safe_load_all(text))


def named(manifests: list[Manifest], kind: str, name: str) -> Manifest:
    (found,) = (m for m in manifests if (m["kind"], m["metadata"]["name"]) == (kind, name))
    return found


def pod_of(manifest: Manifest) -> Manifest:
    return dict(manifest["spec"]["template"]["spec"])


class Cluster:
    """Starts the pods of manifests as local processes, with local addresses and paths."""

    def __init__(self, manifests: list[Manifest], folder: Path) -> None:
        self.manifests = manifests
        self.folder = folder
        shards = named(manifests, "StatefulSet", "spread-syncer")["spec"]["replicas"]
        relays = [m["metadata"]["name"] for m in manifests if m["kind"] == "Deployment"]
        ports = free_ports(shards + len(relays))
        self.ports = ports[:shards]
        self.relay_ports = dict(zip(relays, ports[shards:], strict=True))
        self.started: list[subprocess.Popen[str]] = []
        self._mounted: list[tuple[Path, Manifest]] = []

    def shard(self, index: int, *, labelled: bool = True) -> subprocess.Popen[str]:
        """Start a pod of the StatefulSet; without `labelled` as an older Kubernetes would."""
        pod = pod_of(named(self.manifests, "StatefulSet", "spread-syncer"))
        name = f"spread-syncer-{index}"
        path = {"metadata.labels['apps.kubernetes.io/pod-index']": str(index) if labelled else ""}
        return self._start(pod, name, path, {}, port=self.ports[index])

    def relay(self, site: str) -> subprocess.Popen[str]:
        """Start the pod of a Deployment."""
        name = f"spread-relay-{site}"
        pod = pod_of(named(self.manifests, "Deployment", name))
        return self._start(pod, name, {}, {}, port=self.relay_ports[name])

    def learner(self, index: int, job: str = "spread-learners") -> subprocess.Popen[str]:
        """Start a pod of an Indexed Job."""
        pod = pod_of(named(self.manifests, "Job", job))
        completion = {"JOB_COMPLETION_INDEX": str(index)}
        return self._start(pod, f"{job}-{index}", {}, completion)

    def evaluator(self) -> subprocess.Popen[str]:
        return self._start(
            pod_of(named(self.manifests, "Job", "spread-evaluator")), "spread-evaluator", {}, {}
        )

    def healthy(self, index: int) -> Manifest:
        """Return the answer to the pod's probe; neither side verifies the other."""
        (container,) = pod_of(named(self.manifests, "StatefulSet", "spread-syncer"))["containers"]
        probe = container["readinessProbe"]["httpGet"]
        scheme = probe.get("scheme", "HTTP").lower()
        address = f"{scheme}://127.0.0.1:{self.ports[index]}{probe['path']}"
        unverified = ssl.create_default_context()
        unverified.check_hostname, unverified.verify_mode = False, ssl.CERT_NONE
        try:
            with urllib.request.urlopen(address, timeout=5, context=unverified) as answer:
                return dict(json.loads(answer.read()))
        except (urllib.error.URLError, OSError):
            return {}

    def renew(self, manifests: list[Manifest]) -> None:
        """Replace changed Secrets in all pods, as the kubelet does."""
        self.manifests = manifests
        for path, volume in self._mounted:
            self._fill(path, self._contents(volume))

    def kill(self) -> None:
        for process in self.started:
            process.kill()
            process.communicate()

    def _start(
        self,
        pod: Manifest,
        name: str,
        fields: dict[str, str],
        environment: dict[str, str],
        port: int | None = None,
    ) -> subprocess.Popen[str]:
        (container,) = pod["containers"]
        for each in container["env"]:
            source = each.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
            environment[each["name"]] = each["value"] if source is None else fields[source]
        start = self.folder / f"{name}.{len(self.started)}"
        mounts = self._mounts(pod, container, name, start)
        command = [self._here(word, mounts, environment) for word in container["command"]]
        if port is not None:
            (given,) = container["ports"]
            text, listens = "\0".join(command), f"--port([ \0]){given['containerPort']}(?=[ \0])"
            assert re.search(listens, text), "it listens on the port of the Service"
            command = re.sub(listens, rf"--port\g<1>{port}", text).split("\0")
        with (self.folder / f"{name}.log").open("a") as log:
            process = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
                env={
                    "PATH": f"{BIN}:{os.environ['PATH']}",
                    "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
                    "OMP_NUM_THREADS": "1",
                    "HOSTNAME": name,
                    **environment,
                    "HOME": str(mounts["/tmp"]),
                },
                cwd=start,
            )
        self.started.append(process)
        return process

    def _mounts(
        self, pod: Manifest, container: Manifest, name: str, start: Path
    ) -> dict[str, Path]:
        """Return the local path of each mounted volume.

        A restarted pod has new volumes, except those that it claims.
        """
        mounts = {}
        volumes = {each["name"]: each for each in pod["volumes"]}
        for mount in container["volumeMounts"]:
            volume = volumes.get(mount["name"])
            path = start / mount["name"] if volume else self.folder / f"{name}-{mount['name']}"
            path.mkdir(parents=True, exist_ok=True)
            if volume and "emptyDir" not in volume:
                self._fill(path, self._contents(volume))
                self._mounted.append((path, volume))
            mounts[mount["mountPath"]] = path
        return mounts

    def _contents(self, volume: Manifest) -> dict[str, str]:
        """Return the files of a volume that is made from objects."""
        if "configMap" in volume:
            return dict(named(self.manifests, "ConfigMap", volume["configMap"]["name"])["data"])
        if "secret" in volume:
            return secret_data(named(self.manifests, "Secret", volume["secret"]["secretName"]))
        found = {}
        for source in volume["projected"]["sources"]:
            data = secret_data(named(self.manifests, "Secret", source["secret"]["name"]))
            chosen = source["secret"].get("items", [{"key": key, "path": key} for key in data])
            found |= {item["path"]: data[item["key"]] for item in chosen}
        return found

    @staticmethod
    def _fill(path: Path, data: dict[str, str]) -> None:
        """Write the files like the kubelet: links through `..data`, replaced atomically."""
        new = Path(tempfile.mkdtemp(dir=path, prefix="..2026_"))
        for file, text in data.items():
            (new / file).write_text(text)
        (path / "..data_tmp").symlink_to(new.name)
        (path / "..data_tmp").rename(path / "..data")
        for file in data:
            if not (path / file).is_symlink():
                (path / file).symlink_to(f"..data/{file}")
        for old in path.glob("..2026_*"):
            if old != new:
                shutil.rmtree(old)

    def _here(self, word: str, mounts: dict[str, Path], environment: dict[str, str]) -> str:
        for index, port in enumerate(self.ports):
            word = re.sub(
                rf"//spread-syncer-{index}\.spread-syncer\.default\.svc:\d+",
                f"//127.0.0.1:{port}",
                word,
            )
        for name, port in self.relay_ports.items():
            host = name.removeprefix("spread-relay-") + r"\.spread-relays\.default\.svc"
            word = re.sub(rf"//{host}:\d+", f"//127.0.0.1:{port}", word)
        for mounted, path in mounts.items():
            if mounted != "/tmp":  # the folders of the test may be in it
                word = word.replace(mounted, str(path))
        return re.sub(r"\$\((\w+)\)", lambda found: environment[found[1]], word)


def secret_data(secret: Manifest) -> dict[str, str]:
    data = {k: base64.b64decode(v).decode() for k, v in secret.get("data", {}).items()}
    return {**data, **secret.get("stringData", {})}
