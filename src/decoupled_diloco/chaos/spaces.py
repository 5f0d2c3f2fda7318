"""Namespaces of this process's own: what is mounted or shaped in them is gone with the process.

However it dies, the kernel takes a namespace down with the last process in it, so nothing has to
be cleaned up by hand. Called before any thread is started: a namespace is a thread's.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys

from decoupled_diloco.errors import Error

_MOUNTS = 0x0002_0000
_NETWORK = 0x4000_0000


def unavailable(*tools: str) -> str:
    """Why namespaces cannot be had here; empty if they can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "namespaces need root on Linux"
    for tool in tools:
        if shutil.which(tool) is None:
            return f"{tool!r} is not installed"
    return ""


def own_mounts() -> None:
    """From now on what this process mounts is seen by it and its children only.

    Raises:
        Error: the system refuses.
    """
    _unshare(_MOUNTS, "mounts")
    command("mount", "--make-rprivate", "/")


def own_network() -> None:
    """From now on this process and its children have a loopback network of their own.

    Raises:
        Error: the system refuses.
    """
    _unshare(_NETWORK, "network")
    command("ip", "link", "set", "lo", "up")


def command(*words: str) -> None:
    """Runs one of the system's commands.

    Raises:
        Error: it fails.
    """
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Error(f"{' '.join(words)}: {done.stderr.strip() or f'code {done.returncode}'}")


def _unshare(flag: int, what: str) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    if library.unshare(flag):
        reason = os.strerror(ctypes.get_errno())
        raise Error(f"a namespace for this process's own {what} cannot be had: {reason}")
