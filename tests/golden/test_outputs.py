"""Six recorded runs still replay, and every output that is made from their tapes is what it was.

An output that is meant to change is written again on purpose: ``pytest tests/golden --rewrite``,
and the change of ``expected`` is reviewed like any other. `record.py` records the runs again.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from decoupled_diloco.run_model import RunModel
from decoupled_diloco.show.page.document import state_of_page
from decoupled_diloco.show.page.history import PageHistory
from decoupled_diloco.show.status import status_of
from decoupled_diloco.tape import TapeReader
from decoupled_diloco.tape.restricted import RestrictedTape
from golden.outputs import OUTPUTS, Growing, Recorded, compared, tapes, timed

HERE = Path(__file__).parent
RUNS = ("faults", "program", "ranks", "resume", "standby", "virtual")
LINES_MAX = 80
"""Lines of a difference that are shown."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The runs in a folder, which is the current one, so that outputs name no other."""
    folder, before = tmp_path_factory.mktemp("golden"), Path.cwd()
    os.chdir(folder)
    yield folder
    os.chdir(before)


_unpacked: dict[tuple[Path, str], Recorded] = {}


def recorded(place: Path, name: str) -> Recorded:
    if (place, name) not in _unpacked:
        with tarfile.open(HERE / "recorded" / f"{name}.tar.xz") as archive:
            archive.extractall(place, filter="data")
        lines = sorted(line for path in tapes(name) for line in timed(path))
        steps = [at for at, text in lines if b'"type":"StepFinished"' in text]
        run = Recorded(name, f"growing/half/{name}", steps[0], steps[-1], lines[-1][0])
        Growing(run, "half").to(run.middle)
        _unpacked[place, name] = run
    return _unpacked[place, name]


@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("name", RUNS)
def test_an_output_is_what_it_was(
    place: Path, name: str, output: str, request: pytest.FixtureRequest
) -> None:
    text = OUTPUTS[output](recorded(place, name))
    assert_as_stored(text, HERE / "expected" / name / output, request)


@pytest.mark.parametrize("name", RUNS)
def test_a_party_sees_a_run_without_the_learners_of_others(place: Path, name: str) -> None:
    """All that is shown comes from records, and no record that a party gets names the others."""
    records = list(TapeReader(Path(recorded(place, name).name)))
    learners = sorted({r.process for r in records if r.process.startswith("learner-")})
    assert len(learners) > 1
    view = RestrictedTape(lambda each: each == learners[0], learners)
    run, kept = RunModel(), 0
    for record in filter(None, map(view.record, records)):
        run.take(record)
        kept += 1
        data = json.dumps(dict(record.data))
        assert not [each for each in learners[1:] if re.search(rf"{each}(?![\w-])", data)]
    assert kept > 100
    state = state_of_page(run, status_of(run, run.latest), PageHistory())
    assert list(state["learners"]) == learners[:1]


def test_two_runs_side_by_side(place: Path, request: pytest.FixtureRequest) -> None:
    text = compared(recorded(place, "resume"), recorded(place, "standby"))
    assert_as_stored(text, HERE / "expected" / "compared.html", request)


def assert_as_stored(text: str, file: Path, request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--rewrite", default=False):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
        return
    stored = file.read_text(encoding="utf-8")
    if text != stored:
        lines = difflib.unified_diff(stored.split("\n"), text.split("\n"), "stored", "now", n=1)
        shown = [line[:300] for line, _ in zip(lines, range(LINES_MAX), strict=False)]
        told = "\n".join(shown)
        pytest.fail(f"{file.relative_to(HERE)} is another one now:\n{told}", pytrace=False)


def test_the_archives_name_no_path_of_the_machine_that_recorded_them() -> None:
    for name in RUNS:
        with tarfile.open(HERE / "recorded" / f"{name}.tar.xz") as archive:
            for entry in archive:
                file = archive.extractfile(entry)
                assert file is not None
                content = file.read()
                assert not entry.name.endswith(("token", ".pem")), entry.name
                assert b"/tmp/" not in content, entry.name
                assert b"/root" not in content, entry.name
