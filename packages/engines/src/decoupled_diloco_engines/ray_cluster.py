"""Access to the Ray cluster: connect, query, start and stop actors.

It uses only Ray's documented API, and nothing that needs its dashboard. Each actor reports its own
state. An actor that does not answer waits for resources, or is being restarted.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from decoupled_diloco.errors import ConfigError, TransportError
from decoupled_diloco.runtime import now
from decoupled_diloco_engines.ray_actor import KeeperActor
from decoupled_diloco_engines.ray_plan import RayPart, RayPlan, describe_resources

if TYPE_CHECKING:
    from ray.actor import ActorHandle
    from ray.util.placement_group import PlacementGroup

OLDEST = (2, 50)
"""Oldest supported version; earlier ones cannot place actors by node labels as required here."""

ANSWER_SECONDS = 5.0
"""Time limit for the answers of all actors together."""

DIAL_SECONDS = 5.0


def require_ray() -> ModuleType:
    """Return the module `ray`.

    Raises:
        ConfigError: Ray is not installed, or too old.
    """
    try:
        import ray
    except ImportError:
        raise ConfigError(
            'backend="ray" in [launch] needs Ray: '
            "run pip install -e 'packages/engines[ray]' in the clone"
        ) from None
    version = tuple(map(int, re.findall(r"\d+", ray.__version__)[:2]))
    if version < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise ConfigError(
            f"Ray {ray.__version__} is older than {oldest}: pip install 'ray[train]>={oldest}' on "
            "all nodes of the cluster"
        )
    return ray


def connected(address: str) -> ModuleType:
    """Return `ray`, connected to a cluster; an existing connection is kept.

    Raises:
        ConfigError: The address has no cluster, or a cluster with another version of Ray.
        TransportError: The program is connected, but the cluster's head is gone.
    """
    ray = require_ray()
    if ray.is_initialized():
        _require_head(ray)
        return ray
    _require_reachable(_where_auto_leads() if address == "auto" else address)
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, RuntimeError, ValueError) as error:
        first = str(error).strip().splitlines()[0].rstrip(".")
        raise _no_cluster(address, first) from None
    return ray


def leave() -> None:
    """Disconnect this program from the cluster; its runs continue."""
    require_ray().shutdown()


def _where_auto_leads() -> str:
    """Return the address that Ray uses for "auto"; if empty, Ray searches for a local process."""
    file = Path(os.environ.get("RAY_TMPDIR", "/tmp"), "ray", "ray_current_cluster")
    written = file.read_text().strip() if file.exists() else ""
    return os.environ.get("RAY_ADDRESS") or written


def _require_head(ray: ModuleType) -> None:
    """Raise at once if the head is gone; Ray itself would end the program after a minute."""
    address = str(ray.get_runtime_context().gcs_address)
    why = _why_unreachable(address)
    if why:
        raise TransportError(
            f"the head of the Ray cluster at {address} is gone ({why}): training continues for "
            "now; restart the head, or launch the run on another cluster with --resume"
        )


def _why_unreachable(address: str) -> str:
    """Return why HOST:PORT does not answer; empty if it does, or if it is not such an address."""
    host, _, port = address.rpartition(":")
    if not (host and port.isdigit()):
        return ""
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=DIAL_SECONDS).close()
    except (OSError, OverflowError) as error:
        return str(getattr(error, "strerror", None) or error)
    return ""


def _require_reachable(address: str) -> None:
    """Raise at once for an address that Ray would try for a minute or forever."""
    if address.startswith("ray://"):
        raise ConfigError(
            f"address={address!r} in [launch.ray] is a Ray Client address, which is not supported: "
            "run the command on a node of the cluster (ray job submit does), with "
            'address = "auto"'
        )
    why = _why_unreachable(address)
    if why:
        raise _no_cluster(address, why)


def _no_cluster(address: str, why: str) -> ConfigError:
    return ConfigError(
        f"no Ray cluster at address={address!r} of [launch.ray] ({why}): run this on one "
        "of its nodes, or use the address that ray start --head printed"
    )


def full_name(run: str, actor: str) -> str:
    """Return an actor's name in the cluster.

    >>> full_name("big", "learner-0")
    'big:learner-0'
    """
    return f"{run}:{actor}"


def actor_names(ray: ModuleType, namespace: str, run: str) -> list[str]:
    """Return the run's live actors in the cluster, by their names in the run."""
    found = ray.util.list_named_actors(all_namespaces=True)
    prefix = full_name(run, "")
    return [
        each["name"].removeprefix(prefix)
        for each in found
        if each["namespace"] == namespace and each["name"].startswith(prefix)
    ]


def require_unused(ray: ModuleType, plan: RayPlan) -> None:
    """Reject a second run of the same name.

    Raises:
        ConfigError: The cluster already has one.
    """
    there = actor_names(ray, plan.namespace, plan.run)
    if there:
        raise ConfigError(
            f"the cluster already has a run {plan.run!r} (actor {there[0]}): ddiloco stop its "
            "run folder, or choose another name with --set run.name=…"
        )


