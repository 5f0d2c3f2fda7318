"""A small encoder that recognizes spoken letters and digits: `name = "speech"`.

The 36 recordings, one voice at 8 kHz, come with the package captcha, so nothing is downloaded.
Install the extra "speech" in the clone: `pip install -e 'packages/lab[speech]'`. An utterance has a
few random characters with pauses, and a random pitch, speed and noise. Budgets and weights count
one frame of 20 ms as one token. Padding does not count.

Shapes: `B` utterances, `T` frames of the longest one, `O` outputs (a quarter of T), `C` characters
of the longest text, `N` samples, `W` width.
"""

from __future__ import annotations

import hashlib
import math
import wave
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from decoupled_diloco.errors import ConfigError
from decoupled_diloco.workloads.inner import BuiltIn, InnerOptions, check_heads, evaluating
from decoupled_diloco.workloads.transformer import MLP, Block, initialize, rotary
from decoupled_diloco.workloads.workload import Picture

Samples: TypeAlias = NDArray[np.float64]
"""Sound, [N], from -1 to 1."""

CHARACTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"
BLANK = len(CHARACTERS)
"""CTC's class for an output without a new character."""

RATE = 8000
"""Samples per second of utterances."""

WIDTHS = {1: ("u1", 128.0), 2: ("<i2", 2.0**15), 4: ("<i4", 2.0**31)}
"""Type and range of a sample of a WAV file, by its bytes. Samples of one byte are unsigned."""

SILENCE = 0.02
"""Loudness below which the start and the end of a recording are removed."""

PAUSE_SECONDS_MAX = 0.15
NOISE_RANGE_DB = 20.0
WINDOW = 256
"""Samples of a frame, 32 ms. Frames overlap."""

HOP_SECONDS = 0.02
BANDS = 40
LOWEST_HZ = 60.0
POWER_MIN = 1e-6
"""Added to the power of a band before the logarithm. It is below that of the noise."""

KERNEL = 5
STRIDE = 2
"""Of each of the two convolutions, so the model has one output per 4 frames, or 80 ms."""

EVALUATION_BATCH_SIZE = 50
PICTURES = 4
TRAIN, HELD_OUT = range(2)


class SpeechBatch(NamedTuple):
    """Utterances and their texts, padded with zeros at the end.

    Attributes:
        features: Log-mel features, fp32 [B, T, 40].
        frames: Frames of each utterance, int64 [B].
        labels: Indices of its characters in `CHARACTERS`, int64 [B, C].
        lengths: Characters of each text, int64 [B].
    """

    features: Tensor
    frames: Tensor
    labels: Tensor
    lengths: Tensor


@dataclass(frozen=True)
class Utterance:
    """One utterance: features, fp32 [T, 40], and the indices of its characters."""

    features: Tensor
    characters: list[int]


class SpeechOptions(InnerOptions):
    """`[workload.options]` of "speech": model size, utterances, voices, inner optimizer."""

    layers: int = Field(default=3, ge=1)
    """Transformer blocks, at least 1. The defaults result in 0.18 M parameters."""

    width: int = Field(default=64, ge=2)
    """Size of the residual stream, a multiple of 2 × heads."""

    heads: int = Field(default=4, ge=1)
    """Attention heads, at least 1."""

    batch_size: int = Field(default=8, ge=1)
    """Utterances in one learner's batch, at least 1. With the defaults, an utterance has about 35
    frames of 20 ms, which are its tokens."""

    characters_max: int = Field(default=3, ge=1, le=20)
    """Limit of an utterance's characters, 1 to 20. An utterance has 1 to this number of them."""

    pitch_max: float = Field(default=1.2, ge=1, le=2)
    """Largest factor by which the voice's pitch is raised or lowered, 1 (unchanged) to 2."""

    speed_max: float = Field(default=1.25, ge=1, le=2)
    """Largest factor by which speech is faster or slower, 1 (unchanged) to 2."""

    noise_db: float = Field(default=15.0, ge=-10, le=60)
    """Lowest ratio of speech to white noise in dB, -10 to 60. The ratio of an utterance is up to 20
    dB higher."""

    own_voices: bool = False
    """Give each data partition a different voice: an equal share of the range of pitches. With
    `data.elastic = false`, each learner has one voice (non-IID). Held-out utterances have all
    pitches."""

    eval_utterances: int = Field(default=200, ge=1)
    """Held-out utterances per evaluation, at least 1. Raise it for less noise."""

    learning_rate: float = Field(default=8e-3, gt=0)
    """Peak learning rate, greater than 0."""

    @model_validator(mode="after")
    def _check_shape(self) -> SpeechOptions:
        check_heads(self, self.width, self.heads, 2, "rotary positions need heads of even size")
        return self


