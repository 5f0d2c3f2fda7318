"""The end of a command without Python's own shutdown."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from decoupled_diloco.cli.main import UNWRITTEN
from decoupled_diloco.launch.termination import INTERRUPTED

PROGRAM = """
import atexit, sys, threading, time
from decoupled_diloco.cli.main import _end

opened = open(sys.argv[1], "w")
opened.write("the file; ")
atexit.register(lambda: opened.write("atexit; "))
threading.Thread(target=lambda: (time.sleep(0.3), opened.write("the thread; "))).start()
print("the output")
_end(int(sys.argv[2]))
"""


def ended(file: Path, code: int, output: int | Path = subprocess.PIPE) -> tuple[int, str]:
    command = [sys.executable, "-c", PROGRAM, str(file), str(code)]
    environment = {**os.environ, "PYTHONUNBUFFERED": ""}
    with output.open("w") if isinstance(output, Path) else nullcontext(output) as stream:
        done = subprocess.run(command, stdout=stream, text=True, env=environment)
    return done.returncode, done.stdout


@pytest.mark.parametrize("code", [0, 7])
def test_threads_exit_functions_and_open_files_are_waited_for(tmp_path: Path, code: int) -> None:
    assert ended(tmp_path / "file", code) == (code, "the output\n")
    assert (tmp_path / "file").read_text() == "the file; the thread; atexit; "


def test_an_interrupted_command_waits_for_no_thread(tmp_path: Path) -> None:
    assert ended(tmp_path / "file", INTERRUPTED) == (INTERRUPTED, "the output\n")
    assert (tmp_path / "file").read_text() == "the file; "


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_output_that_cannot_be_written_is_a_failure(tmp_path: Path) -> None:
    assert ended(tmp_path / "file", 0, Path("/dev/full"))[0] == UNWRITTEN
