"""What a text model can do besides predicting the average byte: close brackets and copy names.

Equal losses do not imply equal abilities. Both measures use the held-out text of the evaluation.
"""

from __future__ import annotations

import re

import torch
from torch import nn

from decoupled_diloco.workloads.gpt import EVALUATION_BATCH_SIZE, GptWorkload
from decoupled_diloco.workloads.inner import evaluating
from decoupled_diloco.workloads.text import held_out_batches

PAIRS = dict(zip(b")]}", b"([{", strict=True))
NAME = re.compile(rb"[A-Za-z_][A-Za-z0-9_]{5,}")
"""Names with at least six bytes."""

KNOWN = 3
"""Bytes of a repeated name that do not count, because they do not tell yet which name it is."""


def abilities(workload: GptWorkload, model: nn.Module) -> dict[str, float]:
    """Return two accuracies of a byte-level model on the held-out text, 0 to 1.

    - ``brackets``: where the text closes a bracket that was opened in the same window, the share in
      which the matching one is the most probable of the three closing brackets.
    - ``copying``: of the bytes of names that occurred in the same window before, from their fourth
      byte, the share in which the most probable byte is the right one.
    """
    options = workload.options
    batches = held_out_batches(
        workload.corpus.held_out,
        count=options.eval_batches,
        batch_size=EVALUATION_BATCH_SIZE,
        context=options.context,
    )
    closing = torch.tensor(list(PAIRS))
    right = {"brackets": 0, "copying": 0}
    count = dict(right)
    with evaluating(model):
        for ids in batches:
            logits = model(ids[:, :-1])
            texts = [bytes(row) for row in ids.tolist()]
            for name, found, guesses in (
                ("brackets", closed, closing[logits[..., closing].argmax(-1)]),
                ("copying", copied, logits.argmax(-1)),
            ):
                places = [(row, at) for row, text in enumerate(texts) for at in found(text)]
                rows, columns = torch.tensor(places, dtype=torch.int64).view(-1, 2).unbind(1)
                right[name] += int((guesses[rows, columns - 1] == ids[rows, columns]).sum())
                count[name] += len(places)
    return {name: right[name] / max(1, count[name]) for name in right}


def closed(text: bytes) -> list[int]:
    """Return the positions of closing brackets whose opening one is in the text.

    >>> closed(b") f(a[1])")
    [7, 8]
    """
    found: list[int] = []
    stack: list[int] = []
    for at, byte in enumerate(text):
        if byte in PAIRS.values():
            stack.append(byte)
        elif byte in PAIRS and stack:
            if stack.pop() == PAIRS[byte]:
                found.append(at)
            else:  # within a string or a comment
                stack.clear()
    return found


def copied(text: bytes) -> list[int]:
    """Return the positions in names that have occurred in the text before, without their start.

    >>> copied(b"buffer = 1; buffers = buffer")
    [25, 26, 27]
    """
    found: list[int] = []
    before: set[bytes] = set()
    for match in NAME.finditer(text):
        if match.group() in before:
            found += range(match.start() + KNOWN, match.end())
        before.add(match.group())
    return found
