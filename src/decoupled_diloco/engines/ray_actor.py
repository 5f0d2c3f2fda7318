"""The actor of Ray that keeps a part of a run going on one node.

It trains nothing: its processes are those that `ddiloco` starts anywhere, and need no Ray. So they
go on while Ray's head is away, for as long as Ray lets this actor live. When the actor dies, they
hand in what they have, and end.

Ray starts it again, on any node that has what it asks for, whenever it or its node dies. It leaves
for good only when its part is over, was told to end, or has been refused.
"""

from __future__ import annotations

import json
import os
import threading
import time
from typing import TYPE_CHECKING

from decoupled_diloco.engines.keeper import HowEnded, Keeper, note_of
from decoupled_diloco.engines.ray_plan import RayPlan
from decoupled_diloco.runtime import now
from decoupled_diloco.storage.files import write_text

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

TOGETHER_SECONDS = 30.0
"""How long the first host of a learner waits for the others to end before it frees their nodes."""


class KeeperActor:
    """See the module's text.

    Args:
        plan: Of the run, as JSON.
        name: Which part.
        host: The how-manieth of the part's hosts this is.
        group: The part's placement group; it goes with the part.
    """

    def __init__(self, plan: str, name: str, host: int, group: PlacementGroup | None) -> None:
        import ray

        told = RayPlan(**json.loads(plan))
        (part,) = (each for each in told.parts if each.name == name)
        self._group = group
        self._node = str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
        self._folder = told.settings.parent
        self._hosts = part.actors
        self._itself = ray.get_runtime_context().current_actor
        self.keeper = Keeper(told, part, host, self._node)
        threading.Thread(target=self._work, name="keeper", daemon=True).start()

    def state(self) -> dict[str, str]:
        """How it is, where, and of which launch."""
        return {"state": self.keeper.state, "node": self._node, "launch": str(self._folder)}

    def end(self) -> None:
        """Has its processes hand in and end; it leaves when they have."""
        self.keeper.end()

    def _work(self) -> None:
        """Whatever goes wrong here is Ray's to begin again."""
        try:
            ending = self.keeper.run()
            if not ending.is_final:
                print(f"{self.keeper.name} goes on elsewhere: {ending.words}", flush=True)
                os._exit(1)
            self._leave(ending)
        except BaseException:
            import traceback

            traceback.print_exc()
            os._exit(1)

    def _leave(self, ending: HowEnded) -> None:
        """Says how it ended, and gives its resources back."""
        import ray
        from ray.util import remove_placement_group

        told = {"code": ending.code, "words": ending.words}
        note = note_of(self._folder, self.keeper.name)
        note.parent.mkdir(exist_ok=True)
        write_text(note, json.dumps(told) + "\n")
        if self._group is not None and self.keeper.host == 0:
            others = [note_of(self._folder, name) for name in self._hosts]
            deadline = now() + TOGETHER_SECONDS
            while now() < deadline and not all(each.exists() for each in others):
                time.sleep(1.0)
            remove_placement_group(self._group)
        ray.kill(self._itself, no_restart=True)
