import re
import shutil
from dataclasses import replace
from html.parser import HTMLParser

import pytest
import torch
from markupsafe import Markup

from decoupled_diloco.errors import DilocoError, StorageError
from decoupled_diloco.protocol.messages import (
    COORDINATOR,
    NOTHING_NEW,
    Accept,
    Apply,
    ClockAdvanced,
    Connected,
    Hello,
    Participant,
    Received,
    RoundFinished,
    ShardAdmitted,
    StepFinished,
    Tick,
    Version,
)
from decoupled_diloco.run_model import read_run
from decoupled_diloco.run_model.accounts import account_for
from decoupled_diloco.run_model.facts import (
    CutOff,
    Evaluation,
    FaultLog,
    LearnerLog,
    LossPoint,
    ProcessLife,
    RoundLog,
    ShardLog,
)
from decoupled_diloco.show import figures
from decoupled_diloco.show.figures import averaged, rows_of, smoothed, step_rates, timeline_chart
from decoupled_diloco.show.report import problems_of, render_report, write_comparison, write_report
from decoupled_diloco.tape import TapeWriter
from decoupled_diloco.tape.samples import SampleGenerated, pictures_of
from unit.show.models import model_of


@pytest.fixture(scope="module")
def written(run_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    history = write_report(run_folder, folder / "report.html")
    return folder, history


@pytest.fixture(scope="module")
def page(written):
    return (written[0] / "report.html").read_text()


VOID = {"meta", "input"}


class Page(HTMLParser):
    """Collects fetched addresses, texts, numbers and ids; checks that elements are nested."""

    def __init__(self, text):
        super().__init__()
        self.fetched, self.texts, self.tags, self.ids, self.numbers = [], [], [], [], {}
        self.classes, self._open, self._value = set(), [], None
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_startendtag(self, tag, attrs):
        self.see(tag, attrs)

    def handle_starttag(self, tag, attrs):
        self.see(tag, attrs)
        if tag not in VOID:
            self._open.append(tag)

    def see(self, tag, attrs):
        attrs = dict(attrs)
        self.tags.append(tag)
        self.fetched += [
            attrs[k] for k in ("src", "srcset", "href", "action", "data") if k in attrs
        ]
        self.ids += [attrs["id"]] if "id" in attrs else []
        self.classes |= set((attrs.get("class") or "").split())
        self._value = attrs.get("value") if tag == "data" else None

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data.strip())
        if self._value is not None:
            self.numbers.setdefault(data.strip(), float(self._value))
            self._value = None


def assert_fetches_nothing(text):
    parsed = Page(text)
    assert all(uri.startswith("#") for uri in parsed.fetched)
    assert {uri[1:] for uri in parsed.fetched} <= set(parsed.ids)
    assert len(set(parsed.ids)) == len(parsed.ids)
    assert not {"script", "link", "iframe", "object", "img", "base", "form"} & set(parsed.tags)
    assert re.findall(r"https?://", text) == []
    assert "@import" not in text
    assert set(re.findall(r"url\(([^)]*)\)", text)) == {
        "#hatch-down",
        "#lines-joining",
        "#dots-waiting",
    }
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)
    assert policy.group(1).startswith("default-src 'none'; style-src 'unsafe-inline';")
    return parsed


def test_report_needs_no_network(page):
    assert_fetches_nothing(page)
    assert len(page) < 250_000


def test_the_report_shows_the_numbers(page, written):
    parsed = Page(page)
    for text in (
        "learner-1 was killed at 30.2 s (step 52), back after 5.8 s (down 1 s, joining 4.8 s); "
        "steps lost by the others: 0.",
        "Decoupled DiLoCo: made-up",
        "4.8139 → 2.1519",
        "1 min 6 s",
        "234",
        "97 %",
        "2.115",
        "nobody delivered in time",
        "standard library",
        "ab12" * 16,
        "2.13.0",
        "def step(self):\n    <b>return</b> self.loss",
    ):
        assert text in parsed.texts
    assert any("max_steps = 120" in text for text in parsed.texts)
    account = account_for(written[1])
    assert parsed.numbers["97 %"] == pytest.approx(account.time.goodput)
    assert parsed.numbers["219k"] == 428 * 512
    assert parsed.numbers["1 min 6 s"] == pytest.approx(66.0)


