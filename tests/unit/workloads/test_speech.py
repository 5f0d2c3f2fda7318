"""The speech workload: recordings, utterances, features, the encoder, decoding, and training."""

from __future__ import annotations

import importlib.util
import itertools
import json
import math
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from decoupled_diloco.errors import ConfigError
from decoupled_diloco.workloads import load_workload
from decoupled_diloco.workloads.workload import Pictured
from decoupled_diloco_lab.workloads import speech
from decoupled_diloco_lab.workloads.speech import (
    BANDS,
    BLANK,
    CHARACTERS,
    FILTERS,
    HELD_OUT,
    RATE,
    TRAIN,
    WINDOW,
    SpeechBatch,
    SpeechOptions,
    SpeechWorkload,
    decoded,
    edit_distance,
    log_mel,
    padded,
    read_recording,
    resampled,
    texts_of,
)

EXPECTED_TEXTS = ["MI9", "AT", "T", "WZ", "H6", "1"]
EXPECTED_FRAMES = [73, 27, 15, 32, 36, 20]
EXPECTED_VALUES = [-1.4664, -0.2875, -0.032, -0.8358, -0.343, -0.285]

TINY: dict[str, Any] = {"layers": 1, "width": 32, "heads": 2, "batch_size": 4}


@pytest.fixture(scope="module")
def workload() -> SpeechWorkload:
    return SpeechWorkload(SpeechOptions(**TINY, eval_utterances=12))


def tone(hz: float, seconds: float = 0.5) -> np.ndarray[Any, np.dtype[np.float64]]:
    return np.sin(2 * np.pi * hz * np.arange(round(seconds * RATE)) / RATE)


