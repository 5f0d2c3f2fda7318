"""How much one learner's contribution counts in a merge."""

from __future__ import annotations


def token_weight(tokens: float, steps: float) -> float:
    """Weight a contribution by quantity times quality of its training.

    `w = tokens · (tokens / steps)`: `tokens` is how much was learnt from (quantity), and
    `tokens / steps`, the batch size, is how little noise each step had (quality).

    Args:
        tokens: Tokens trained on since the learner last received the fragment, >= 0.
        steps: Inner steps in which it did so, >= 0.

    Returns:
        The weight, >= 0; 0 if the learner did nothing, which takes it out of the merge.

    Examples:
        >>> token_weight(tokens=800, steps=4)
        160000.0
        >>> token_weight(tokens=0, steps=0)
        0.0

    Source:
        Decoupled DiLoCo (arXiv 2604.21428), Algorithm 2. The paper leaves `steps = 0` undefined.
    """
    assert tokens >= 0, f"tokens={tokens} is negative"
    assert steps >= 0, f"steps={steps} is negative"
    if tokens == 0 or steps == 0:
        return 0.0
    return float(tokens) * (tokens / steps)
