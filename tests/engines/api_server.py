"""In-memory subset of the Kubernetes API that kubectl needs to create, show and delete objects.

There are no controllers: no pod starts, and deleted objects are gone at once.
"""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

Manifest = dict[str, Any]

KINDS = {
    "v1": ["Namespace", "Service", "ConfigMap", "Secret"],
    "apps/v1": ["StatefulSet", "Deployment"],
    "batch/v1": ["Job"],
    "policy/v1": ["PodDisruptionBudget"],
    "networking.k8s.io/v1": ["NetworkPolicy"],
    "authorization.k8s.io/v1": ["SelfSubjectAccessReview"],
}
JOBSET = {"jobset.x-k8s.io/v1alpha2": ["JobSet"]}
VERBS = ["create", "delete", "get", "list", "patch", "update", "watch"]


def plural(kind: str) -> str:
    return "networkpolicies" if kind == "NetworkPolicy" else kind.lower() + "s"


class ApiServer(ThreadingHTTPServer):
    """API server that stores objects by path.

    Attributes:
        deleted: Paths of deleted objects, in order.
        refused: Plural names of kinds that may not be created.
    """

    def __init__(self, kinds: dict[str, list[str]]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.kinds = kinds
        self.objects: dict[str, Manifest] = {}
        self.deleted: list[str] = []
        self.refused: set[str] = set()
        self.numbers = itertools.count(1)
        self.add("/api/v1/namespaces/default", {"kind": "Namespace", "apiVersion": "v1"})

    def add(self, path: str, manifest: Manifest) -> Manifest:
        meta = manifest.setdefault("metadata", {})
        number = str(next(self.numbers))
        meta.update(name=path.rpartition("/")[2], uid=number, resourceVersion=number)
        self.objects[path] = manifest
        return manifest

    def discovery(self, path: str) -> Manifest | None:
        """Return the discovery document for a path."""
        if path == "/api":
            return {"kind": "APIVersions", "versions": ["v1"]}
        if path == "/apis":
            groups = [version for version in self.kinds if "/" in version]
            return {"kind": "APIGroupList", "apiVersion": "v1", "groups": list(map(group, groups))}
        if path == "/openapi/v3":
            paths = {("apis/" if "/" in v else "api/") + v: v for v in self.kinds}
            return {"paths": {k: {"serverRelativeURL": f"{path}/{k}"} for k in paths}}
        version = path.removeprefix("/openapi/v3").removeprefix("/apis/").removeprefix("/api/")
        if path.startswith("/openapi/v3/") and version in self.kinds:
            return validates(version, self.kinds[version])
        if version not in self.kinds:
            return None
        resources = [
            {
                "name": plural(kind),
                "singularName": kind.lower(),
                "kind": kind,
                "namespaced": kind not in ("Namespace", "SelfSubjectAccessReview"),
                "verbs": VERBS,
            }
            for kind in self.kinds[version]
        ]
        return {"kind": "APIResourceList", "groupVersion": version, "resources": resources}

    def listed(self, path: str, selector: str) -> Manifest | None:
        """Return the objects of one kind with these labels."""
        name = path.rpartition("/")[2]
        kinds = [(k, v) for v, kinds in self.kinds.items() for k in kinds if plural(k) == name]
        if not kinds:
            return None
        ((kind, version),) = kinds
        wanted = dict(each.split("=") for each in selector.split(",") if each).items()
        items = [
            each
            for place, each in self.objects.items()
            if place.rpartition("/")[0] == path
            and wanted <= each["metadata"].get("labels", {}).items()
        ]
        meta = {"resourceVersion": "1"}
        return {"kind": f"{kind}List", "apiVersion": version, "metadata": meta, "items": items}


def group(version: str) -> Manifest:
    name, _, number = version.partition("/")
    found = {"groupVersion": version, "version": number}
    return {"name": name, "versions": [found], "preferredVersion": found}


def validates(version: str, kinds: list[str]) -> Manifest:
    """Return an OpenAPI document by which kubectl leaves field validation to the server."""
    group, _, number = version.rpartition("/")
    patch = {"parameters": [{"name": "fieldValidation", "in": "query"}]}
    paths = {
        f"/{kind}": {
            "patch": {
                **patch,
                "x-kubernetes-group-version-kind": {
                    "group": group,
                    "version": number,
                    "kind": kind,
                },
            }
        }
        for kind in kinds
    }
    return {"openapi": "3.0.0", "info": {"title": version, "version": "1"}, "paths": paths}


class Handler(BaseHTTPRequestHandler):
    """Handler of one request."""

    server: ApiServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        selector = parse_qs(url.query).get("labelSelector", [""])[0]
        found = (
            self.server.discovery(url.path)
            or self.server.objects.get(url.path)
            or self.server.listed(url.path, selector)
        )
        self._answer(found)

    def do_POST(self) -> None:
        path = urlsplit(self.path).path
        if path.endswith("/selfsubjectaccessreviews"):
            self._answer(self._review(self._text()), 201)
            return
        manifest = self._body()
        self._answer(self.server.add(f"{path}/{manifest['metadata']['name']}", manifest), 201)

    def _review(self, question: bytes) -> Manifest:
        """Answer an access review. Kubectl sends protobuf, which contains the names as text."""
        allowed = not any(name.encode() in question for name in self.server.refused)
        return {
            "kind": "SelfSubjectAccessReview",
            "apiVersion": "authorization.k8s.io/v1",
            "status": {"allowed": allowed},
        }

    def do_PATCH(self) -> None:
        self._body()
        self._answer(self.server.objects.get(urlsplit(self.path).path))

    def do_DELETE(self) -> None:
        self._body()
        path = urlsplit(self.path).path
        found = self.server.objects.pop(path, None)
        if found is not None:
            self.server.deleted.append(path)
        self._answer(found)

    def _text(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _body(self) -> Manifest:
        text = self._text()
        return dict(json.loads(text)) if text else {}

    def _answer(self, found: Manifest | None, code: int = 200) -> None:
        if found is None:
            code, name = 404, urlsplit(self.path).path
            found = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 404}
            found |= {"reason": "NotFound", "message": f"{name} not found"}
        text = json.dumps(found).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


@contextmanager
def serving(kinds: dict[str, list[str]] = KINDS) -> Iterator[ApiServer]:
    with ApiServer(kinds) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()
