from __future__ import annotations

from unit.show.conftest import run_folder as run_folder
