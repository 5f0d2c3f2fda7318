"""Run models that are put together by hand."""

from __future__ import annotations

from typing import Any

from decoupled_diloco.observe.run_model import RunModel


def model_of(fragments: int = 0, **fields: Any) -> RunModel:
    """A model of a whole tape in which these fields are as told."""
    model = RunModel("run")
    model.settings = {"sync": {"fragments": fragments}}
    for name, value in fields.items():
        setattr(model, name, value)
    return model
