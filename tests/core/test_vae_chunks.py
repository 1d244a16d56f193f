"""Mirrors fasth3_core/vae/chunks.py: how latents become frames in time."""

import pytest
import torch
from comfyui_fasth3.fasth3_core.errors import GeometryError
from comfyui_fasth3.fasth3_core.vae import chunks

FRAMES = {1: 1, 2: 5, 3: 9, 6: 18, 7: 22, 12: 39, 13: 43, 37: 124, 57: 192, 72: 243, 102: 345, 107: 362}
CLIPS = {1: 1, 2: 1, 7: 1, 12: 2, 37: 7, 57: 11, 72: 14, 102: 20, 107: 21}


@pytest.mark.parametrize("latents", FRAMES)
def test_frames_of_latents(latents):
    assert chunks.decode_plan(latents).frames == FRAMES[latents]


@pytest.mark.parametrize("latents", CLIPS)
def test_clips_of_latents(latents):
    assert chunks.decode_plan(latents).clips == CLIPS[latents]


def test_two_latents_need_five_of_padding():
    assert chunks.decode_plan(2).pad == 5


@pytest.mark.parametrize("k", range(22))
def test_decode_inverts_encode(k):
    """17k + 5 frames are encoded in clips of 5 latents, less 3; those decode to as many frames."""
    frames = 17 * k + 5
    latents = chunks.CLIP_LATENTS * chunks.encode_clips(frames) - chunks.TOKEN_DROP
    assert latents == 5 * k + 2
    assert chunks.decode_plan(latents).frames == frames


@pytest.mark.parametrize("latents", range(1, 120))
def test_plan_is_consistent(latents):
    plan = chunks.decode_plan(latents)
    last = (plan.clips - 1) * chunks.CLIP_LATENTS + chunks.DECODED_LATENTS
    assert plan.latents + plan.pad == last
    assert 17 * (plan.clips - 1) < plan.frames <= 17 * plan.clips + 5


def test_no_latents_is_refused():
    with pytest.raises(GeometryError, match="0 latent frames"):
        chunks.decode_plan(0)


def test_slices_of_a_clip():
    assert list(range(28)[chunks.BODY]) == list(range(3, 20))
    assert list(range(28)[chunks.TAIL]) == list(range(23, 28))


def test_tail_blend():
    body, tail = torch.ones(1, 17, 2, 2), torch.zeros(1, 5, 2, 2)
    chunks.blend_tail(body, tail)
    torch.testing.assert_close(body[0, :6, 0, 0], torch.tensor([0.0, 0.2, 0.4, 0.6, 0.8, 1.0]))
    assert bool((tail == 0).all())
