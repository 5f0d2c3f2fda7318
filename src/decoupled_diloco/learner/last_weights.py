"""Notices weights that were replaced after the last step: they are not progress.

Frameworks load the best checkpoint, or averaged weights, when training has ended. If a learner then
submitted what its model holds, old weights would be merged as if they had been trained since.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from decoupled_diloco.learner.optimizers import InnerOptimizers
from decoupled_diloco.merge import local_of

SAMPLED_ELEMENTS = 64
"""Of each of two parameters."""


class LastWeights:
    """A sample of the weights as they were at the last step boundary.

    `mark` costs microseconds, and does not wait for a GPU; `replaced` may.

    Args:
        parameters: The model's; the largest and the last of the trainable ones are sampled.
        optimizers: Those that train them; ``None``: any optimizer of this process may.
    """

    def __init__(self, parameters: Iterable[Tensor], optimizers: InnerOptimizers | None) -> None:
        trained = [each for each in parameters if each.requires_grad and each.numel()]
        largest = max(trained, key=lambda each: each.numel())
        last = next((each for each in reversed(trained) if each.ndim > 1), trained[-1])
        self._samples = [_Sample(each) for each in dict.fromkeys((largest, last))]
        self._stepped = False
        self.close: Callable[[], None]
        if optimizers is None:
            self.close = register_optimizer_step_post_hook(self._note).remove
        else:
            self.close = optimizers.on_step(self._note)

    def _note(self, *_: object) -> None:
        self._stepped = True

    def mark(self) -> None:
        """Remembers the weights of this boundary."""
        self._stepped = False
        for sample in self._samples:
            sample.take()

    def replaced(self) -> bool:
        """Whether something other than an optimizer has changed the weights since `mark`."""
        return not self._stepped and any(sample.differs() for sample in self._samples)


class _Sample:
    def __init__(self, parameter: Tensor) -> None:
        self._parameter = parameter
        self._view = self._kept = parameter
        self._pointer: int | None = None
        self.take()

    def _look(self) -> bool:
        """Whether the sample is still a view of the parameter; otherwise it is one from now on."""
        if self._pointer == self._parameter.data_ptr():
            return True
        local = local_of(self._parameter)
        self._view = local.reshape(-1)[:: max(1, local.numel() // SAMPLED_ELEMENTS)]
        self._view = self._view[:SAMPLED_ELEMENTS]
        # What is not contiguous was copied, and has to be copied each time.
        self._pointer = self._parameter.data_ptr() if local.is_contiguous() else None
        return False

    def take(self) -> None:
        if self._look():
            self._kept.copy_(self._view)
        else:
            self._kept = self._view.clone()

    def differs(self) -> bool:
        self._look()
        now = self._view.to(self._kept.device)
        return now.shape != self._kept.shape or bool((now != self._kept).any())