def test_the_report_escapes_foreign_text(page, tmp_path):
    assert "<b>return" not in page
    assert "&lt;b&gt;return&lt;/b&gt;" in page
    name = '<script>alert("x")</script>'
    with TapeWriter(tmp_path / "tape.jsonl", name, {"versions": {"<i>": "'\"&"}}) as tape:
        for at in range(9):
            tape.event(float(at), StepFinished(1))
    write_report(tmp_path / "tape.jsonl", tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    assert "<script" not in text
    assert "<i>" not in text
    assert name in assert_fetches_nothing(text).texts


def test_every_class_of_a_chart_has_a_color(page):
    style = page[page.index("<style>") : page.index("</style>")]
    used = Page(page).classes - {"tick", "name", "top", "dot", "c0", "panels", "steps"}
    missing = {name for name in used if f".{name}" not in style}
    assert missing == set()


def test_charts_have_descriptions(page):
    labels = re.findall(r'role="img" aria-label="([^"]*)"', page)
    assert len(labels) == 2 * (2 * 3 + 3) + 5
    assert any("from 4.8139 to 2.1519 in 7 evaluations" in label for label in labels)
    assert any("4 learners and 2 shards over 1 min 6 s, 1 outages" in label for label in labels)


def test_the_page_is_the_only_file(written):
    assert [p.name for p in written[0].iterdir()] == ["report.html"]
    assert written[1].global_step == 120


def test_same_run_same_page(written, run_folder):
    again = render_report(read_run(run_folder), (run_folder / "run.toml").read_text())
    assert (written[0] / "report.html").read_text() == again


def test_a_run_without_rounds_has_a_report(tmp_path):
    with TapeWriter(tmp_path / "tape", "learner-0") as tape:
        tape.event(1.0, StepFinished(10))
    with TapeWriter(tmp_path / "tape", "shard-0") as tape:
        tape.event(1.0, Received(COORDINATOR, ShardAdmitted(1, False)))
    path = tmp_path / "tape" / "learner-0.jsonl"
    path.write_bytes(path.read_bytes()[:-5])
    write_report(tmp_path, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "line 2 is torn and was skipped" in page
    assert "No step is on the tape: no learner began to train." in page
    assert "No round was finished: the learners trained without merging." in page
    assert "there is no run.toml beside the tape" in page
    assert "No learner made two steps" in page


def test_an_empty_history_renders():
    page = render_report(model_of())
    assert "No learner is on the tape: none wrote a record." in page


def test_an_empty_tape_is_reported(tmp_path):
    (tmp_path / "empty.jsonl").touch()
    write_report(tmp_path / "empty.jsonl", tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "empty.jsonl is empty: no process has written a record yet." in page


def test_the_launcher_alone(run_folder, tmp_path):
    folder = tmp_path / "tape"
    folder.mkdir()
    shutil.copy(run_folder / "tape" / "launcher.jsonl", folder)
    history = write_report(tmp_path, tmp_path / "report.html")
    assert history.trained == {}
    page = (tmp_path / "report.html").read_text()
    assert "The tape has no learner." in page
    assert "learner-1 was killed (SIGKILL)" in page
    assert "The tape has no learner and no shard." in page


def test_learners_whose_tapes_are_elsewhere(tmp_path):
    with TapeWriter(tmp_path, "shard-0", clock=lambda: 0.0, wall=lambda: 1000.0) as tape:
        accepted = [Accept(n, f"learner-{n}", 1, "joined") for n in (10, 9)]
        observer = Hello("watcher", 1, "x", "observer", 0, 0, None, ())
        tape.event(0.4, Connected(observer.learner, observer, 3))
        tape.effects(0.5, tape.event(0.5, Tick()), [*accepted, Accept(3, "watcher", 1, "joined")])
    told = problems_of(read_run(tmp_path))
    assert any(
        "The tapes of learner-9 and learner-10 are on other machines" in line for line in told
    )
    assert not any("No learner is on the tape" in line for line in told)


def test_one_learner_s_own_tape(run_folder, tmp_path):
    source = run_folder / "tape" / "learner-0.jsonl"
    shutil.copy(source, tmp_path)
    write_report(tmp_path / "learner-0.jsonl", tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "1 learner, 0 syncer shards" in page
    assert "No shard of the syncer is on the tape: its decisions are unknown." in page


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (
            b"\x89PNG\r\n\x1a\n\n\x00\xff\n" * 40,
            "is not an event tape: none of its lines can be read",
        ),
        (
            b'{"v":5,"at":0}\n',
            "is an event tape with schema 5, but this version reads only schema 4",
        ),
    ],
)
def test_a_file_that_is_not_a_tape_is_rejected(tmp_path, content, reason):
    (tmp_path / "x.jsonl").write_bytes(content)
    with pytest.raises(StorageError, match=reason):
        write_report(tmp_path / "x.jsonl", tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize(
    ("path", "reason"), [("nowhere", "does not exist"), ("", "has no event tape")]
)
def test_a_missing_tape_is_reported(tmp_path, path, reason):
    with pytest.raises(DilocoError, match=reason):
        write_report(tmp_path / path, tmp_path / "report.html")


def test_many_torn_lines_are_not_all_named(run_folder, tmp_path):
    tape = tmp_path / "tape.jsonl"
    whole = (run_folder / "tape" / "learner-0.jsonl").read_bytes()
    tape.write_bytes(whole + b"{torn\n" * 300)
    problems = read_run(tape).problems
    assert len(problems) == 11
    assert problems[-1] == "… and 290 more lines."


def test_sixty_four_learners_and_two_hundred_fragments(tmp_path):
    for number in range(64):
        with TapeWriter(tmp_path, f"learner-{number}", clock=lambda: 0.0, wall=lambda: 0.0) as tape:
            for step in range(12):
                seq = tape.event(float(step + 1), StepFinished(8))
                apply = Apply((16 * step + number) % 200, Version(1, 1), "overwrite", 2, "missed")
                tape.effects(float(step + 1), seq, [apply])
    with TapeWriter(tmp_path, "shard-0", clock=lambda: 0.0, wall=lambda: 0.0) as tape:
        seq = tape.event(1.0, Tick())
        tape.effects(1.0, seq, [ClockAdvanced(1, 64, "")])
    history = write_report(tmp_path, tmp_path / "report.html")
    assert history.fragments == 200
    text = (tmp_path / "report.html").read_text()
    assert "learner-63" in text
    assert len(text) < 500_000


def test_the_axis_of_steps_includes_all_losses():
    """A learner's step can be ahead of the shards' count."""
    learner = LearnerLog(
        "learner-0",
        [ProcessLife(0.0, 8.0)],
        losses=[LossPoint(float(at), at, 2.0) for at in range(9)],
    )
    history = model_of(duration=8.0, learners={"learner-0": learner})
    history.shards["shard-0"] = ShardLog("shard-0", clock=7)
    assert figures.place_over(history, "step").high == 8.0
    history.evaluations.append(Evaluation(8.0, 10, 2.0, 1))
    assert figures.place_over(history, "step").high == 10.0


def test_an_unpaired_surrogate_in_a_sample_becomes_a_question_mark(tmp_path):
    with TapeWriter(tmp_path, "launcher") as tape:
        tape.sample(1.0, SampleGenerated("left\udc80right"))
    write_report(tmp_path, tmp_path / "report.html")
    assert "left?right" in (tmp_path / "report.html").read_text()


def test_pictures_are_drawn_with_captions(tmp_path):
    pixels = torch.tensor([[0.0, 1.0, 1.0], [1 / 3, 0.0, 1 / 3]])
    with TapeWriter(tmp_path, "evaluator") as tape:
        tape.sample(1.0, pictures_of([("earlier", pixels)]))
        tape.sample(2.0, pictures_of([("read <7>", pixels), ("read 8", pixels[:, :2])]))
    write_report(tmp_path, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert_fetches_nothing(page)
    assert "<figcaption>read &lt;7&gt;</figcaption>" in page
    assert (
        '<svg class="picture" viewBox="0 0 3 2" role="img" aria-label="read &lt;7&gt;">'
        '<path d="M0 1h1v1h-1zM2 1h1v1h-1z" fill-opacity="0.33"/>'
        '<path d="M1 0h2v1h-2z" fill-opacity="1.00"/></svg>'
    ) in page
    assert "earlier" not in page, "only the last pictures count"
    assert page.count('<svg class="picture"') == 2


def test_diverged_losses_are_reported():
    history = model_of()
    history.learners["learner-0"] = learner = LearnerLog("learner-0", [ProcessLife(0.0, 0.0)])
    learner.losses_not_finite = 3
    assert "learner-0 had 3 losses that are not finite" in render_report(history)


def test_settings_come_from_the_start_record_without_run_toml(run_folder, tmp_path):
    tape = tmp_path / "launcher.jsonl"
    shutil.copy(run_folder / "tape" / "launcher.jsonl", tape)
    write_report(tape, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "sync.fragments = 24" in page
    assert "Settings in the start records" in page


def test_a_report_from_one_file_of_a_run_folder_finds_the_settings(run_folder, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(run_folder, run)
    write_report(run / "tape" / "learner-0.jsonl", run / "report.html")
    assert "max_steps = 120" in (run / "report.html").read_text()


def test_an_unwritable_page_is_an_error(run_folder, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"report.html cannot be written"):
        write_report(read_run(run_folder), tmp_path / "file" / "report.html")


def evaluated(*losses, virtual=False):
    """A run of ten seconds with these losses of the global weights."""
    every = [Evaluation(10 * n / (len(losses) - 1), n, x, 1) for n, x in enumerate(losses)]
    return model_of(duration=10.0, evaluations=every, virtual=virtual)


@pytest.mark.parametrize(
    ("first", "second"), [(2.2, 3.0), (3.0, 2.2), (2.2, 2.21), (2.21, 2.2), (2.2, 2.2)]
)
def test_the_last_losses_are_beside_their_lines(first, second):
    runs = [("a", evaluated(4.0, first)), ("b", evaluated(4.0, second))]
    for drawing in Markup(figures.evaluation_chart(runs, "time")).split("</svg>")[:-1]:
        labels = {
            css: (float(y), text)
            for y, css, text in re.findall(
                r'<text x="[^"]*" y="([^"]*)" text-anchor="end" class="value (\w+)">([^<]*)<',
                drawing,
            )
        }
        ends = {
            css: float(points.split()[-1].split(",")[1])
            for points, css in re.findall(r'<polyline points="([^"]*)" class="line (\w+)"', drawing)
        }
        assert labels["ink"][1] == f"{first:.3f}"
        assert labels["second"][1] == f"{second:.3f}"
        ys = {css: y for css, (y, _) in labels.items()}
        assert abs(ys["ink"] - ys["second"]) >= 16
        if ends["ink"] != ends["second"]:
            assert (ys["ink"] < ys["second"]) == (ends["ink"] < ends["second"])
        assert all(8 < abs(ys[css] - ends[css]) < 30 for css in ys)


@pytest.mark.parametrize(("virtual", "name"), [(True, "virtual time"), (False, "wall-clock time")])
def test_the_time_axis_names_its_clock(virtual, name):
    history = evaluated(4.0, 2.0, virtual=virtual)
    history.shards["shard-0"] = ShardLog("shard-0")
    assert f"{name} [s]" in Markup(figures.evaluation_chart([("a", history)], "time"))
    assert f"{name} [s]" in Markup(timeline_chart(history))


def test_a_shared_fault_is_drawn_with_its_name_and_time():
    run = model_of(duration=100.0, faults=[FaultLog("cut", "pacific", ("a",), 40.0, 70.0)])
    cut = CutOff("a", 40.0, 72.0, 30, 10, 9, {})
    run.learners["a"] = LearnerLog("a", [ProcessLife(0.0, 100.0)], cuts=[cut])
    chart = timeline_chart(run)
    wide, _ = Markup(chart).split("</svg>")[:2]
    assert ">cut pacific</text>" in wide
    ((x, width),) = re.findall(r'<rect x="([\d.]+)"[^>]* width="([\d.]+)"[^>]*class="shade"', wide)
    ((own, _),) = re.findall(r'<rect x="([\d.]+)"[^>]* width="([\d.]+)"[^>]*class="cutoff"', wide)
    assert x == own
    assert float(width) > 200


def test_two_runs_side_by_side(run_folder, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(run_folder, other)
    settings = (other / "run.toml").read_text().replace("quorum = 1", "quorum = 2")
    (other / "run.toml").write_text(settings)
    shutil.rmtree(other / "tape")
    (other / "tape").mkdir()
    for name in ("learner-0", "shard-0", "launcher"):
        shutil.copy(run_folder / "tape" / f"{name}.jsonl", other / "tape")
    write_comparison(run_folder, other, tmp_path / "comparison.html")
    parsed = assert_fetches_nothing((tmp_path / "comparison.html").read_text())
    texts = parsed.texts
    at = texts.index("sync.quorum")
    assert [text for text in texts[at:] if text][1:3] == ["1", "2"]
    assert "−117 (−50 %)" in texts
    assert "the same" in texts
    assert "run.learners" in texts


def test_a_run_compared_with_itself(run_folder, tmp_path):
    write_comparison(run_folder, run_folder, tmp_path / "comparison.html")
    texts = Page((tmp_path / "comparison.html").read_text()).texts
    assert "All settings are the same." in texts
    assert not any("points" in text and text[0] in "+−" for text in texts if text)


def test_concurrent_rounds_are_in_separate_rows(run_folder):
    rounds = read_run(run_folder).shards["shard-0"].rounds[:3]
    together = [replace(r, opened_at=float(i), finished_at=i + 2.5) for i, r in enumerate(rounds)]
    assert rows_of(together) == [0, 1, 2]
    assert rows_of(rounds) == [0, 0, 0]
    assert isinstance(rounds[0].result, RoundFinished)


def test_step_rates(run_folder):
    learner = read_run(run_folder).learners["learner-1"]
    rates = step_rates(learner, [0.0, 4.0, 24.0, 34.0, 36.0, 46.0])
    assert rates == pytest.approx([0.0, 2.0, 1.2, 0.0, 2.0], abs=0.01)


def test_long_lines_are_averaged():
    assert averaged([1.0, 3.0, 5.0, 7.0], 2) == [2.0, 6.0]
    assert averaged([1.0], 2) == [1.0]


def test_smoothing_keeps_a_straight_line():
    line = [10.0 - 0.1 * i for i in range(60)]
    assert smoothed(line) == pytest.approx(line)
    assert smoothed([2.0]) == [2.0]


def test_smoothing_of_few_steps_preserves_their_shape():
    falling = [6.0, 5.0, 4.4, 4.0, 3.8, 3.7, 3.6, 3.6, 3.6, 3.6, 3.6, 3.6]
    assert smoothed(falling)[-1] == pytest.approx(3.6, abs=0.05)


def test_a_closing_round_with_nothing_to_merge_is_not_drawn_as_abandoned():
    def ended(state):
        part = Participant("a", state, 0, 0, 0.0, None, NOTHING_NEW)
        seconds = (0.1, 0.0, 0.1, None, 0.2, 1.0, 0.0)
        result = RoundFinished(1, 0, 4, None, "abandoned", "nobody", (part,), *seconds, "")
        return RoundLog("shard-0", 1, 0, 0.0, finished_at=0.2, result=result)

    assert (ended("declined").fate, ended("late").fate) == ("idle", "abandoned")
    history = model_of(duration=1.0)
    shard = history.shards["shard-0"] = ShardLog("shard-0", lives=[ProcessLife(0.0, 1.0)])
    shard.rounds = [ended("declined")]
    page = render_report(history)
    assert 'class="idle"' in page
    assert '<path class="abandoned"' not in page
