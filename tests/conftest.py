"""What all tests need."""

from __future__ import annotations

import signal

# Whoever starts the tests in the background may have interrupts ignored, and so would every process
# that a test starts.
signal.signal(signal.SIGINT, signal.default_int_handler)
