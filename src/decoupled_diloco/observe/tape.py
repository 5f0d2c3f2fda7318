"""The event tape: everything that a run's processes were told, ordered and measured, as JSON lines.

Theory of operation. Every process appends to a file of its own, ``RUN/tape/<who>.jsonl``, of which
`segments` are made and compressed as it grows; a process that is started again appends a new
``start`` record, its next *life*. A record is one JSON object:

```
{"v":3,"at":12.5,"who":"learner-0","seq":7,"kind":"event","type":"StepFinished","data":{"tokens":96}}
```

``at`` is the instant that the state machine was told (seconds of a clock that never goes back, in
full precision, so that a replay is exact); ``seq`` counts the records of one life from 0, its start
record. Effects name the event that caused them in ``cause``. Readers turn ``at`` into wall-clock
seconds with the pair of clocks in the latest start record, and merge the files by that.

A process must not fail with its tape: one that is killed loses what it had not yet flushed
(at most about half a second), which leaves at most a torn last line; readers skip what is torn and
say so. What was written is neither lost nor read twice, whatever was being done to a segment. When
the disk is full the tape ends there, with one `StorageError`, and training goes on.

Files of another schema than ``SCHEMA`` are refused.
"""

from __future__ import annotations

from decoupled_diloco.observe.reader import Follower, TapeReader
from decoupled_diloco.observe.recorder import Recorder, ReplayDifference, replay
from decoupled_diloco.observe.records import MERGED_NAME
from decoupled_diloco.observe.segments import pack_tapes, tapes_in
from decoupled_diloco.observe.writer import FLUSH_SECONDS, TapeWriter

__all__ = [
    "FLUSH_SECONDS", "MERGED_NAME", "Follower", "Recorder", "ReplayDifference", "TapeReader",
    "TapeWriter", "pack_tapes", "replay", "tapes_in",
]  # fmt: skip
