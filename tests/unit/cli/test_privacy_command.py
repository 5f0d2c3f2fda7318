"""`ddiloco privacy` prints the cost of privacy before a run."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from decoupled_diloco.cli.main import app
from decoupled_diloco.cli.privacy_command import noise_ratio

RUN = """
[run]
name = "private"
learners = {learners}
max_steps = 240
[sync]
sync_every = 24
[sync.merge]
rule = "mean"
weighting = "uniform"
norm_gate = 0
buffers = "local"
[privacy.dp]
clip = 1.0
noise_multiplier = 10.0
epsilon_max = {epsilon}
delta = 1e-6
"""


def printed(folder: Path, *options: str, learners: int = 10, epsilon: float = 4.0) -> str:
    file = folder / "run.toml"
    file.write_text(RUN.format(learners=learners, epsilon=epsilon))
    result = CliRunner().invoke(app, ["privacy", str(file), *options])
    assert result.exit_code == 0, result.output
    return result.output


def test_ten_learners_are_advised_to_protect_examples(tmp_path: Path) -> None:
    text = printed(tmp_path, "--parameters", "1000000")
    assert "private: 10 learners, 11 periods of 24 steps, noise of 10 clips" in text
    assert "spends ε = 1.44 of 4." in text
    assert "The noise of each mean is 1e+03 times as long as the clip" in text
    assert "It takes about 10000 learners" in text
    assert "Opacus" in text
    for learners in (8, 10, 64, 1_000, 10_000):
        assert f"\n{learners}" in text


def test_enough_learners_are_advised_nothing(tmp_path: Path) -> None:
    text = printed(tmp_path, "--parameters", "10000", learners=5_000)
    assert "0.2 times as long" in text
    assert "Opacus" not in text


def test_a_run_that_is_too_long_is_told_how_to_fit(tmp_path: Path) -> None:
    text = printed(tmp_path, "--parameters", "10000", epsilon=1.0)
    assert "The run is longer than ε allows: after 5 periods" in text
    assert "Raise noise_multiplier to 14" in text


def test_the_plot_is_a_picture(tmp_path: Path) -> None:
    printed(tmp_path, "--parameters", "10000", "--plot", str(tmp_path / "p.svg"))
    picture = (tmp_path / "p.svg").read_text()
    assert picture.startswith('<svg xmlns="http://www.w3.org/2000/svg"')
    assert picture.count('class="line') == 3


def test_a_run_without_privacy_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[run]\nmax_steps = 9\n")
    result = CliRunner().invoke(app, ["privacy", str(file)])
    assert result.exit_code == 2
    assert "run has no [privacy.dp], so its weights may reveal anything" in result.stderr


def test_the_ratio_is_that_of_a_mean() -> None:
    assert noise_ratio(2.0, 10_000, 100) == 2.0


def test_an_adaptive_clip_says_how_well_it_measures(tmp_path: Path) -> None:
    text = printed(tmp_path, "--parameters", "10000", "--set", "privacy.dp.clip_quantile=0.5")
    assert "Each merge measures the share of contributions within the clip to ±7.7e+02" in text
    assert "The noise of each mean is 105 times" in text, "5 % more than without"
    assert "spends ε = 1.44 of 4." in text, "which pays for the counts"
