"""The Ray cluster: reached, asked, told.

Only what Ray documents is used, and nothing that needs its dashboard. An actor is asked itself how
it is; one that gives no answer waits for resources, or is being started again.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from decoupled_diloco.engines.ray_actor import KeeperActor
from decoupled_diloco.engines.ray_plan import RayPart, RayPlan, told_of
from decoupled_diloco.errors import ConfigError, TransportError
from decoupled_diloco.runtime import now

if TYPE_CHECKING:
    from ray.actor import ActorHandle
    from ray.util.placement_group import PlacementGroup

OLDEST = (2, 50)
"""Earlier ones do not place actors by labels of nodes as this needs it."""

ANSWER_SECONDS = 5.0
"""How long all actors may take together to say how they are."""

DIAL_SECONDS = 5.0


def require_ray() -> ModuleType:
    """Ray itself.

    Raises:
        ConfigError: it is not installed, or too old.
    """
    try:
        import ray
    except ImportError:
        raise ConfigError(
            "engine=\"ray\" in [where] needs Ray: pip install 'decoupled-diloco[ray]' (in a clone: "
            "pip install -e '.[ray]')"
        ) from None
    version = tuple(map(int, re.findall(r"\d+", ray.__version__)[:2]))
    if version < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise ConfigError(
            f"Ray {ray.__version__} is older than {oldest}: pip install 'ray[train]>={oldest}', on "
            "all nodes of the cluster"
        )
    return ray


def connected(address: str) -> ModuleType:
    """Ray, connected to a cluster; a program that is connected already stays as it is.

    Raises:
        ConfigError: there is none at the address, or it is of another version.
        TransportError: the program is connected, and the cluster's head has gone since.
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
    """Takes this program off the cluster; its runs go on."""
    require_ray().shutdown()


def _where_auto_leads() -> str:
    """The cluster that Ray takes for "auto"; empty: it looks for a process of one."""
    file = Path(os.environ.get("RAY_TMPDIR", "/tmp"), "ray", "ray_current_cluster")
    written = file.read_text().strip() if file.exists() else ""
    return os.environ.get("RAY_ADDRESS") or written


def _require_head(ray: ModuleType) -> None:
    """Finds out at once that the head is gone; after a minute without it Ray ends a program."""
    address = str(ray.get_runtime_context().gcs_address)
    why = _why_unreachable(address)
    if why:
        raise TransportError(
            f"the head of the Ray cluster at {address} is gone ({why}): what trains goes on for "
            "now; start the head again, or launch the run on another cluster with --resume"
        )


def _why_unreachable(address: str) -> str:
    """Why nothing answers at HOST:PORT; empty: something does, or it is no such address."""
    host, _, port = address.rpartition(":")
    if not (host and port.isdigit()):
        return ""
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=DIAL_SECONDS).close()
    except (OSError, OverflowError) as error:
        return str(getattr(error, "strerror", None) or error)
    return ""


def _require_reachable(address: str) -> None:
    """Finds out at once what Ray tries for a minute, or for ever."""
    if address.startswith("ray://"):
        raise ConfigError(
            f"address={address!r} in [where.ray] is of Ray's client, which this does not use: run "
            'the command on a node of the cluster (ray job submit does), with address = "auto"'
        )
    why = _why_unreachable(address)
    if why:
        raise _no_cluster(address, why)


def _no_cluster(address: str, why: str) -> ConfigError:
    return ConfigError(
        f"there is no Ray cluster at address={address!r} of [where.ray] ({why}): run this on one "
        "of its nodes, or give the address that ray start --head has told"
    )


def full_name(run: str, actor: str) -> str:
    """What an actor is called in the cluster.

    >>> full_name("big", "learner-0")
    'big:learner-0'
    """
    return f"{run}:{actor}"


def actor_names(ray: ModuleType, namespace: str, run: str) -> list[str]:
    """The actors of a run that are in the cluster, dead ones left out; their names in the run."""
    found = ray.util.list_named_actors(all_namespaces=True)
    prefix = full_name(run, "")
    return [
        each["name"].removeprefix(prefix)
        for each in found
        if each["namespace"] == namespace and each["name"].startswith(prefix)
    ]


def require_unused(ray: ModuleType, plan: RayPlan) -> None:
    """Refuses a second run of the name.

    Raises:
        ConfigError: the cluster has one.
    """
    there = actor_names(ray, plan.namespace, plan.run)
    if there:
        raise ConfigError(
            f"the cluster has a run {plan.run!r} already ({there[0]} is there): ddiloco stop its "
            "run folder, or choose another name with --set run.name=…"
        )


def handles(ray: ModuleType, namespace: str, names: Iterable[str]) -> dict[str, ActorHandle[Any]]:
    """The actors of these full names that are there."""
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
    """What those actors say of themselves that answer in time."""
    asked = {handle.state.remote(): name for name, handle in actors.items()}
    done, _ = ray.wait(list(asked), num_returns=len(asked), timeout=seconds) if asked else ([], [])
    told = {}
    for reference in done:
        try:
            told[asked[reference]] = dict(ray.get(reference))
        except ray.exceptions.RayError:  # it has died, and is started again, or is gone
            continue
    return told


def first_answer(
    ray: ModuleType, actors: Mapping[str, ActorHandle[Any]], seconds: float
) -> dict[str, str]:
    """What the first says of itself that answers; empty: none does in time."""
    deadline, asked = now() + seconds, [handle.state.remote() for handle in actors.values()]
    while asked and (left := deadline - now()) > 0:
        done, asked = ray.wait(asked, timeout=left)
        for reference in done:
            try:
                return dict(ray.get(reference))
            except ray.exceptions.RayError:  # it has died
                continue
    return {}


def group_states(ray: ModuleType, plan_namespace: str) -> dict[str, tuple[str, str]]:
    """The placement groups of a namespace: state and id, by full name."""
    prefix = f"{plan_namespace}/"
    return {
        each["name"].removeprefix(prefix): (each["state"], number)
        for number, each in ray.util.placement_group_table().items()
        if each["name"].startswith(prefix) and each["state"] != "REMOVED"
    }


def remove_group(ray: ModuleType, number: str) -> None:
    """Gives the resources of a placement group back; actors in it are ended."""
    from ray.util.placement_group import PlacementGroup, remove_placement_group

    remove_placement_group(PlacementGroup(ray.PlacementGroupID(bytes.fromhex(number))))


def unplaceable(
    ray: ModuleType, parts: Sequence[RayPart]
) -> list[tuple[RayPart, dict[str, float]]]:
    """Parts with a host that no node of the cluster has enough for, as it is now."""
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
    """What a part waits for."""
    hosts = len(part.bundles)
    nodes = "a node" if hosts == 1 else f"{hosts} nodes"
    return f"{nodes} with {told_of(bundle, part.labels)}"


def start_actor(ray: ModuleType, plan: RayPlan, part: RayPart) -> None:
    """A detached actor, which Ray starts again wherever there is room."""
    _start(
        ray, plan, part, 0, None, scheduling_strategy="SPREAD", label_selector=part.labels or None
    )


def start_group(ray: ModuleType, plan: RayPlan, part: RayPart) -> None:
    """A placement group with a detached actor on each of its hosts."""
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
        "resources": bundle or None,
    }
    actor = ray.remote(KeeperActor).options(**options, **placed)
    actor.remote(plan.to_json(), part.name, host, group)