def handles(ray: ModuleType, namespace: str, names: Iterable[str]) -> dict[str, ActorHandle[Any]]:
    """Return the existing actors with these full names."""
    found = {}
    for name in names:
        try:
            found[name] = ray.get_actor(name, namespace=namespace)
        except ValueError:  # it is gone
            continue
    return found


def answers(
    ray: ModuleType, actors: Mapping[str, ActorHandle[Any]], seconds: float = ANSWER_SECONDS
) -> dict[str, dict[str, str]]:
    """Return the states of the actors that answer in time."""
    requests = {handle.state.remote(): name for name, handle in actors.items()}
    if not requests:
        return {}
    done, _ = ray.wait(list(requests), num_returns=len(requests), timeout=seconds)
    found = {}
    for reference in done:
        try:
            found[requests[reference]] = dict(ray.get(reference))
        except ray.exceptions.RayError:  # The actor died, and is gone or being restarted.
            continue
    return found


def first_answer(
    ray: ModuleType, actors: Mapping[str, ActorHandle[Any]], seconds: float
) -> dict[str, str]:
    """Return the state of the first actor that answers; empty if none does in time."""
    deadline, requests = now() + seconds, [handle.state.remote() for handle in actors.values()]
    while requests and (left := deadline - now()) > 0:
        done, requests = ray.wait(requests, timeout=left)
        for reference in done:
            try:
                return dict(ray.get(reference))
            except ray.exceptions.RayError:  # The actor died.
                continue
    return {}


def group_states(ray: ModuleType, plan_namespace: str) -> dict[str, tuple[str, str]]:
    """Return state and id of the placement groups in a namespace, by full name."""
    prefix = f"{plan_namespace}/"
    return {
        each["name"].removeprefix(prefix): (each["state"], number)
        for number, each in ray.util.placement_group_table().items()
        if each["name"].startswith(prefix) and each["state"] != "REMOVED"
    }


def remove_group(ray: ModuleType, number: str) -> None:
    """Free the resources of a placement group; Ray kills the actors in it."""
    from ray.util.placement_group import PlacementGroup, remove_placement_group

    remove_placement_group(PlacementGroup(ray.PlacementGroupID(bytes.fromhex(number))))


def unplaceable(
    ray: ModuleType, parts: Sequence[RayPart]
) -> list[tuple[RayPart, dict[str, float]]]:
    """Return parts with a host for which the cluster currently lacks a node, with its bundle."""
    nodes = [node for node in ray.nodes() if node["Alive"]]

    def fits(part: RayPart, bundle: Mapping[str, float], node: Mapping[str, Any]) -> bool:
        resources, labels = node["Resources"], node.get("Labels", {})
        return all(resources.get(name, 0) >= amount for name, amount in bundle.items()) and all(
            labels.get(key) == value for key, value in part.labels.items()
        )

    found = []
    for part in parts:
        for bundle in part.bundles:
            enough = sum(fits(part, bundle, node) for node in nodes)
            if enough < len(part.bundles):
                found.append((part, dict(bundle)))
                break
    return found


def in_words(part: RayPart, bundle: Mapping[str, float]) -> str:
    """Describe the nodes that a part waits for."""
    hosts = len(part.bundles)
    nodes = "a node" if hosts == 1 else f"{hosts} nodes"
    return f"{nodes} with {describe_resources(bundle, part.labels)}"


def start_actor(ray: ModuleType, plan: RayPlan, part: RayPart) -> None:
    """Start a detached actor, which Ray restarts on any node with free resources."""
    _start(
        ray, plan, part, 0, None, scheduling_strategy="SPREAD", label_selector=part.labels or None
    )


def start_group(ray: ModuleType, plan: RayPlan, part: RayPart) -> None:
    """Start a placement group with a detached actor on each of its hosts."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    group = ray.util.placement_group(
        [dict(bundle) for bundle in part.bundles],
        strategy="STRICT_SPREAD",
        name=f"{plan.namespace}/{full_name(plan.run, part.name)}",
        lifetime="detached",
        bundle_label_selector=[part.labels] * len(part.bundles) if part.labels else None,
    )
    for host in range(len(part.bundles)):
        there = PlacementGroupSchedulingStrategy(group, host)
        _start(ray, plan, part, host, group, scheduling_strategy=there)


def _start(
    ray: ModuleType,
    plan: RayPlan,
    part: RayPart,
    host: int,
    group: PlacementGroup | None,
    **placed: Any,
) -> None:
    bundle = dict(part.bundles[host])
    options = {
        "name": full_name(plan.run, part.actors[host]),
        "namespace": plan.namespace,
        "lifetime": "detached",
        "max_restarts": -1,
        "num_cpus": bundle.pop("CPU", 0),
        "num_gpus": bundle.pop("GPU", 0),
        "memory": int(bundle.pop("memory", 0)) or None,
        "resources": bundle or None,  # custom resources are left after the three above
    }
    actor = ray.remote(KeeperActor).options(**options, **placed)
    actor.remote(plan.to_json(), part.name, host, group)
