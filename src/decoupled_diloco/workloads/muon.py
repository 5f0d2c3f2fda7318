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
        model: Its trainable parameters.
        lr: Learning rate of both.
        betas: AdamW's.
        weight_decay: Of matrices.

    Raises:
        ConfigError: This torch has no Muon.

    Source:
        Muon: Keller Jordan; scaled as in "Muon is scalable for LLM training". Inside DiLoCo: MuLoCo
        (arXiv 2505.23725).
    """

    def __init__(
        self, model: nn.Module, lr: float, betas: tuple[float, float], weight_decay: float
    ) -> None:
        if not hasattr(torch.optim, "Muon"):
            raise ConfigError(
                f'optimizer = "muon" needs torch 2.9 or newer, this is {torch.__version__}: '
                'update torch, or take "adamw"'
            )
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        hidden = [p for name, p in named if p.ndim == 2 and not _is_end(name)]
        inside = {id(p) for p in hidden}
        others = [p for _, p in named if id(p) not in inside]
        both: list[torch.optim.Optimizer] = []
        if hidden:
            muon = torch.optim.Muon
            scaled = "match_rms_adamw"
            both = [muon(hidden, lr=lr, weight_decay=weight_decay, adjust_lr_fn=scaled)]
        groups: list[dict[str, Any]] = [
            {"params": [p for p in others if p.ndim >= 2]},
            {"params": [p for p in others if p.ndim < 2], "weight_decay": 0.0},
        ]
        adamw = torch.optim.AdamW(groups, lr=lr, betas=betas, weight_decay=weight_decay)
        both.append(adamw)
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


def _is_end(name: str) -> bool:
    return any(part in _ENDS for part in name.split("."))
