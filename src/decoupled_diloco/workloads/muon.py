"""Muon for the hidden matrices of a model, AdamW for all else, as one optimizer."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from decoupled_diloco.errors import ConfigError

_ENDS = ("embedding", "head")
"""Modules at the ends of a model: rows of their matrices are tokens or classes, not a mapping."""


class MuonAndAdamW(torch.optim.Optimizer):
    """Muon orthogonalises the momentum of matrices; vectors, embedding and head get AdamW.

    Muon's update is scaled to the size of AdamW's, so that one learning rate and one weight decay
    serve both. It is `torch.optim.Muon`, which torch has since 2.9.

    Args:
        hidden: The matrices, two-dimensional; see `hidden_matrices`.
        groups: All other parameters, as AdamW's groups.
        lr: Learning rate of both.
        betas: AdamW's.
        weight_decay: Of the matrices, and of groups that do not say otherwise.

    Raises:
        ConfigError: This torch has no Muon.

    Source:
        Muon: Keller Jordan; scaled as in "Muon is scalable for LLM training". Inside DiLoCo: MuLoCo
        (arXiv 2505.23725).
    """

    def __init__(
        self,
        hidden: list[nn.Parameter],
        groups: list[dict[str, Any]],
        lr: float,
        betas: tuple[float, float],
        weight_decay: float,
    ) -> None:
        if not hasattr(torch.optim, "Muon"):
            raise ConfigError(
                f'optimizer = "muon" needs torch 2.9 or newer, this is {torch.__version__}: '
                'update torch, or take "adamw"'
            )
        both: list[torch.optim.Optimizer] = []
        if hidden:
            muon, scaled = torch.optim.Muon, "match_rms_adamw"
            both = [muon(hidden, lr=lr, weight_decay=weight_decay, adjust_lr_fn=scaled)]
        both.append(torch.optim.AdamW(groups, lr=lr, betas=betas, weight_decay=weight_decay))
        self._both = both
        super().__init__([group for each in both for group in each.param_groups], {})
        self._share()

    def _share(self) -> None:
        """The two work on this optimizer's groups and state."""
        first = 0
        for each in self._both:
            count = len(each.param_groups)
            each.param_groups = self.param_groups[first : first + count]
            each.state = self.state
            first += count

    def __setstate__(self, state: dict[str, Any]) -> None:
        """As `load_state_dict` calls it, with new groups and a new state."""
        super().__setstate__(state)
        self._share()

    def step(self, closure: Any = None) -> Any:
        """One step of both."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for each in self._both:
            each.step()
        return loss


def hidden_matrices(model: nn.Module) -> list[nn.Parameter]:
    """The trainable matrices between a model's embedding and its head."""
    return [
        parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and parameter.ndim == 2 and not set(_ENDS) & set(name.split("."))
    ]
