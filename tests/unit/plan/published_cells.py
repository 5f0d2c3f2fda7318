"""Cells of the published tables, used only as references in tests.

Streaming DiLoCo (arXiv 2501.18512) and Scaling Laws for DiLoCo (arXiv 2503.09799): the smallest
bandwidth in Gbit/s that reaches a compute utilization of 50, 80, 90, 95 and 99 %.
"""

from __future__ import annotations

MODELS = {"1B": (1e9, 24, 0.1), "10B": (10e9, 48, 0.8)}
"""Parameters, layers, step time in seconds."""

CELLS: dict[tuple[str, str, int], tuple[float, ...]] = {
    ("1B", "data-parallel", 100): (86.8, 152.6, 184.2, 222.3, 569.0),
    ("1B", "diloco", 100): (1.4, 6.2, 13.3, 23.3, 86.8),
    ("1B", "streaming", 100): (1.4, 5.2, 9.1, 16.0, 28.1),
    ("1B", "streaming-overlap", 100): (1.4, 4.3, 6.2, 9.1, 11.0),
    ("1B", "streaming-overlap-4bit", 100): (0.4, 0.9, 1.7, 2.0, 3.0),
    ("10B", "data-parallel", 100): (104.8, 222.3, 222.3, 268.3, 471.5),
    ("10B", "diloco", 100): (1.7, 7.5, 16.0, 33.9, 104.8),
    ("10B", "streaming", 100): (1.7, 5.2, 9.1, 13.3, 19.3),
    ("10B", "streaming-overlap", 100): (1.7, 3.6, 5.2, 6.2, 7.5),
    ("10B", "streaming-overlap-4bit", 100): (0.4, 0.9, 1.4, 1.4, 1.7),
    ("10B", "diloco", 10): (16.0, 49.4, 86.8, 152.6, 222.3),
    ("10B", "diloco", 50): (3.0, 13.3, 23.3, 41.0, 126.5),
    ("10B", "diloco", 300): (0.5, 2.0, 4.3, 9.1, 41.0),
}
"""By model, system and H."""
