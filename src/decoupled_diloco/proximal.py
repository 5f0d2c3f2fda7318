"""`ProximalTerm` keeps a learner's weights near the global ones, as FedProx does."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from decoupled_diloco.errors import ConfigError
from decoupled_diloco.learner.party import Solo
from decoupled_diloco.merge import scatter, tensors_of
from decoupled_diloco.merge.fragments import clipped
from decoupled_diloco.participants import Learner


class ProximalTerm:
    """FedProx's proximal term, for the loss of a user's loop.

        proximal = dd.ProximalTerm(learner, mu=0.01)
        loss = loss_function(model(x), y) + proximal()

    It is ``mu / 2 · ‖θ − Θ̂‖²``, summed over all synchronized parameters: θ are the present
    parameters, and Θ̂ the published copies that they were last aligned with. It costs a copy of the
    parameters on their device.

    Args:
        learner: The learner, also that of a `Device.visit`. It has one process.
        mu: μ, greater than 0. FedProx uses 0.001 to 1.

    Raises:
        ConfigError: ``mu`` is out of range, or the learner has several ranks.

    Source: Li et al., *Federated Optimization in Heterogeneous Networks*, arXiv 1812.06127, Eq. 2.
    """

    def __init__(self, learner: Learner, mu: float) -> None:
        if isinstance(mu, bool) or not isinstance(mu, int | float):
            raise ConfigError(f"ProximalTerm(mu={mu!r}) is not a number: pass more than 0")
        if not 0 < mu < math.inf:
            raise ConfigError(f"ProximalTerm(mu={mu}) is out of range: pass more than 0")
        party = learner._party
        if not isinstance(party, Solo):
            raise ConfigError(
                f"ProximalTerm(learner) is for learners with one process, and {learner.name!r} has "
                "several ranks: leave it out"
            )
        self._mu = mu
        self._membership = party.membership
        plan = self._membership.shared.tensors.plan
        self._parameters = tensors_of(party.boundary.trained.module, plan.layout)
        self._anchors = [torch.zeros_like(each) for each in self._parameters]
        self._versions: list[str] = [""] * len(plan.fragments)

    def __call__(self) -> Tensor:
        """Return the term, a tensor with one element that has a gradient."""
        self._refresh()
        total: Tensor | None = None
        for parameter, anchor in zip(self._parameters, self._anchors, strict=True):
            if parameter.requires_grad:
                squares = (parameter - anchor).square().sum()
                total = squares if total is None else total + squares
        assert total is not None, "a learner's model has trainable parameters"
        return total * (self._mu / 2)

    def _refresh(self) -> None:
        """Copy the published copies of the fragments whose version has changed."""
        shared, versions = self._membership.shared, self._membership.versions
        tensors = shared.tensors
        for index, version in enumerate(versions):
            if version == self._versions[index]:
                continue
            values = tensors.published[index]
            assert isinstance(values, Tensor), "a learner with one process has whole copies"
            stop = tensors.plan.moments_start(index)
            model = clipped(tensors.plan.fragments[index], 0, stop)
            scatter(model, values[:stop], self._anchors)
            self._versions[index] = version
