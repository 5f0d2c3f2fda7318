"""Sites on the tape of a shard: the learners behind each relay, and the outcome of each sum."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from markupsafe import Markup
from rich.console import Console

from decoupled_diloco.protocol.messages import (
    Asking,
    Connected,
    Lost,
    RelayHello,
    SumCorrupt,
    Tick,
    relay_peer,
)
from decoupled_diloco.protocol.syncer_machine import SyncerMachine
from decoupled_diloco.protocol.syncer_state import SiteTraffic
from decoupled_diloco.run_model import RunModel, run_of
from decoupled_diloco.run_model.facts import SiteLog
from decoupled_diloco.show.explain import explain_round, token_weights
from decoupled_diloco.show.figures import timeline_chart
from decoupled_diloco.show.page import document
from decoupled_diloco.show.page.document import open_rounds, state_of_page
from decoupled_diloco.show.page.history import PageHistory
from decoupled_diloco.show.report import render_report
from decoupled_diloco.show.status import (
    NEVER_CONNECTED,
    WAIT_SECONDS,
    RunStatus,
    SiteStatus,
    site_cells,
    status_of,
)
from decoupled_diloco.show.tables import totals
from decoupled_diloco.show.terminal import render_status
from decoupled_diloco.tape import TapeWriter
from decoupled_diloco.tape.excerpt import excerpt
from decoupled_diloco.tape.reader import TapeReader
from decoupled_diloco.tape.records import Parser
from decoupled_diloco.units import format_duration
from unit.protocol.conftest import ShardBench
from unit.protocol.shard_rounds import Site, tick_at


class Taped(Site):
    """A shard with sites, and the model of its tape."""

    folder: Path
    tape: TapeWriter

    def model(self) -> RunModel:
        self.tape.flush()
        return run_of(TapeReader(self.folder))

    def status(self) -> RunStatus:
        model = self.model()
        return status_of(model, model.latest)

    def site(self, name: str) -> SiteStatus:
        return next(site for site in self.status().sites if site.name == name)

    def counted(self) -> dict[str, SiteTraffic]:
        return {name: log.traffic for name, log in self.model().sites.items()}

    def explained(self, number: int = 1) -> str:
        return " ".join(" ".join(explain_round(self.model(), number)).split())

    def lose(self, relay: str, *learners: str) -> None:
        for learner in learners:
            self.bench.handle(Lost(learner))
        self.bench.handle(Lost(relay_peer(relay)))


@pytest.fixture
def taped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Taped]]:
    decide = SyncerMachine.handle
    clock = [0.0]

    def recorded(machine: SyncerMachine, now: float, event: Any) -> Any:
        clock[0] = now
        orders = decide(machine, now, event)
        tape.effects(now, tape.event(now, event), orders)
        return orders

    with TapeWriter(
        tmp_path, "shard-0", clock=lambda: clock[0], wall=lambda: 1000.0 + clock[0]
    ) as tape:
        monkeypatch.setattr(SyncerMachine, "handle", recorded)
        Taped.folder, Taped.tape = tmp_path, tape
        yield lambda *learners, **options: Taped(ShardBench, *learners, **options)


def text_of(status: RunStatus, width: int = 100, rows: int | None = None) -> str:
    console = Console(width=width, file=io.StringIO())
    console.print(render_status(status, width=width, rows=rows))
    return str(console.file.getvalue())  # type: ignore[attr-defined]


def merged(site: Taped) -> None:
    site.body("direct")
    site.bench.merged()


def test_a_site_shows_its_learners_and_what_its_relay_has_sent_and_saved(taped: Any) -> None:
    site = taped("a0", "a1", "b0")
    site.sum("site-a", site.body("a0"), site.body("a1", nbytes=140))
    site.sum("site-b", site.body("b0"))
    merged(site)
    a, b = site.status().sites
    assert (a.name, a.state, a.learners, a.elsewhere) == ("site-a", "connected", ("a0", "a1"), ())
    assert (a.sums, a.contributions, a.refused) == (1, 2, 0)
    assert (a.sent_bytes, a.saved_bytes) == (100, 140)
    assert (b.learners, b.contributions, b.saved_bytes) == (("b0",), 1, 0)
    via = {learner.name: learner.via for learner in site.status().learners}
    assert via == {"direct": "direct", "a0": "site-a", "a1": "site-a", "b0": "site-b"}
    assert site.counted() == site.bench.machine.state.sites
    assert "for 2 contributions in 1 sums, 140 B saved" in [t.detail for t in totals(site.model())]


def test_learners_that_reconnect_without_their_relay_are_elsewhere(taped: Any) -> None:
    site = taped("a0", "a1", "b0")
    site.lose("site-a", "a0", "a1")
    site.greet("a0", "")
    site.bench.now += 4.0
    site.greet("b0", "site-b")
    a = site.site("site-a")
    assert (a.state, a.learners, a.elsewhere) == ("disconnected", (), ("a0",))
    assert a.lost_seconds == 4.0
    problem = "the relay of site-a has been disconnected for 4 s; 1 learner of the site now dials"
    assert any(each.startswith(problem) for each in site.status().problems)
    remarks = [remark.text for remark in site.model().remarks]
    assert "the relay of site-a has lost its connection to the syncer" in remarks
    site.bench.handle(Connected(relay_peer("site-a"), RelayHello("site-a", "nonce-2")))
    site.bench.handle(Lost("a0"))
    site.greet("a0", "site-a")
    a = site.site("site-a")
    assert (a.state, a.learners, a.elsewhere, a.lost_seconds) == ("connected", ("a0",), (), None)
    assert site.status().problems == ()
    assert "the relay of site-a is connected again" in [r.text for r in site.model().remarks]


def test_what_a_lost_relay_had_is_not_counted_as_saved(taped: Any) -> None:
    site = taped("a0", "b0")
    site.body("a0")
    site.lose("site-a", "a0")
    a = site.site("site-a")
    assert (a.contributions, a.sent_bytes, a.saved_bytes) == (0, 0, 0)


def test_a_round_names_the_sum_of_each_contribution(taped: Any) -> None:
    site = taped("a0", "a1", "b0")
    asks = site.body("a0"), site.body("a1")
    site.bench.now += 0.25
    site.sum("site-a", *asks, number=7)
    site.sum("site-b", site.body("b0"), number=3)
    merged(site)
    text = site.explained()
    assert "a0: requested at once" in text
    assert "delivered to site-a at once, in its sum 7 after 250 ms" in text
    assert (
        "- site-a: sum 7 arrived after 250 ms with 2 contributions, 100 B instead of 200 B." in text
    )
    assert "- site-b: sum 3 arrived after 250 ms with 1 contribution" in text
    assert (
        "direct: requested at once (its step 2 has reached the round's tick 2), delivered after"
        in text
    )


def test_a_sum_through_another_relay_names_both(taped: Any) -> None:
    site = taped("a0", "b0")
    a, b = site.body("a0"), site.body("b0", nbytes=130)
    site.sum("site-b", b, at="site-a")
    site.sum("site-a", a, b, number=4)
    merged(site)
    assert "delivered to site-b at once, in its sum 1 to site-a at once, in its sum 4" in (
        site.explained()
    )
    sites = site.counted()
    assert sites == site.bench.machine.state.sites
    assert (sites["site-b"].saved_bytes, sites["site-a"].saved_bytes) == (30, 100)


def test_a_lost_relay_is_explained(taped: Any) -> None:
    site = taped("a0")
    site.body("a0")
    site.lose("site-a", "a0")
    text = site.explained()
    assert "its contribution at site-a became void at once: its connection broke" in text
    assert "1 contribution that it had not sent became void" in text
    site.greet("a0", "")
    site.body("a0")
    merged(site)
    text = site.explained()
    assert "for the 2nd time, delivered" in text
    (round,) = site.model().shards["shard-0"].rounds
    weights = token_weights(site.model(), round)
    assert weights.keys() == {part.ask for part in round.folded}, "a void contribution has none"


@pytest.mark.parametrize("refused", [True, False], ids=["refused", "corrupt"])
def test_a_sum_that_does_not_count_is_explained(taped: Any, refused: bool) -> None:
    site = taped("a0", "a1")
    ask = site.body("a0")
    if refused:
        site.sum("site-a", ask, Asking(1, 99))
    else:
        site.bench.handle(SumCorrupt("site-a", 0, 1, (ask,), "its digest is wrong"))
    why = "1 of its 2 requests are not open" if refused else "its digest is wrong"
    assert f"site-a: sum 1 was refused at once ({why}): of its" in site.explained()
    a = site.site("site-a")
    assert (a.sums, a.refused, a.contributions) == (0, 1, 0)
    assert a.sent_bytes == (100 if refused else 0)
    assert site.counted() == site.bench.machine.state.sites


def test_a_contribution_at_a_relay_is_late_and_belongs_to_the_next_round(taped: Any) -> None:
    site = taped("a0")
    ask = site.body("a0")
    site.body("direct")
    model = site.model()
    assert "the sum of site-a" in " ".join(explain_round(model, 1))
    (waiting,) = open_rounds(model, status_of(model, model.latest))
    assert waiting["awaited"] == [["a0", "delivered to site-a, whose sum is awaited"]]
    assert waiting["delivered"] == "direct"
    tick_at(site.bench, 3.0)
    site.bench.merged()
    assert "still in transit when the round ended" in site.explained()
    (round,) = site.model().shards["shard-0"].rounds
    assert [fold.learner for _, fold in round.folds.values()] == ["direct"]
    site.sum("site-a", ask)
    assert ask in site.model().shards["shard-0"].folds[0], "it is in the next version"


def test_a_restarted_shard_waits_for_its_relays(taped: Any) -> None:
    site = taped("a0")
    site.body("a0")
    site.tape.close()
    with TapeWriter(site.folder, "shard-0", wall=lambda: 1010.0) as again:
        again.event(0.0, Tick())
    model = run_of(TapeReader(site.folder))
    (shard,) = model.shards.values()
    assert (shard.relays, shard.relayed, shard.sums) == ({}, {}, {})
    (found,) = status_of(model, model.latest + 3.0).sites
    assert (found.state, found.lost_seconds) == ("disconnected", 3.0)


def test_terminal_and_page_list_the_sites(taped: Any) -> None:
    site = taped("a0", "a1", "b0")
    site.sum("site-a", site.body("a0"), site.body("a1"))
    site.lose("site-b", "b0")
    status, model = site.status(), site.model()
    shown = text_of(status)
    assert "site-a connected" in shown
    assert "site-b disconnected" in shown
    assert "via" in shown
    narrow = text_of(status, width=60)
    assert "refused" not in narrow.partition("no room for: ")[0]
    assert "refused" in narrow.partition("no room for: ")[2], "it names what it leaves out"
    assert "disconnected" in text_of(status, width=60, rows=30)
    page = state_of_page(model, status, PageHistory())
    assert page["sites"][0] == (
        ["site-a", "connected", "a0, a1", "–", "2", "1", "0", "100 B", "100 B"]
    )
    learners = [[name, *values] for name, values in page["learners"].items()]
    html = (Path(document.__file__).parent / "static" / "index.html").read_text()
    for table, rows in {
        "learners": learners,
        "shards": page["shards"],
        "sites": page["sites"],
    }.items():
        head = re.search(rf'<table id="{table}".*?</thead>', html, re.DOTALL)
        assert head is not None
        assert {len(row) for row in rows} == {head[0].count("<th ")}, table


def test_a_relay_that_never_connects_is_shown_and_soon_reported(taped: Any, tmp_path: Path) -> None:
    with TapeWriter(tmp_path / "own", "shard-0", {"sites": {"site-z": ["direct"]}}):
        pass
    (listed,) = run_of(TapeReader(tmp_path / "own")).sites.items()
    assert listed == ("site-z", SiteLog(("direct",)))
    site = taped("a0")
    model = site.model()
    model.sites["site-z"] = listed[1]
    (began,) = [life.ready_at for life in model.shards["shard-0"].lives]

    def after(seconds: float) -> RunStatus:
        model.duration = began + seconds
        return status_of(model, model.latest)

    early = after(WAIT_SECONDS - 1.0)
    found = early.sites[-1]
    assert (found.name, found.state, found.elsewhere) == ("site-z", NEVER_CONNECTED, ("direct",))
    assert early.problems == ()
    (problem,) = after(WAIT_SECONDS + 1.0).problems
    assert problem.startswith("the relay of site-z has never connected; 1 learner of the site now")
    assert "site-z never connected" in text_of(early)
    assert "its relay has never connected" in [t.detail for t in totals(model)]


def test_a_relay_for_one_learner_saves_nothing(taped: Any) -> None:
    site = taped("a0")
    site.sum("site-a", site.body("a0", nbytes=90))  # the sum is larger, by its header
    merged(site)
    (found,) = site.status().sites
    assert found.saved_bytes == -10
    assert site_cells(found)["saved"] == "none"
    assert "for 1 contributions in 1 sums, none saved" in [t.detail for t in totals(site.model())]


def test_the_chart_of_activity_shows_when_relays_were_connected(taped: Any) -> None:
    site = taped("a0", "b0")
    site.sum("site-a", site.body("a0"))
    site.lose("site-b", "b0")
    tick_at(site.bench, site.bench.now + 5.0)
    model = site.model()
    ends = {name: log.connected[-1][1] for name, log in model.sites.items()}
    assert math.isinf(ends["site-a"])
    assert ends["site-b"] < model.duration
    assert len(model.sites["site-a"].sums_at) == 1
    drawn = Markup(timeline_chart(model))
    lanes = re.findall(r'class="lane">([^<]+)<', drawn.split("</svg>")[0])
    assert lanes[-3:] == ["shard-0", "relay-site-a", "relay-site-b"]
    for name, (begin, end) in (
        ("site-a", (0.0, model.duration)),
        ("site-b", (0.0, ends["site-b"])),
    ):
        assert f"relay of {name} connected {format_duration(end - begin)}" in drawn
    assert "relay connected" in render_report(model)


def test_many_sites_are_counted_and_those_with_problems_come_first(taped: Any) -> None:
    site = taped(*(f"{letter}0" for letter in "abcdef"))
    site.lose("site-e", "e0")
    limited = text_of(site.status(), rows=40)
    lines = [line.split()[0] for line in limited.splitlines() if line.startswith("site-")]
    assert lines == ["site-e", "site-a", "site-b"]
    assert "… 3 more" in limited
    assert all(f"site-{letter}" in text_of(site.status()) for letter in "abcdef")


def test_a_running_syncer_serves_what_the_sites_need(taped: Any) -> None:
    site = taped("a0", "a1")
    site.sum("site-a", site.body("a0"), site.body("a1"))
    site.lose("site-a", "a0", "a1")
    whole = site.model()
    text = (site.folder / "shard-0.jsonl").read_bytes()
    served = RunModel()
    parser = Parser(site.folder, [])
    served.take_all(filter(None, map(parser.parse, excerpt(text, detail=False).splitlines())))
    for log in whole.sites.values():
        log.sums_at.clear()  # only whole tapes keep these instants
    assert served.sites == whole.sites


def test_a_run_without_relays_shows_no_sites(taped: Any) -> None:
    site = taped()
    status = site.status()
    assert status.sites == ()
    assert "via" not in text_of(status)
