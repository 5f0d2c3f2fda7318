"""Simulated runs, fault injection into real runs, and the replay of weights."""

from pathlib import Path

from decoupled_diloco.config.files import Shipped

SCENARIOS = Shipped("scenario", Path(__file__).parent / "scenarios")