def written(path: Path, content: bytes, channels: int, width: int, rate: int = RATE) -> Path:
    with wave.open(str(path), "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(width)
        file.setframerate(rate)
        file.writeframes(content)
    return path


def test_there_is_a_recording_of_each_character_without_silence(workload: SpeechWorkload) -> None:
    assert len(workload.recordings) == len(CHARACTERS) == BLANK == 36
    for samples in workload.recordings:
        assert 0.1 < len(samples) / RATE < 0.8
        assert 0.1 < np.abs(samples).max() <= 1
        assert min(abs(samples[0]), abs(samples[-1])) > speech.SILENCE
    assert len({each.tobytes() for each in workload.recordings}) == 36


@pytest.mark.parametrize(
    ("width", "kind", "top", "middle"),
    [(1, "u1", 127, 128), (2, "<i2", 2**15 - 1, 0), (4, "<i4", 2**31 - 1, 0)],
)
@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize("rate", [8000, 16000])
def test_a_wav_file_is_read_as_its_header_describes_it(
    tmp_path: Path, width: int, kind: str, top: int, middle: int, channels: int, rate: int
) -> None:
    samples = 0.9 * np.cos(2 * np.pi * 200 * np.arange(rate) / rate)
    values = np.repeat((middle + top * samples).astype(kind), channels)
    found = read_recording(written(tmp_path / "a.wav", values.tobytes(), channels, width, rate))
    assert abs(len(found) - RATE) < 20
    assert (
        np.abs(found[:4000] - 0.9 * np.cos(2 * np.pi * 200 * np.arange(4000) / RATE)).max() < 0.02
    )


def test_an_unreadable_recording_is_rejected(tmp_path: Path) -> None:
    silent = written(tmp_path / "silent.wav", bytes(100), 1, 2)
    wide = written(tmp_path / "wide.wav", bytes(99), 1, 3)
    text = tmp_path / "text.wav"
    text.write_text("no sound")
    for path, sentence in (
        (silent, " is silent: no sample exceeds 0.02 of the range; record it again"),
        (wide, " has 3 bytes per sample: convert it to 1, 2 or 4 bytes"),
        (text, " is not a readable WAV file (file does not start with RIFF id): "),
        (tmp_path / "none.wav", " is not a readable WAV file ([Errno 2] "),
    ):
        with pytest.raises(ConfigError) as error:
            read_recording(path)
        assert str(error.value).startswith(f"{path}{sentence}")


def test_a_band_peaks_where_its_neighbors_end() -> None:
    assert FILTERS.shape == (BANDS, WINDOW // 2 + 1)
    assert FILTERS.min() == 0
    assert (FILTERS.sum(1) > 0).all(), "each band has a line"
    lines = torch.arange(WINDOW // 2 + 1) * RATE / WINDOW
    centers = (FILTERS * lines).sum(1) / FILTERS.sum(1)
    assert (centers.diff() > 0).all()
    between = (lines > centers[1]) & (lines < centers[-2])
    assert torch.allclose(FILTERS.sum(0)[between], torch.ones(int(between.sum())), atol=1e-5)


@pytest.mark.parametrize("hz", [300, 1000, 3000])
def test_a_tone_is_loudest_in_its_band(hz: float) -> None:
    features = log_mel(torch.from_numpy(tone(hz)).float(), 160)
    assert features.shape == (len(tone(hz)) // 160 + 1, BANDS)
    assert features.mean().abs() < 1e-5
    assert features.std() == pytest.approx(1)
    band = int(FILTERS[:, round(hz * WINDOW / RATE)].argmax())
    assert (features[3:-3].argmax(1) == band).all()


def test_the_volume_does_not_change_the_features() -> None:
    sound = torch.from_numpy(tone(700) + tone(1900)).float() + torch.randn(4000) / 10
    assert torch.allclose(log_mel(sound, 160), log_mel(sound / 4, 160), atol=1e-2)


def test_resampling_changes_the_pitch() -> None:
    higher = resampled(tone(400), 1.25)
    assert np.abs(higher - tone(500, len(higher) / RATE)).max() < 0.05


def test_pitch_and_speed_are_independent() -> None:
    def duration(**changes: float) -> float:
        options = SpeechOptions(**{**TINY, "pitch_max": 1, "speed_max": 1, **changes})
        made = [SpeechWorkload(options).utterance(TRAIN, i) for i in range(20)]
        return sum(len(each.features) for each in made)

    plain = duration()
    assert duration(pitch_max=2) == pytest.approx(plain, rel=0.02)
    each = [
        [
            len(SpeechWorkload(SpeechOptions(**TINY, speed_max=s)).utterance(TRAIN, i).features)
            for i in range(20)
        ]
        for s in (1.0, 2.0)
    ]
    ratios = [a / b for a, b in zip(*each, strict=True)]
    assert min(ratios) < 0.75
    assert max(ratios) > 1.4


def test_utterances_depend_on_their_number_alone(workload: SpeechWorkload) -> None:
    again = SpeechWorkload(workload.options)
    first = [workload.utterance(TRAIN, number, 1, 4) for number in range(6)]
    for number in reversed(range(6)):
        other = again.utterance(TRAIN, number, 1, 4)
        assert other.characters == first[number].characters
        assert torch.equal(other.features, first[number].features)


def test_the_first_utterances_are_the_same_on_every_machine(workload: SpeechWorkload) -> None:
    made = [workload.utterance(kind, i) for kind in (TRAIN, HELD_OUT) for i in range(3)]
    assert texts_of(padded(made)) == EXPECTED_TEXTS
    assert [len(each.features) for each in made] == EXPECTED_FRAMES
    assert [each.features[7, 20].item() for each in made] == pytest.approx(
        EXPECTED_VALUES, abs=1e-3
    )


def test_partitions_and_held_out_utterances_differ(workload: SpeechWorkload) -> None:
    made = [
        workload.utterance(kind, i, part, 2)
        for kind, part in ((0, 0), (0, 1), (1, 0))
        for i in range(20)
    ]
    assert len({each.features.numpy().tobytes() for each in made}) == 60
    other = SpeechWorkload(workload.options.model_copy(update={"seed": 1}))
    assert torch.equal(
        other.utterance(HELD_OUT, 3).features, workload.utterance(HELD_OUT, 3).features
    )
    assert other.utterance(TRAIN, 3).characters != workload.utterance(TRAIN, 3).characters


def test_each_partition_has_its_own_voice(monkeypatch: pytest.MonkeyPatch) -> None:
    pitches: list[float] = []
    monkeypatch.setattr(
        speech,
        "resampled",
        lambda samples, pitch: (pitches.append(pitch), resampled(samples, pitch))[1],
    )

    def range_of(own: bool, part: int, kind: int = TRAIN) -> tuple[float, float]:
        workload = SpeechWorkload(SpeechOptions(**TINY, own_voices=own))
        assert workload.recordings
        pitches.clear()
        for number in range(40):
            workload.utterance(kind, number, part, 4)
        return min(pitches), max(pitches)

    ends = [1.2 ** (k / 2 - 1) for k in range(5)]
    for part in range(4):
        low, high = range_of(True, part)
        assert ends[part] <= low < high <= ends[part + 1]
    for low, high in (range_of(False, 0), range_of(True, 0, HELD_OUT)):
        assert low < ends[1]
        assert high > ends[3]


def test_a_batch_is_padded_and_its_tokens_are_frames(workload: SpeechWorkload) -> None:
    batch = next(workload.batches(1, 4, start=2))
    made = [workload.utterance(TRAIN, number, 1, 4) for number in range(8, 12)]
    assert batch.features.shape == (4, max(len(each.features) for each in made), BANDS)
    assert workload.tokens(batch) == sum(len(each.features) for each in made)
    assert texts_of(batch) == ["".join(CHARACTERS[c] for c in each.characters) for each in made]
    for i, each in enumerate(made):
        assert torch.equal(batch.features[i, : batch.frames[i]], each.features)
        assert batch.features[i, batch.frames[i] :].count_nonzero() == 0


def test_a_restarted_learner_continues_at_the_same_batch(workload: SpeechWorkload) -> None:
    whole = list(itertools.islice(workload.batches(1, 3), 6))
    resumed = itertools.islice(workload.batches(1, 3, start=4), 2)
    for batch, other in zip(whole[4:], resumed, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(batch, other, strict=True))


def test_outputs_do_not_depend_on_the_padding(workload: SpeechWorkload) -> None:
    model = workload.model()
    made = [workload.utterance(TRAIN, number) for number in range(6)]
    with torch.no_grad():
        together, counts = model(*padded(made)[:2])
        for i, each in enumerate(made):
            alone, count = model(*padded([each])[:2])
            assert count[0] == counts[i] == math.ceil(len(each.features) / 4)
            assert torch.allclose(alone[0], together[i, : counts[i]], atol=1e-5)


def test_every_output_depends_on_the_whole_utterance(workload: SpeechWorkload) -> None:
    model, batch = workload.model(), padded([workload.utterance(TRAIN, 1)])
    changed = batch.features.clone()
    changed[0, 0] += 1
    with torch.no_grad():
        first, second = (model(each, batch.frames)[0] for each in (batch.features, changed))
    assert ((first - second).abs().amax(-1) > 0).all()


def sure(rows: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Return logits whose most likely classes are these, and their number in each row."""
    longest = max(map(len, rows))
    logits = torch.zeros(len(rows), longest, BLANK + 1)
    for i, row in enumerate(rows):
        logits[i, torch.arange(len(row)), torch.tensor(row)] = 20.0
    return logits, torch.tensor([len(row) for row in rows])


class Fixed(torch.nn.Module):
    """Returns the same logits for any batch."""

    def __init__(self, rows: list[list[int]]) -> None:
        super().__init__()
        self.unused = torch.nn.Parameter(torch.zeros(()))
        self.outputs = sure(rows)

    def forward(self, features: Tensor, frames: Tensor) -> tuple[Tensor, Tensor]:
        return self.outputs


def test_the_loss_is_that_of_the_most_likely_path(workload: SpeechWorkload) -> None:
    batch = SpeechBatch(
        torch.zeros(2, 8, BANDS),
        torch.tensor([8, 6]),
        torch.tensor([[1, 1], [9, 0]]),
        torch.tensor([2, 1]),
    )
    right = Fixed([[1, BLANK, 1, BLANK], [BLANK, 9, 9]])
    wrong = Fixed([[1, 1, 1, BLANK], [BLANK, 9, 8]])
    assert workload.loss(right, batch).item() < 1e-5
    assert workload.loss(wrong, batch).item() > 5
    assert workload.recognize(right, batch) == texts_of(batch) == ["11", "9"]
    assert workload.recognize(wrong, batch) == ["1", "98"]


def test_decoding_joins_equal_neighbors_and_leaves_out_blanks() -> None:
    assert decoded([]) == decoded([BLANK, BLANK]) == ""
    assert decoded([10, 10, BLANK, 10, 3, 3, BLANK]) == "AA3"


@pytest.mark.parametrize(
    ("text", "other", "distance"),
    [
        ("", "", 0),
        ("AB", "", 2),
        ("", "AB", 2),
        ("KITTEN", "SITTING", 3),
        ("ABC", "BC", 1),
        ("AB", "BA", 2),
    ],
)
def test_the_edit_distance(text: str, other: str, distance: int) -> None:
    assert edit_distance(text, other) == distance


def test_the_error_rate_is_the_share_of_wrong_characters(workload: SpeechWorkload) -> None:
    held_out = padded([workload.utterance(HELD_OUT, number) for number in range(12)])
    model = Fixed([[BLANK] * 60] * 12)
    assert workload.evaluate(model)["character_error_rate"] == 1
    texts = texts_of(held_out)
    rows = [[x for c in text for x in (CHARACTERS.index(c), BLANK)] for text in texts]
    assert workload.evaluate(Fixed(rows))["character_error_rate"] == 0
    rows[0] = [*rows[0], 5]
    rows[1] = rows[1][2:]
    found = workload.evaluate(Fixed(rows))
    assert found["character_error_rate"] == pytest.approx(2 / sum(map(len, texts)))
    assert found["tokens"] == held_out.frames.sum()


def test_a_batch_can_be_learned_by_heart(workload: SpeechWorkload) -> None:
    """Training from one that recognizes nothing; other utterances become more likely, too."""
    model, batch = workload.model(), next(workload.batches(0, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    before = workload.evaluate(model)
    assert edit_distance("".join(texts_of(batch)), "".join(workload.recognize(model, batch))) > 5
    for _ in range(80):
        workload.loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert workload.recognize(model, batch) == texts_of(batch)
    assert workload.evaluate(model)["loss"] < before["loss"]
    assert model.training


def test_pictures_show_spectrograms_and_texts(workload: SpeechWorkload) -> None:
    assert isinstance(workload, Pictured)
    model = workload.model()
    pictures = workload.pictures(model)
    assert len(pictures) == 4
    assert model.training
    for number, (caption, pixels) in enumerate(pictures):
        made = workload.utterance(HELD_OUT, number)
        assert pixels.shape == (BANDS, len(made.features))
        assert (pixels.min(), pixels.max()) == (0, 1)
        assert caption.startswith(f"spoken {texts_of(padded([made]))[0]}, recognized ")
        row, column = divmod(int(pixels.argmax()), len(made.features))
        assert made.features[column, BANDS - 1 - row] == made.features.max()


def test_describe_is_plain(workload: SpeechWorkload) -> None:
    facts = json.loads(json.dumps(workload.describe()))
    assert facts["held_out_utterances"] == 12
    assert facts["parameters"] == sum(p.numel() for p in workload.model().parameters())
    assert workload.sample(workload.model()) is None
    assert 150_000 < load_workload("speech", {}).describe()["parameters"] < 300_000


def test_the_error_without_captcha_has_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(speech, "find_spec", lambda n: None if n == "captcha" else found(n))
    with pytest.raises(ConfigError) as error:
        load_workload("speech", {})
    assert str(error.value) == (
        "workload 'speech' requires the recordings of the package captcha, which is not installed: "
        "run pip install -e 'packages/lab[speech]' in the clone"
    )


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"width": 36},
            "width=36 in [workload.options] is not a multiple of 2 × heads=8: "
            "rotary positions need heads of even size; change width or heads",
        ),
        ({"pitch_max": 0.5}, "pitch_max=0.5 in [workload.options] is out of range: "),
        ({"speed_max": 3}, "speed_max=3 in [workload.options] is out of range: "),
        ({"noise_db": 90}, "noise_db=90 in [workload.options] is out of range: "),
        ({"characters_max": 0}, "characters_max=0 in [workload.options] is out of range: "),
        ({"voice": 3}, "unknown key 'voice' in [workload.options]: "),
    ],
)
def test_invalid_options_are_rejected(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        SpeechOptions(**options)
    assert str(error.value).startswith(sentence)
