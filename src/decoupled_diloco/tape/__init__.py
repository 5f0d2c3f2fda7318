"""The event tape: all facts, orders and measurements of a run's processes, as JSON lines.

Modules: `records` and `samples` (the content of a line), `writer`, `segments` (the files),
`reader`, `sources` (folder, file or running syncer), `excerpt` (the part of its tape that a syncer
serves) and `replay`. Start with `TapeWriter` and `TapeReader`. The roles of `launch` and the shells
write tapes; `run_model` and `monitor` read them. This package does not interpret a run.

Threads: any thread may write, one at a time. `TapeWriter.flush` accesses the disk, on the thread
that calls it. One further thread compresses.

Theory of operation. Every process appends to its own file, ``RUN/tape/<process>.jsonl``. `segments`
splits and compresses the file as it grows. A restarted process appends a new ``start`` record,
which starts its next *incarnation*. A record is one JSON object:

```
{"v":4,"at":12.5,"process":"learner-0","seq":7,"kind":"event","type":"StepFinished","data":{"tokens":96}}
```

``at`` is the instant at which the state machine received the event, in seconds of a monotonic
clock, with full precision so that a replay is exact. ``seq`` counts the records of one incarnation;
its start record has 0. ``cause`` of an effect is the ``seq`` of the event that caused it. Readers
convert ``at`` to wall-clock seconds with the pair of clocks in the latest start record, and merge
the files by that time.

A tape must not stop its process. A killed process loses the records that it has not flushed yet (at
most about half a second), and leaves at most a torn last line. Readers skip torn lines and report
them. Flushed records are neither lost nor read twice, even while a segment is created or
compressed. If the disk is full, records wait in memory and training continues; see `TapeWriter`.

Readers reject files whose schema is not ``SCHEMA``.
"""

from __future__ import annotations

from decoupled_diloco.tape.reader import Follower, TapeReader
from decoupled_diloco.tape.records import MERGED_NAME
from decoupled_diloco.tape.segments import pack_tapes, tapes_in
from decoupled_diloco.tape.writer import FLUSH_SECONDS, Recorder, TapeWriter

__all__ = [
    "FLUSH_SECONDS", "MERGED_NAME", "Follower", "Recorder", "TapeReader", "TapeWriter",
    "pack_tapes", "tapes_in",
]  # fmt: skip
