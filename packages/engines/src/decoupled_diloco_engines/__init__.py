"""Engines that place and restart a run's processes on several machines."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from decoupled_diloco.config import RunConfig
    from decoupled_diloco.launch.engine import PlacingEngine


def make_slurm(config: RunConfig) -> PlacingEngine:
    """Return the engine that submits Slurm jobs."""
    from decoupled_diloco_engines.slurm import Slurm

    return Slurm()


def make_kubernetes(config: RunConfig) -> PlacingEngine:
    """Return the engine that applies Kubernetes manifests."""
    from decoupled_diloco_engines.kubernetes import Kubernetes

    return Kubernetes()


def make_ray(config: RunConfig) -> PlacingEngine:
    """Return the engine that starts Ray actors."""
    from decoupled_diloco_engines.ray_engine import Ray

    return Ray(config)