class SpeechWorkload(BuiltIn):
    """The built-in workload "speech"; see `decoupled_diloco.workloads.Workload` for the methods.

    Raises:
        ConfigError: The package captcha is not installed.
    """

    name: ClassVar[str] = "speech"
    options: SpeechOptions

    def __init__(self, options: SpeechOptions) -> None:
        self._folder = recordings_folder(self.name)
        self.options = options

    @cached_property
    def recordings(self) -> list[Samples]:
        """The sound of each of the `CHARACTERS`, read at first use."""
        return [read_recording(self._folder / each / "default.wav") for each in CHARACTERS]

    def _build(self) -> SpeechEncoder:
        return SpeechEncoder(self.options)

    def _batch(self, part: int, parts: int, step: int) -> SpeechBatch:
        first = step * self.options.batch_size
        numbers = range(first, first + self.options.batch_size)
        return padded([self.utterance(TRAIN, number, part, parts) for number in numbers])

    def utterance(self, kind: int, number: int, part: int = 0, parts: int = 1) -> Utterance:
        """Return one utterance, which depends only on the options and these arguments.

        Args:
            kind: `TRAIN`, or `HELD_OUT`, whose utterances are the same for each seed.
            number: Number of the utterance in its partition, at least 0.
            part: The partition, 0 to parts - 1.
            parts: Number of partitions.
        """
        options = self.options
        seed = options.seed if kind == TRAIN else 0
        rng = np.random.default_rng([seed, kind, part, number])
        characters = rng.integers(len(CHARACTERS), size=rng.integers(1, options.characters_max + 1))
        place = rng.random()
        if options.own_voices and kind == TRAIN:
            place = (part + place) / parts
        pitch = options.pitch_max ** (2 * place - 1)
        speed = options.speed_max ** rng.uniform(-1, 1)
        pieces = [_pause(rng, pitch)]
        for character in characters:
            pieces += [resampled(self.recordings[character], pitch), _pause(rng, pitch)]
        samples = np.concatenate(pieces)
        noise_db = options.noise_db + rng.uniform(0, NOISE_RANGE_DB)
        samples += rng.normal(0, samples.std() / 10 ** (noise_db / 20), len(samples))
        # Resampling changes duration and pitch. The interval between frames restores the duration
        # and sets the speed, without a change of the pitch.
        hop = round(HOP_SECONDS * RATE * speed / pitch)
        return Utterance(log_mel(torch.from_numpy(samples).float(), hop), characters.tolist())

    def loss(self, model: nn.Module, batch: SpeechBatch) -> Tensor:
        """Return the CTC loss in nats per character of a text, as the mean over all texts."""
        logits, outputs = self._outputs(model, batch)
        return F.ctc_loss(
            logits.float().log_softmax(-1).transpose(0, 1),
            batch.labels.to(logits.device),
            outputs,
            batch.lengths.to(logits.device),
            blank=BLANK,
            zero_infinity=True,  # fast speech may have fewer outputs than its text needs
        )

    def tokens(self, batch: SpeechBatch) -> int:
        """Return the number of frames without padding."""
        return int(batch.frames.sum())

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Return the mean loss and the character error rate on all held-out utterances.

        The rate is the number of characters to insert, delete or replace in the recognized texts,
        as a share of all spoken characters. It can be greater than 1.
        """
        loss = errors = characters = frames = 0.0
        with evaluating(model):
            for batch in self._held_out:
                loss += self.loss(model, batch).item() * len(batch.frames)
                for spoken, found in zip(
                    texts_of(batch), self.recognize(model, batch), strict=True
                ):
                    errors += edit_distance(spoken, found)
                    characters += len(spoken)
                frames += self.tokens(batch)
        return {
            "loss": loss / self.options.eval_utterances,
            "character_error_rate": errors / characters,
            "tokens": frames,
        }

    def recognize(self, model: nn.Module, batch: SpeechBatch) -> list[str]:
        """Return the recognized texts of a batch: at each output, the most likely class."""
        logits, outputs = self._outputs(model, batch)
        classes = logits.argmax(-1).tolist()
        return [decoded(row[:end]) for row, end in zip(classes, outputs.tolist(), strict=True)]

    def sample(self, model: nn.Module, prompt: str = "", length: int = 200) -> None:
        """Return ``None``: the model generates no text."""

    def pictures(self, model: nn.Module) -> list[Picture]:
        """Return spectrograms of held-out utterances, with their spoken and recognized texts."""
        batch = self._held_out[0]
        with evaluating(model):
            found = self.recognize(model, batch)
        shown = []
        for i, text in enumerate(texts_of(batch)[:PICTURES]):
            features = batch.features[i, : batch.frames[i]]
            low, high = features.aminmax()
            pixels = ((features - low) / (high - low)).T.flip(0)  # low frequencies at the bottom
            shown.append(Picture(f"spoken {text}, recognized {found[i] or 'nothing'}", pixels))
        return shown

    def describe(self) -> dict[str, Any]:
        """Describe the model and the data for the tape."""
        digest = hashlib.sha256(b"".join(each.tobytes() for each in self.recordings))
        return {
            "workload": self.name,
            "parameters": sum(parameter.numel() for parameter in self.model().parameters()),
            "corpus": "spoken letters and digits of the package captcha; a token is 20 ms",
            "corpus_sha256": digest.hexdigest(),
            "held_out_utterances": self.options.eval_utterances,
            "options": self.options.model_dump(mode="json"),
        }

    @staticmethod
    def _outputs(model: nn.Module, batch: SpeechBatch) -> tuple[Tensor, Tensor]:
        device = next(model.parameters()).device
        found: tuple[Tensor, Tensor] = model(batch.features.to(device), batch.frames.to(device))
        return found

    @cached_property
    def _held_out(self) -> list[SpeechBatch]:
        every = [self.utterance(HELD_OUT, number) for number in range(self.options.eval_utterances)]
        starts = range(0, len(every), EVALUATION_BATCH_SIZE)
        return [padded(every[start : start + EVALUATION_BATCH_SIZE]) for start in starts]


class SpeechEncoder(nn.Module):
    """Two convolutions, non-causal blocks with rotary positions, and a head.

    The outputs of an utterance do not depend on the padding of its batch.
    """

    def __init__(self, options: SpeechOptions) -> None:
        super().__init__()
        width = options.width
        self.head_size = width // options.heads
        self.first = nn.Conv1d(BANDS, width, KERNEL, STRIDE, padding=KERNEL // 2, bias=False)
        self.second = nn.Conv1d(width, width, KERNEL, STRIDE, padding=KERNEL // 2, bias=False)
        self.blocks = nn.ModuleList(
            Block(width, options.heads, MLP(width, 4 * width), causal=False)
            for _ in range(options.layers)
        )
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, len(CHARACTERS) + 1, bias=False)
        initialize(self, options.layers)
        for convolution in (self.first, self.second):
            nn.init.kaiming_normal_(convolution.weight)

    def forward(self, features: Tensor, frames: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits of the characters and the blank, and the outputs of each utterance.

        Args:
            features: Log-mel features, float [B, T, 40], with zeros as padding.
            frames: Frames without padding, int64 [B].

        Returns:
            Float [B, O, 37], and int64 [B].
        """
        x = F.relu(self.first(features.mT))
        inner = _strided(frames)
        x = x * _inside(inner, x.shape[2])[:, None]  # otherwise the next one would see padding
        x = F.relu(self.second(x)).mT
        outputs = _strided(inner)
        attended = _inside(outputs, x.shape[1])[:, None, None]
        with torch.device(x.device):
            angles = rotary(x.shape[1], self.head_size)
        for block in self.blocks:
            x = block(x, angles, attended)
        return self.head(self.norm(x)), outputs


