"""Mirrors nodes/_latents.py: ComfyUI's pair of streams, from any node, to plain tensors and back."""

from types import SimpleNamespace

import pytest
import torch
from comfyui_fasth3.fasth3_core.errors import ContractError, GeometryError
from comfyui_fasth3.nodes import _latents
from comfyui_fasth3.nodes._host_standalone import StreamPair

VIDEO, AUDIO = torch.randn(1, 24, 7, 4, 6), torch.randn(1, 32, 2, 37)


def pair(*tensors):
    return {"samples": StreamPair(tensors)}


def test_round_trip(host):
    video, audio = _latents.split(_latents.join(VIDEO, AUDIO))
    assert torch.equal(video, VIDEO) and torch.equal(audio, AUDIO)


def test_any_nested_class_will_do():
    foreign = SimpleNamespace(is_nested=True, tensors=(VIDEO, AUDIO), unbind=lambda: (VIDEO, AUDIO))
    assert _latents.split({"samples": foreign})[0] is VIDEO


def test_pair_has_the_form_of_a_nested_tensor():
    nested = StreamPair((VIDEO, AUDIO))
    assert nested.is_nested is True
    assert nested.unbind() == nested.tensors == [VIDEO, AUDIO]


BAD = {
    "video-only": ({"samples": VIDEO}, ContractError, r"one stream \[1, 24, 7, 4, 6\]"),
    "three-streams": (pair(VIDEO, AUDIO, AUDIO), ContractError, "the streams"),
    "swapped": (pair(AUDIO, VIDEO), ContractError, "the streams"),
    "other-model": (pair(torch.zeros(1, 16, 7, 4, 6), AUDIO), ContractError, "another model"),
    "mono": (pair(VIDEO, AUDIO[:, :, :1]), ContractError, "another model"),
    "batch": (pair(VIDEO.expand(2, -1, -1, -1, -1), AUDIO.expand(2, -1, -1, -1)), GeometryError, "batch of 2"),
    "mask": (pair(VIDEO, AUDIO) | {"noise_mask": torch.ones(1)}, ContractError, "noise mask"),
    "one-latent": (pair(VIDEO[:, :, :1], AUDIO), GeometryError, "1 latent frames.*Nearest: 2 or 7"),
    "length": (pair(VIDEO[:, :, :6], AUDIO), GeometryError, "6 latent frames.*Nearest: 2 or 7"),
    "audio-length": (pair(VIDEO, AUDIO[..., :36]), GeometryError, "as long as 37 audio latents, but there are 36"),
    "nothing": ({}, ContractError, "NoneType"),
    "list": ({"samples": [VIDEO, AUDIO]}, ContractError, "list"),
    "no-height": (pair(VIDEO[:, :, :, :0], AUDIO), GeometryError, "96x0 pixels"),
    "odd-width": (pair(VIDEO[..., :5], AUDIO), GeometryError, "80x64 pixels"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_latent(name):
    given, error, message = BAD[name]
    with pytest.raises(error, match=message):
        _latents.split(given)
