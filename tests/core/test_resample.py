"""Mirrors fasth3_core/media/resample.py: pitch, level, length and place are kept, what is too high goes."""

import math

import pytest
import torch
from comfyui_fasth3.fasth3_core.errors import ConfigError, FastH3Error, GeometryError
from comfyui_fasth3.fasth3_core.media.resample import reference_sound, resample


def tone(rate, hertz, seconds=0.5):
    return torch.sin(2 * math.pi * hertz * torch.arange(int(rate * seconds), dtype=torch.float64) / rate).float()[None]


@pytest.mark.parametrize("rate", [8000, 22050, 44100, 48000, 44101, 96000])
def test_a_tone_is_the_same_tone(rate):
    """Away from the ends, about which a filter can only guess."""
    made = resample(tone(rate, 440), rate, 32000)
    assert made.shape == (1, math.ceil(tone(rate, 440).shape[1] * 32000 / rate))
    expected = tone(32000, 440)[:, : made.shape[1]]
    middle = slice(400, expected.shape[1] - 400)
    assert (made[:, : expected.shape[1]] - expected)[:, middle].abs().max() < 1e-4
    assert (made[:, : expected.shape[1]] * 1.01 - expected)[:, middle].abs().max() > 1e-4


def test_what_32_khz_cannot_hold_goes():
    assert resample(tone(96000, 20000), 96000, 32000)[:, 400:-400].abs().max() < 0.01
    assert resample(tone(96000, 15000), 96000, 32000)[:, 400:-400].abs().max() > 0.5


def test_its_own_rate_is_not_touched():
    wave = torch.randn(2, 100)
    assert resample(wave, 32000, 32000) is wave


@pytest.mark.parametrize("channels", [1, 2, 6])
def test_two_channels_of_any(channels):
    wave = torch.randn(1, channels, 1600)
    made = reference_sound(wave, 32000, 22)
    assert made.shape == (2, 1, 1600)
    expected = wave[0] if channels == 2 else wave[0].mean(dim=0, keepdim=True).expand(2, -1)
    assert torch.equal(made[:, 0], expected)


def test_cut_to_the_video():
    """int(frames / 24 * rate) samples at its own rate; the first sound of a batch."""
    wave = torch.randn(2, 2, 48000 * 3)
    made = reference_sound(wave, 48000, 22)
    assert made.shape[2] == math.ceil(int(22 / 24 * 48000) * 32000 / 48000)
    assert torch.equal(made, reference_sound(wave[:1], 48000, 22))


@pytest.mark.parametrize(
    ("wave", "rate", "error", "message"),
    [
        (torch.zeros(2, 100), 32000, GeometryError, r"shape \[2, 100\]"),
        (torch.zeros(1, 2, 0), 32000, GeometryError, r"shape \[1, 2, 0\]"),
        (torch.zeros(1, 2, 100), 0, ConfigError, "sample_rate=0"),
        (torch.zeros(1, 2, 100), 1, ConfigError, "sample_rate=1: expected 1000"),
        (torch.zeros(1, 2, 100), 2**40, ConfigError, "sample_rate="),
        (torch.zeros(1, 2, 100), float("nan"), ConfigError, "sample_rate=nan"),
        (torch.zeros(1, 2, 5), 44100, GeometryError, "5 samples at 44100 a second is too short"),
        (torch.full((1, 2, 100), float("nan")), 32000, FastH3Error, "NaN or infinity"),
    ],
)
def test_what_is_no_sound(wave, rate, error, message):
    with pytest.raises(error, match=message):
        reference_sound(wave, rate, 22)
