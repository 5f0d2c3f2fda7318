"""`ddiloco plan` on the command line: output, files and errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from decoupled_diloco.cli.main import app
from decoupled_diloco.errors import DilocoError
from decoupled_diloco.protocol.messages import StepFinished
from decoupled_diloco.tape.writer import TapeWriter
from decoupled_diloco_plan.bandwidth import published_tables
from decoupled_diloco_plan.bandwidth.plan_options import SYSTEMS

SMALL = ("--params", "100M", "--layers", "8", "--step-seconds", "1s")


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["plan", *arguments])


def printed(*arguments: str) -> str:
    result: Result = run(*arguments)
    assert result.exit_code == 0, (result.output, result.exception)
    return str(result.stdout)


def document(*arguments: str) -> Any:
    return json.loads(printed(*arguments, "--json"))


def refusal(*arguments: str) -> str:
    result = run(*arguments)
    assert result.exit_code != 0
    expected = isinstance(result.exception, DilocoError)
    return str(result.exception) if expected else " ".join(result.output.replace("│", "").split())


def test_the_published_rows_as_json() -> None:
    given = ("--params", "10e9", "--layers", "48", "--step-seconds", "0.8", "--period", "100")
    rows = document("--method", "published", *given, "--system", "streaming-overlap-4bit")
    assert [row["utilization"] for row in rows] == [0.5, 0.8, 0.9, 0.95, 0.99]
    assert {row["system"] for row in rows} == {"streaming-overlap-4bit"}
    assert rows[0]["gbit_per_second"] == pytest.approx(0.373, abs=0.001)
    everything = document("--method", "published", *given)
    assert {row["system"] for row in everything} == set(SYSTEMS) == set(published_tables.SYSTEMS)


def test_a_setting_is_found_and_printed() -> None:
    text = printed(*SMALL, "--sites", "4", "--link", "1Gbit", "--utilization", "0.95")
    assert text.startswith("100M parameters, 8 layers, a step of 1 s; 4 learners at 4 sites")
    assert "reaches 95 % (99.7 %) at the first setting tried: no link is a limit" in text
    assert document(*SMALL, "--link", "1Gbit", "--utilization", "95%")["aim"]["utilization"] == 0.95
    none = printed(*SMALL, "--sites", "4", "--link", "100kbit", "--utilization", "0.95")
    assert "no setting reaches 95 %; the best reaches" in " ".join(none.split())
    assert "limited by" in none


def test_the_document_has_every_number(tmp_path: Path) -> None:
    plot = tmp_path / "link.png"
    found = document(
        *SMALL,
        *("--site", "oslo:2:400Mbit/200Mbit:10ms:own", "--site", "rome:1:100Mbit/s:5ms"),
        *("--chips", "30", "--flops", "1e14", "--tokens-per-step", "1M", "--tokens", "1B"),
        *("--price-chip-hour", "2", "--price-gb", "0.1", "--plot", str(plot)),
    )
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert found["sites"][0]["down_gbit_per_second"] == pytest.approx(0.2)
    prediction = found["prediction"]
    assert 0 < prediction["utilization"] <= 1
    assert prediction["cost_per_million_tokens"] > 30 * 2 / 3600
    assert len(found["traffic"]) == 4
    assert [row["system"] for row in found["wall_clock"]] == [
        "data-parallel",
        "diloco",
        "streaming",
        "decoupled",
    ]
    assert found["wall_clock"][0]["scaling_laws"]["compute"] == pytest.approx(
        6 * 1e8 * 1e9 / (30 * 1e14)
    )
    assert len(found["bandwidth"]) == 20


def test_a_recipe_provides_its_model_and_settings() -> None:
    found = document("diloco", "--step-seconds", "0.25", "--link", "20Mbit", "--period", "12")
    assert found["setting"]["fragments"] == 1
    assert found["setting"]["uplink_format"] == "fp32"
    assert found["setting"]["quorum"] == 4
    assert found["setting"]["period"] == 12, "options override the file"
    assert found["model"]["params"] == 853_120
    assert found["prediction"]["compute_utilization"] < 1.0, "its learners wait"


def test_a_site_with_a_slow_uplink_gets_a_coarser_format() -> None:
    """A payload in bf16 has 67 Mbit, and a step of a second for itself."""
    sites = ("--site", "oslo:3:1Gbit", "--site", "rome:1:20Mbit/1Gbit", "--syncer-site", "oslo")
    text = " ".join(printed(*SMALL, *sites).split())
    assert "coarser ones for slow uplinks int8, int4, int2; rome sends in int2" in text
    found = document(*SMALL, *sites)
    assert [site["uplink_format"] for site in found["sites"]] == ["bf16", "int2"]
    assert found["prediction"]["rounds_kept"] == pytest.approx(1.0)
    fixed = document(*SMALL, *sites, "--up", "bf16")
    assert [site["uplink_format"] for site in fixed["sites"]] == ["bf16", "bf16"]
    assert fixed["prediction"]["rounds_kept"] < 0.9
    for search in ((), ("--utilization", "0.9", "--period", "24")):
        ladder = document("--up", "bf16,int4", *SMALL, *sites, *search)
        assert [site["uplink_format"] for site in ladder["sites"]] == ["bf16", "int4"]


def test_the_sums_of_a_relay_have_the_first_format() -> None:
    """The shards measure and change only the uplinks of learners that send to them."""
    sites = ("--site", "oslo:3:1Gbit", "--site", "rome:2:20Mbit/1Gbit", "--syncer-site", "oslo")
    found = document(*SMALL, *sites)
    assert found["sites"][1]["uplink_format"] == "int2"
    relays = document(*SMALL, *sites[:3], f"{sites[3]}:relay", *sites[4:])
    assert relays["sites"][1]["uplink_format"] == "bf16"
    assert relays["prediction"]["rounds_kept"] < found["prediction"]["rounds_kept"]


@pytest.mark.parametrize("search", [(), ("--utilization", "0.9")])
def test_the_downlink_has_one_format(search: tuple[str, ...]) -> None:
    text = refusal(*SMALL, "--link", "1Gbit", "--down", "bf16,int4", *search)
    assert "wire format 'bf16,int4' is unknown" in text


def test_a_ladder_begins_with_the_most_exact_format() -> None:
    text = refusal(*SMALL, "--link", "1Gbit", "--up", "int4,bf16")
    assert text == (
        "the formats 'int4,bf16' are not a ladder: put the most exact one first, and each "
        "following one with fewer bits"
    )


def test_rounds_that_learners_open_are_not_supported() -> None:
    text = refusal("async-local-sgd", "--step-seconds", "0.25", "--link", "20Mbit")
    assert "participation='async', which the planner does not support" in text


@pytest.mark.parametrize(
    ("option", "value", "shown", "most"),
    [
        ("--params", "1e400", "params=inf", "1e+14"),
        ("--params", "1e30", "params=1e+30", "1e+14"),
        ("--params", "0", "params=0", "1e+14"),
        ("--tokens-per-step", "0", "tokens_per_step=0", "1e+15"),
        ("--tokens-per-step", "1e400", "tokens_per_step=inf", "1e+15"),
        ("--chips", "0", "chips=0", "1e+09"),
        ("--sites", "20000", "sites=20000", "256"),
        ("--sites", "0", "sites=0", "256"),
        ("--learners", "-1", "learners=-1", "256"),
        ("--layers", "99999999999999999999", "layers=99999999999999999999", "10000"),
        ("--fragments", "1000000", "fragments=1000000", "10000"),
        ("--layers", "9" * 400, "layers=" + "9" * 400, "10000"),
        ("--period", "1000000000", "period=1000000000", "100000"),
    ],
)
def test_a_count_that_is_out_of_range_is_rejected(
    option: str, value: str, shown: str, most: str
) -> None:
    assert refusal("--params", "1B", "--link", "1Gbit", option, value) == (
        f"{shown} is out of range: it must be greater than 0 and at most {most}"
    )


def test_a_site_can_have_its_own_step_time(tmp_path: Path) -> None:
    sites = ("--site", "fast:1:1Gbit", "--site", "slow:1:1Gbit:20ms:step=3s")
    found = document(*SMALL, *sites, "--grace-margin", "0")
    assert [site["step_seconds"] for site in found["sites"]] == [1.0, 3.0]
    every_third, missed_before = 1 / 3, (1 - 1 / 3) / 2
    participation = found["sites"][1]["participation"]
    assert participation == pytest.approx(every_third + missed_before, abs=0.03)
    assert found["systems"][0]["utilization"] < 2 / 3
    assert "a step of 1 s to 3 s" in printed(*SMALL, *sites)


SITES = """
run = {learners = 7, max_steps = 9}
sync = {fragments = 4, sync_every = 8, overlap_steps = 2}
workload = {name = "paced", options = {step_seconds = 1.0}}
[[sites]]
name = "region"
learners = [0, 1, 2]
[[sites]]
name = "office"
learners = [3]
upstream = "region"
[[sites]]
name = "lab"
learners = [6]
"""


def test_merged_moments_and_an_average_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = {}
    end = "overlap_steps = 2}"
    for name, changed in {
        "none": end,
        "moments": "overlap_steps = 2, moments = {every = 4}}",
        "int8": 'overlap_steps = 2, moments = {names = ["exp_avg"], codec = "int8"}}',
        "average": end + "\nouter = {average = 0.5}",
    }.items():
        text = SITES.partition("[[sites]]")[0].replace(end, changed)
        (tmp_path / "run.toml").write_text(text)
        given = ("run.toml", "--link", "1Tbit", "--params", "1e9", "--layers", "20")
        found[name] = document(*given)
    up, down, memory, joining = (
        {name: each["prediction"][key] for name, each in found.items()}
        for key in (
            "up_bytes_per_step",
            "down_bytes_per_step",
            "shard_memory_bytes",
            "join_seconds",
        )
    )
    # Two moments in bf16 with every fourth version, or one in int8 with each.
    bits = {"none": 16, "moments": 16 + 2 * 16 / 4, "int8": 16 + 8.125, "average": 16}
    for name, each in bits.items():
        assert up[name] == pytest.approx(up["none"] * each / 16), name
        assert down[name] == pytest.approx(down["none"] * each / 16), name
    assert memory["moments"] >= memory["none"] + 2 * 8e9
    assert memory["int8"] >= memory["none"] + 8e9
    assert memory["average"] == pytest.approx(memory["none"] + 4e9)
    assert joining["moments"] > 2.5 * joining["none"]
    (tmp_path / "run.toml").write_text(SITES.replace(end, "overlap_steps = 2, moments = {}}"))
    shown = " ".join(printed("run.toml", "--link", "1Gbit").split())
    assert "merged moments 32 bit in each direction, on average over the rounds" in shown


def test_the_sites_of_a_run_have_relays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(SITES)
    given = ("run.toml", "--link", "1Gbit", "--latency", "10ms")
    found = document(*given)
    shown = [(s["name"], s["learners"], s["relay"], s["upstream"]) for s in found["sites"]]
    assert shown == [
        ("region", 3, True, ""),
        ("office", 1, True, "region"),
        ("lab", 1, True, ""),
        ("(no site)", 2, False, ""),
    ]
    assert found["setting"]["syncer"] == "hub"
    relays = found["relays"]
    assert [text.split()[3] for text in relays["warnings"]] == ["office", "lab"]
    assert relays["added_round_trip_seconds"] == pytest.approx(2 * (0.02 + 0.01))
    assert relays["bytes_per_step"] < relays["bytes_per_step_without"]
    assert set(relays["recommended"]) == {"with relays", "without relays"}
    text = printed(*given)
    assert "the relay of lab saves nothing, because the site has one learner" in text
    assert "assumed: 10 Gbit/s between a relay and its site's learners" in text
    for extra, message in (
        (("--relay",), "run.toml has [[sites]] with relays already"),
        (("--learners", "3"), "learners=3, but the sites of run.toml have 5"),
    ):
        assert message in refusal(*given, *extra)
    assert not any(site["relay"] for site in document(*given, "--sites", "7")["sites"])


def test_relays_of_equal_sites_save_all_but_one_payload_per_site(tmp_path: Path) -> None:
    sites = ("--sites", "4", "--learners", "32", "--relay", "--link", "150Mbit", "--up", "bf16")
    plot = tmp_path / "link.png"
    found = document(*SMALL, *sites, "--plot", str(plot))
    assert plot.read_bytes().startswith(b"\x89PNG")
    relays = found["relays"]
    saved = 1 - relays["bytes_per_step"] / relays["bytes_per_step_without"]
    assert saved == pytest.approx(7 / 8, abs=0.002)
    assert relays["round_seconds"] > 0
    by_link = {(t["place"], t["direction"]): t["bytes_per_step"] for t in found["traffic"]}
    without = {(t["place"], t["direction"]): t["bytes_per_step"] for t in relays["links_without"]}
    assert by_link["site-3", "up"] == pytest.approx(without["site-3", "up"] / 8, rel=0.01)
    assert found["systems"][-1]["system"] == "decoupled, no relays"
    both = relays["recommended"]
    assert both["with relays"]["reached"]
    periods = [both[name]["setting"]["period"] for name in ("with relays", "without relays")]
    assert periods[0] < periods[1], "relays allow a shorter period"
    text = " ".join(printed(*SMALL, *sites, "--relay-link", "40Gbit").split())
    assert "relays save 87.5 % of the bytes over the sites' links" in text
    assert "site-0 to site-3 up" in text
    assert "inside site-0 to" in text
    assert "assumed: 10 Gbit/s" not in text


def test_a_run_without_a_pace_uses_the_step_time_on_its_tape(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "has no tape of a finished run" in refusal("quickstart", "--link", "1Gbit")
    (tmp_path / "run.toml").write_text('run = {folder = "here", max_steps = 9}\n')
    tape = TapeWriter(tmp_path / "here" / "tape", "learner-0")
    for step in range(5):
        tape.event(0.5 * step, StepFinished(tokens=8))
    tape.close()
    found = document("run.toml", "--link", "100Mbit")
    assert found["model"]["step_seconds"] == pytest.approx(0.5)
    assert "from the tape in here" in found["assumed"][0]


def test_late_rounds_are_reported() -> None:
    late = document(*SMALL, "--sites", "2", "--link", "60Mbit", "--latency", "500ms")
    assert not late["aim"]["reached"]
    assert "the time of a round" in late["aim"]["binds"] or "link" in late["aim"]["binds"]
    assert document(*SMALL, "--sites", "2", "--link", "1Gbit")["aim"]["binds"] == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--link", "1Gbit"), "give --params"),
        (SMALL, "the link is missing"),
        ((*SMALL, "--link", "-1Gbit"), "'-1Gbit' is not a valid bandwidth"),
        ((*SMALL, "--link", "fast"), "'fast' is not a valid bandwidth"),
        ((*SMALL, "--link", "1Gbit", "--latency", "soon"), "'soon' is not a valid duration"),
        (("--params", "0", "--link", "1Gbit"), "params=0 is out of range"),
        ((*SMALL, "--link", "1Gbit", "--sites", "3", "--learners", "2"), "below sites=3"),
        ((*SMALL, "--link", "1Gbit", "--sites", "4", "--quorum", "5"), "exceeds learners=4"),
        ((*SMALL, "--link", "1Gbit", "--utilization", "95"), "utilization=95 is out of range"),
        ((*SMALL, "--link", "1Gbit", "--utilization", "most"), "'most' is not a valid share"),
        ((*SMALL, "--link", "1Gbit", "--up", "bf61"), "did you mean 'bf16'"),
        ((*SMALL, "--link", "1Gbit", "--price-gb", "1"), "needs --chips and --tokens-per-step"),
        ((*SMALL, "--link", "1Gbit", "--tokens", "1B"), "needs --tokens-per-step"),
        (
            (*SMALL, "--link", "1Gbit", "--partition", "layer-strided", "--fragments", "11"),
            "fragments=11 exceeds the 8 layers",
        ),
        ((*SMALL, "--site", "oslo:two:1Gbit"), "does not match NAME:LEARNERS"),
        ((*SMALL, "--site", "a:2:1Gbit:relay:relay=b"), "does not match NAME:LEARNERS"),
        ((*SMALL, "--site", "a:2:1Gbit:relay=b"), "'a' is behind 'b', which is not an earlier"),
        ((*SMALL, "--site", "a:2:1Gbit", "--relay"), "cannot be combined with --relay"),
        ((*SMALL, "--link", "1Gbit", "--own", "--relay"), "has a relay and 'own' links"),
        ((*SMALL, "--link", "1Gbit", "--relay-link", "1Gbit"), "--relay-link needs a relay"),
        ((*SMALL, "--link", "1Gbit", "--site", "a:1:1Gbit"), "cannot be combined with --link"),
        ((*SMALL, "--link", "1Gbit", "--method", "guess"), "--method 'guess' is unknown"),
        ((*SMALL, "--site", "a:1:1Gbit:step=soon"), "'soon' is not a valid duration"),
        ((*SMALL, "--site", "a:1:1Gbit:pace=1s"), "does not match NAME:LEARNERS"),
        (
            ("--method", "published", "--params", "1e9"),
            "requires --layers, --step-seconds, --period",
        ),
        (
            ("--method", "published", "--link", "1Gbit"),
            "--link cannot be combined with --method published",
        ),
        (
            ("--method", "published", "--latency", "1ms"),
            "--latency cannot be combined with --method published",
        ),
        (
            ("--method", "published", "quickstart"),
            "CONFIG cannot be combined with --method published",
        ),
        ((*SMALL, "--link", "1Gbit", "--system", "diloco"), "--system requires --method published"),
        ((*SMALL, "--link", "1Gbit", "--plot", "a.txt"), "does not end in .png"),
        ((*SMALL, "--link", "1Gbit", "--plot", "no/a.png"), "folder no does not exist; create it"),
    ],
)
def test_invalid_input_is_rejected(arguments: tuple[str, ...], message: str) -> None:
    assert message in refusal(*arguments)
