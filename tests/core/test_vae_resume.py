"""Mirrors fasth3_core/vae/resume.py: a decode that stops anywhere goes on to the same frames, each handed on once."""

import pytest
import torch
from comfyui_fasth3.fasth3_core.errors import Interrupted
from comfyui_fasth3.fasth3_core.vae import VideoVAE
from comfyui_fasth3.fasth3_core.vae.resume import Delivery, is_out_of_memory
from safetensors.torch import load_file

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def vae(golden_dir):
    recorded = load_file(golden_dir / "video_vae.safetensors")
    weights = {name: value.float() for name, value in recorded.items() if name.startswith("weights.")}
    return VideoVAE.from_tensors({name.removeprefix("weights."): value for name, value in weights.items()})


def decode(vae, latent, fail_at=(), fail_put=()):
    """All frames, through as many attempts as it takes; memory runs out before the tiles of `fail_at`, counted over all
    attempts, and while the clips of `fail_put` are handed on."""
    frames, tiles, puts = [], [], []

    def put(part, clip):
        puts.append(clip)
        if len(puts) - 1 in fail_put:
            raise torch.OutOfMemoryError("put")
        frames.append(part.clone())

    def check():
        tiles.append(1)
        if len(tiles) - 1 in fail_at:
            raise torch.OutOfMemoryError("tile")

    delivery, attempts = Delivery(latent, put), 0
    while True:
        attempts += 1
        try:
            delivery.attempt(vae, 0, None, check)
            return torch.cat(frames), attempts, len(tiles)
        except torch.OutOfMemoryError:
            continue


@pytest.mark.parametrize("latents", [2, 7, 17])
def test_each_place_to_stop(vae, latents):
    latent = torch.randn(1, 24, latents, 4, 20)  # two tiles a clip
    whole, attempts, tiles = decode(vae, latent)
    assert attempts == 1
    assert torch.equal(whole, vae.decode(latent)[0].permute(1, 2, 3, 0))
    for at in range(tiles):
        again, attempts, _ = decode(vae, latent, fail_at=(at,))
        assert attempts == 2 and torch.equal(again, whole), f"stopped before tile {at}"
    for at in range(latents // 5 + 1):
        again, attempts, _ = decode(vae, latent, fail_put=(at,))
        assert attempts == 2 and torch.equal(again, whole), f"stopped at clip {at}"


def test_stopped_again_and_again(vae):
    latent = torch.randn(1, 24, 17, 4, 6)
    assert torch.equal(decode(vae, latent, fail_at=(0, 2, 3, 5), fail_put=(1,))[0], decode(vae, latent)[0])


def test_clips_already_handed_on_are_not_decoded_again_but_one(vae):
    latent = torch.randn(1, 24, 27, 4, 6)  # five clips of one tile
    *_, whole = decode(vae, latent)
    assert whole == 5
    assert decode(vae, latent, fail_at=(4,))[2] == 5 + 2  # the failed one, and the fourth once more


class Remembering:
    """A decoder whose every frame depends on all latents before it."""

    def decode_chunks(self, latent, *, check_interrupt, **_):
        total = 0.0
        for first in range(0, latent.shape[2], 5):
            check_interrupt()
            total = total + latent[0, 0, first]
            yield total.expand(1, 3, 17 if first + 5 <= latent.shape[2] else 5, *total.shape)


def test_a_decoder_that_remembers_begins_again():
    vae, latent = Remembering(), torch.randn(1, 24, 17, 4, 6)
    whole = decode(vae, latent)[0]
    for at in range(4):
        assert torch.equal(decode(vae, latent, fail_at=(at,))[0], whole)


@pytest.mark.parametrize(
    "error, expected",
    [
        (torch.OutOfMemoryError("x"), True), (MemoryError(), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), True),
        (RuntimeError("CUDA error: out of memory"), True), (RuntimeError("CUBLAS_STATUS_ALLOC_FAILED"), True),
        (RuntimeError("shapes differ"), False), (ValueError("out of memory"), False), (Interrupted("stop"), False),
    ],
    ids=lambda value: str(value)[:20],
)  # fmt: skip
def test_what_counts_as_out_of_memory(error, expected):
    assert is_out_of_memory(error) == expected
