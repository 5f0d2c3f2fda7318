"""What a run's folder keeps of its learners when the run is over.

The weights are in the result, so a learner's own checkpoint need not have them twice more: what it
needs to train on, should the budget be raised, is its inner optimizer and its user's objects. With
AdamW that is half of a checkpoint, and no second one is kept, as nothing is being written any more.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

from decoupled_diloco.errors import StorageError
from decoupled_diloco.launch.resume import LEARNERS
from decoupled_diloco.learner.checkpoint import CheckpointFolder
from decoupled_diloco.storage.weights import load_weights

logger = logging.getLogger(__name__)


def keep_the_rest(run: Path, learners: Iterable[str], weights: Path) -> None:
    """Leaves of each learner's ordinary checkpoints the newest, without what the weights have.

    Args:
        run: The run folder.
        learners: Those whose processes have ended.
        weights: The run's result.
    """
    try:
        names = load_weights(weights).keys()
        for learner in learners:
            folder = CheckpointFolder(run / LEARNERS / learner, keep=1)
            newest = folder.newest()
            if newest is not None and newest.fragments:
                folder.save(newest.rest(names))
    except StorageError as error:
        logger.warning("%s: the learners' checkpoints stay as they are", error)