def _strided(counts: Tensor) -> Tensor:
    """Return the lengths after a convolution."""
    return (counts + STRIDE - 1) // STRIDE


def _inside(counts: Tensor, longest: int) -> Tensor:
    """Return which of `longest` places are not padding: bool [B, longest]."""
    return torch.arange(longest, device=counts.device) < counts[:, None]


def recordings_folder(workload: str) -> Path:
    """Return the folder with the recordings, one folder per character.

    Raises:
        ConfigError: The package captcha is not installed.
    """
    found = find_spec("captcha")
    if found is None or found.origin is None:
        raise ConfigError(
            f"workload {workload!r} requires the recordings of the package captcha, which is not "
            "installed: run pip install -e 'packages/lab[speech]' in the clone"
        )
    return Path(found.origin).parent / "data"


def read_recording(path: Path) -> Samples:
    """Read a WAV file at 8 kHz, as the mean of its channels, without silence at its ends.

    Raises:
        ConfigError: The file is missing, silent or not a WAV file with integer samples of 1, 2 or 4
            bytes.
    """
    try:
        with wave.open(str(path)) as file:
            form, content = file.getparams(), file.readframes(file.getnframes())
    except (OSError, EOFError, wave.Error) as error:
        raise ConfigError(
            f"{path} is not a readable WAV file ({error}): install the package captcha again"
        ) from error
    if form.sampwidth not in WIDTHS:
        raise ConfigError(
            f"{path} has {form.sampwidth} bytes per sample: convert it to 1, 2 or 4 bytes"
        )
    kind, top = WIDTHS[form.sampwidth]
    samples = np.frombuffer(content, kind).astype(np.float64) / top
    if form.sampwidth == 1:
        samples -= 1
    samples = resampled(samples.reshape(-1, form.nchannels).mean(1), form.framerate / RATE)
    loud = np.flatnonzero(np.abs(samples) > SILENCE)
    if not len(loud):
        raise ConfigError(
            f"{path} is silent: no sample exceeds {SILENCE:g} of the range; record it again"
        )
    return samples[loud[0] : loud[-1] + 1]


