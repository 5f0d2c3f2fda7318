import re
import shutil
from html.parser import HTMLParser

import pytest

from decoupled_diloco.errors import StorageError
from decoupled_diloco.observe import plots
from decoupled_diloco.observe.historian import read_history
from decoupled_diloco.observe.history import RunHistory
from decoupled_diloco.observe.report import render_report, write_report
from decoupled_diloco.observe.tape import TapeWriter
from decoupled_diloco.protocol.events import StepFinished, TermGranted
from decoupled_diloco.protocol.messages import ShardAdmitted


@pytest.fixture(scope="module")
def written(run_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    history = write_report(run_folder, folder / "report.html", folder / "report.png")
    return folder, history


@pytest.fixture(scope="module")
def page(written):
    return (written[0] / "report.html").read_text()


@pytest.fixture
def no_plots(monkeypatch):
    """Tests of what stands around the plots need not wait for them."""
    monkeypatch.setattr(plots, "svg", lambda *_, **__: b"<svg/>")


class Page(HTMLParser):
    """Collects everything that a browser would fetch, and the texts."""

    def __init__(self, text):
        super().__init__()
        self.fetched, self.texts, self.tags = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.fetched += [v for k, v in attrs if k in ("src", "srcset", "href", "action", "data")]

    def handle_data(self, data):
        self.texts.append(data.strip())


def test_report_needs_no_network(page):
    parsed = Page(page)
    assert len(parsed.fetched) == 12
    assert all(uri.startswith("data:image/svg+xml;base64,") for uri in parsed.fetched)
    assert not {"script", "link", "iframe", "object"} & set(parsed.tags)
    assert re.findall(r"https?://", page) == []
    assert "@import" not in page
    assert "url(" not in page


def test_report_tells_the_numbers(page):
    texts = Page(page).texts
    for text in (
        "learner-1 was killed at 30.2 s (step 52), back after 5.8 s; steps lost by the others: 0.",
        "Decoupled DiLoCo: made-up",
        "4.8139 → 2.1519",
        "1 min 6 s",
        "234",
        "89 %",
        "2.115",
        "nobody delivered in time",
        "standard library",
        "ab12" * 16,
        "2.13.0",
        "def step(self):\n    <b>return</b> self.loss",
    ):
        assert text in texts
    assert any("budget_steps = 120" in text for text in texts)


def test_report_escapes_what_others_wrote(page):
    assert "<b>return" not in page
    assert "&lt;b&gt;return&lt;/b&gt;" in page


def test_report_is_for_phones_and_for_the_dark(page):
    assert 'name="viewport"' in page
    assert "(max-width: 640px) and (prefers-color-scheme: dark)" in page


def test_png_is_written(written):
    assert (written[0] / "report.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(p.name for p in written[0].iterdir()) == ["report.html", "report.png"]
    assert written[1].global_step == 120


def test_same_run_same_plots(written):
    first, second = (plots.svg(written[1], "timeline", plots.DARK, narrow=True) for _ in range(2))
    assert first == second


def test_a_run_with_no_rounds_is_reported_as_far_as_it_got(tmp_path, no_plots):
    with TapeWriter(tmp_path / "tape", "learner-0") as tape:
        tape.event(1.0, StepFinished(10))
    with TapeWriter(tmp_path / "tape", "shard-0") as tape:
        tape.event(1.0, TermGranted(ShardAdmitted(1, False)))
    path = tmp_path / "tape" / "learner-0.jsonl"
    path.write_bytes(path.read_bytes()[:-5])
    write_report(tmp_path, tmp_path / "report.html", tmp_path / "report.png")
    page = (tmp_path / "report.html").read_text()
    assert "line 2 is torn and was left out" in page
    assert "No round was finished: the learners trained on their own, unmerged." in page
    assert "The run folder holds no run.toml." in page


def test_an_empty_history_renders(tmp_path, no_plots):
    page = render_report(RunHistory())
    assert "No learner is on the tape: none got as far as its first record." in page
    plots.save_png(RunHistory(), tmp_path / "empty.png")


def test_diverged_losses_are_told(no_plots):
    history = RunHistory()
    history.learners["learner-0"] = learner = plots.LearnerHistory("learner-0")
    learner.losses_not_finite = 3
    assert "learner-0 had 3 losses that are not finite" in render_report(history)


def test_a_report_from_the_merged_file_finds_the_settings(run_folder, tmp_path, no_plots):
    run = tmp_path / "run"
    shutil.copytree(run_folder, run)
    write_report(run / "tape" / "learner-0.jsonl", run / "report.html", None)
    assert "budget_steps = 120" in (run / "report.html").read_text()
    assert not (run / "report.png").exists()


def test_what_cannot_be_written_is_an_error(run_folder, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"report.png cannot be written"):
        write_report(read_history(run_folder), None, tmp_path / "file" / "report.png")


def test_rounds_that_overlap_lie_in_rows(run_folder):
    rounds = read_history(run_folder).shards["shard-0"].rounds[:3]
    together = [plots.Round(float(i), None, i + 2.5, r.result) for i, r in enumerate(rounds)]
    assert plots._rows(together) == [0, 1, 2]
    assert plots._rows(rounds) == [0, 0, 0]


def test_long_lines_are_averaged():
    assert plots._averaged([1.0, 3.0, 5.0, 7.0], 2) == [2.0, 6.0]
    assert plots._averaged([1.0], 2) == [1.0]


def test_smoothing_keeps_a_straight_line():
    line = [10.0 - 0.1 * i for i in range(60)]
    assert plots._smoothed(line) == pytest.approx(line)
    assert plots._smoothed([2.0]) == [2.0]
