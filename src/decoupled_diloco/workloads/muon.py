"""One optimizer that applies Muon to a model's hidden matrices and AdamW to everything else."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from decoupled_diloco.errors import ConfigError

_ENDS = ("embedding", "head")
"""Modules at the ends of a model. The rows of their matrices are tokens or classes, so the matrix
is not a map between hidden states."""


class MuonAndAdamW(torch.optim.Optimizer):
    """Muon orthogonalizes the momentum of matrices; AdamW updates vectors, embedding and head.

    Muon's updates are scaled to the size of AdamW's, so that both can use the same learning rate
    and weight decay. The implementation is `torch.optim.Muon`, which torch 2.9 introduced.

    Args:
        hidden: The matrices, two-dimensional; see `hidden_matrices`.
        groups: All other parameters, as groups for AdamW.
        lr: Learning rate of both optimizers.
        betas: Averaging factors of AdamW's moments.
        weight_decay: Of the matrices, and of groups without their own value.

    Raises:
        ConfigError: The installed torch has no Muon.

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
                f'optimizer = "muon" needs torch 2.9 or newer, but torch {torch.__version__} is '
                'installed: update torch, or use "adamw"'
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
        """Make both optimizers use the groups and the state of this one, without copies."""
        first = 0
        for each in self._both:
            count = len(each.param_groups)
            each.param_groups = self.param_groups[first : first + count]
            each.state = self.state
            first += count

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Replace groups and state; `load_state_dict` calls this."""
        super().__setstate__(state)
        self._share()

    def step(self, closure: Any = None) -> Any:
        """Do one step of both optimizers."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for each in self._both:
            each.step()
        return loss


def hidden_matrices(model: nn.Module) -> list[nn.Parameter]:
    """Return the trainable matrices between a model's embedding and its head."""
    return [
        parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and parameter.ndim == 2 and not set(_ENDS) & set(name.split("."))
    ]
