"""Run models that are built by hand."""

from __future__ import annotations

from typing import Any

from decoupled_diloco.run_model import RunModel


def model_of(fragments: int = 0, **fields: Any) -> RunModel:
    """Return a model of a whole tape with these fields."""
    model = RunModel("run")
    model.settings = {"sync": {"fragments": fragments}}
    for name, value in fields.items():
        setattr(model, name, value)
    return model
