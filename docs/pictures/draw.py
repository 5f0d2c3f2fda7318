"""Makes the pictures of the site; a test compares them with what is committed.

python docs/pictures/draw.py
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import apply
import clock_picture
import frontier
import overview
import planes
import round

PICTURES: dict[str, Callable[[], str]] = {
    "../overview.svg": overview.draw,
    "apply.svg": apply.draw,
    "clock.svg": clock_picture.draw,
    "frontier.svg": frontier.draw,
    "planes.svg": planes.draw,
    "round.svg": round.draw,
}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (Path(__file__).parent / name).write_text(draw(), encoding="utf-8")
