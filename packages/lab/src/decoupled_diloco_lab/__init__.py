"""Studies of methods, simulated runs, fault injection into real runs, and the replay of weights."""

from pathlib import Path

from decoupled_diloco.config.toml_files import Shipped

SCENARIOS = Shipped("scenario", Path(__file__).parent / "scenarios")