def resampled(samples: Samples, step: float) -> Samples:
    """Return every `step`-th sample, interpolated linearly. A step above 1 raises the pitch."""
    places = np.arange(0, len(samples), step)
    found: Samples = np.interp(places, np.arange(len(samples)), samples)
    return found


def _pause(rng: np.random.Generator, pitch: float) -> Samples:
    """Return silence that is as long as without the change of the pitch; see `utterance`."""
    return np.zeros(round(rng.uniform(0, PAUSE_SECONDS_MAX) * RATE / pitch))


def mel_filters() -> Tensor:
    """Return the weights of each frequency line in each band: fp32 [40, 129].

    The bands are triangles of equal width on the mel scale, from 60 Hz to 4 kHz. Each one has its
    peak of 1 where its neighbors end.
    """
    low_mel, high_mel = (2595 * math.log10(1 + hz / 700) for hz in (LOWEST_HZ, RATE / 2))
    corners = 700 * (10 ** (np.linspace(low_mel, high_mel, BANDS + 2) / 2595) - 1)
    low, peak, high = (corners[i : i + BANDS, None] for i in range(3))
    lines = np.arange(WINDOW // 2 + 1) * RATE / WINDOW
    rise, fall = (lines - low) / (peak - low), (high - lines) / (high - peak)
    return torch.from_numpy(np.minimum(rise, fall).clip(0)).float()


FILTERS = mel_filters()
HANN = torch.hann_window(WINDOW, dtype=torch.float32)


def log_mel(samples: Tensor, hop: int) -> Tensor:
    """Return the log-mel features of a sound, fp32 [T, 40], with mean 0 and deviation 1.

    Args:
        samples: fp32 [N].
        hop: Samples from one frame to the next, at least 1. T is N // hop + 1.
    """
    spectrum = torch.stft(
        samples, WINDOW, hop, window=HANN, pad_mode="constant", return_complex=True
    )
    power = torch.view_as_real(spectrum).square().sum(-1)  # faster than abs().square()
    bands = (FILTERS @ power + POWER_MIN).log().mT
    return (bands - bands.mean()) / bands.std()


def padded(utterances: Sequence[Utterance]) -> SpeechBatch:
    """Return utterances as one batch."""
    labels = [torch.tensor(each.characters, dtype=torch.int64) for each in utterances]
    return SpeechBatch(
        features=pad_sequence([each.features for each in utterances], batch_first=True),
        frames=torch.tensor([len(each.features) for each in utterances], dtype=torch.int64),
        labels=pad_sequence(labels, batch_first=True),
        lengths=torch.tensor([len(each) for each in labels], dtype=torch.int64),
    )


def texts_of(batch: SpeechBatch) -> list[str]:
    """Return the spoken texts of a batch."""
    rows = zip(batch.labels.tolist(), batch.lengths.tolist(), strict=True)
    return ["".join(CHARACTERS[each] for each in row[:length]) for row, length in rows]


def decoded(classes: Iterable[int]) -> str:
    """Return the text of the most likely classes: equal neighbors are one, blanks are none.

    >>> decoded([36, 1, 1, 36, 1, 10])
    '11A'
    """
    return "".join(CHARACTERS[each] for each, _ in groupby(classes) if each != BLANK)


def edit_distance(text: str, other: str) -> int:
    """Return the fewest characters to insert, delete or replace that make two texts equal.

    >>> edit_distance("ABC", "XBCD")
    2
    """
    distances = list(range(len(other) + 1))
    for i, a in enumerate(text, 1):
        diagonal, distances[0] = distances[0], i
        for j, b in enumerate(other, 1):
            found = min(distances[j] + 1, distances[j - 1] + 1, diagonal + (a != b))
            diagonal, distances[j] = distances[j], found
    return distances[-1]
