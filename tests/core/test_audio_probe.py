"""Mirrors fasth3_core/media/probe.py: what is wrong is named with its number, healthy sound left alone."""

import pytest
import torch
from comfyui_fasth3.fasth3_core.media.probe import probe_audio

L = 64000
T = torch.arange(L) / 32000
SINE = 0.5 * torch.sin(2 * torch.pi * 440 * T)


def drums():
    hit = 0.8 * torch.randn(8000).clamp(-1, 1) * torch.exp(-torch.arange(8000) / 1500)
    return torch.cat([torch.nn.functional.pad(hit, (0, 8000)) for _ in range(4)])


def spiked(*at, height=0.5):
    wave = SINE.clone()
    wave[list(at)] += height
    return wave


HEALTHY = {
    "sine": SINE, "noise": (0.3 * torch.randn(L)).clamp(-0.99, 0.99), "drums": drums(), "square": 0.5 * SINE.sign(),
    "kick": torch.sin(2 * torch.pi * 60 * T) * torch.exp(-20 * T), "quiet": 0.001 * SINE,
}  # fmt: skip
BROKEN = {
    "nan": (SINE.index_fill(0, torch.tensor([16000]), float("nan")), "2 samples (0.0%) are not finite", "0.50 s"),
    "all-nan": (torch.full((L,), float("inf")), "128000 samples (100.0%)", "0.00 s"),
    "silent": (torch.zeros(L), "silent (RMS 0.0e+00)", ""),
    "offset": (0.2 + 0.2 * SINE, "0.20 off zero", ""),
    "constant": (torch.full((L,), 0.3), "channel 1 is constant at 0.300", "0.30 off zero"),
    "clipped": ((6 * SINE).clamp(-1, 1), "samples are clipped", ""),
    "one-click": (spiked(40000), "1 click, the largest 0.50 high at 1.25 s", ""),
    "clicks": (spiked(1000, 20000, 40000), "3 clicks, the largest 0.5", ""),
    "click-in-silence": (torch.zeros(L).index_fill(0, torch.tensor([99]), 0.9), "1 click, the largest 0.90", ""),
    "empty": (torch.zeros(0), "empty", ""),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy(name):
    assert probe_audio(HEALTHY[name].expand(1, 2, -1)).warnings == ()


@pytest.mark.parametrize("name", BROKEN)
def test_broken(name):
    wave, *texts = BROKEN[name]
    found = "; ".join(probe_audio(wave.expand(1, 2, -1)).warnings)
    assert all(text in found for text in texts), found


def test_one_dead_channel():
    assert probe_audio(torch.stack([SINE, torch.zeros(L)])[None]).warnings == ("channel 1 is constant at 0.000",)


def test_figures():
    probe = probe_audio((0.1 + SINE).expand(1, 2, -1))
    assert probe.peak == pytest.approx(0.6, abs=1e-3) and probe.offset == pytest.approx(0.1, abs=1e-4)
    assert probe.rms == pytest.approx((0.1**2 + 0.125) ** 0.5, rel=1e-3)
    assert probe.to_dict()["clicks"] == 0
