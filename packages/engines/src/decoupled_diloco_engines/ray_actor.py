"""Ray actor that keeps a part of a run going on one node.

The actor does not train. Its processes are the same as on any machine, and need no Ray. They
continue while Ray's head is away, for as long as Ray lets this actor live. When the actor dies,
they flush and end.

Whenever the actor or its node dies, Ray restarts it on any node with the required resources. It
exits for good only when its part is over, was stopped, or was rejected.
"""

from __future__ import annotations

import json
import os
import threading
import time
from typing import TYPE_CHECKING

from decoupled_diloco.runtime import now
from decoupled_diloco.storage.files import write_text
from decoupled_diloco_engines.node_agent import Ending, Keeper, note_of
from decoupled_diloco_engines.ray_plan import RayPlan

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

TOGETHER_SECONDS = 30.0
"""Time that the first host of a learner waits for the others before it frees their nodes."""


class KeeperActor:
    """Actor with the node agent of one part; see the module's docstring.

    Args:
        plan: The plan of the run, as JSON.
        name: Name of the part.
        host: Index of this host among the part's hosts.
        group: The part's placement group, which is removed when the part ends.
    """

    def __init__(self, plan: str, name: str, host: int, group: PlacementGroup | None) -> None:
        import ray

        run_plan = RayPlan(**json.loads(plan))
        (part,) = (each for each in run_plan.parts if each.name == name)
        self._group = group
        self._node = str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
        self._folder = run_plan.settings.parent
        self._hosts = part.actors
        self._itself = ray.get_runtime_context().current_actor
        self.keeper = Keeper(run_plan, part, host, self._node)
        threading.Thread(target=self._work, name="keeper", daemon=True).start()

    def state(self) -> dict[str, str]:
        """Return the state, the node's address and the launch folder."""
        return {"state": self.keeper.state, "node": self._node, "launch": str(self._folder)}

    def end(self) -> None:
        """Ask its processes to flush and end; the actor exits after they have."""
        self.keeper.end()

    def _work(self) -> None:
        """Run the part. On any error, exit with 1, so that Ray restarts the actor."""
        try:
            ending = self.keeper.run()
            if not ending.is_final:
                print(f"{self.keeper.name} restarts on another node: {ending.words}", flush=True)
                os._exit(1)
            self._leave(ending)
        except BaseException:
            import traceback

            traceback.print_exc()
            os._exit(1)

    def _leave(self, ending: Ending) -> None:
        """Write a note about the end, and free the resources."""
        import ray
        from ray.util import remove_placement_group

        result = {"code": ending.code, "words": ending.words}
        note = note_of(self._folder, self.keeper.name)
        note.parent.mkdir(exist_ok=True)
        write_text(note, json.dumps(result) + "\n")
        if self._group is not None and self.keeper.host == 0:
            # Removing the group kills the actors in it, so the other hosts get time to end first.
            others = [note_of(self._folder, name) for name in self._hosts]
            deadline = now() + TOGETHER_SECONDS
            while now() < deadline and not all(each.exists() for each in others):
                time.sleep(1.0)
            remove_placement_group(self._group)
        ray.kill(self._itself, no_restart=True)
