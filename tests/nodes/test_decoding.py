"""Mirrors nodes/decoding.py: frames and sound of the right length, room made first, and a second try without memory."""

import pytest
import torch
from comfyui_fasth3.fasth3_core.errors import ConfigError, ContractError
from comfyui_fasth3.nodes import _latents, decoding


@pytest.fixture
def sampled():
    generator = torch.Generator().manual_seed(0)
    return _latents.join(torch.randn(1, 24, 7, 4, 6, generator=generator),
                         torch.randn(1, 32, 2, 37, generator=generator))


def test_images_and_audio(run, vae, sampled):
    output = run("FastH3Decode", vae=vae, latent=sampled, tile_batch=0)
    images, audio = output.args
    assert images.shape == (22, 64, 96, 3) and images.dtype == torch.float32
    assert images.min() >= 0 and images.max() <= 1
    assert audio["sample_rate"] == 32000
    assert audio["waveform"].shape == (1, 2, round(22 / 24 * 32000))
    assert output.ui["text"][0].startswith("22 frames, sound peak ")


def test_same_pixels_whatever_the_batch(run, vae, sampled):
    one, four = (run("FastH3Decode", vae=vae, latent=sampled, tile_batch=n).args[0] for n in (1, 4))
    assert torch.equal(one, four)


def test_result_is_that_of_the_vaes(run, vae, sampled):
    images, audio = run("FastH3Decode", vae=vae, latent=sampled, tile_batch=0).args
    video_latent, audio_latent = _latents.split(sampled)
    assert torch.equal(images, vae.video.decode(video_latent)[0].movedim(0, -1))
    assert torch.equal(audio["waveform"], vae.audio.to_waveform(audio_latent, 22))


def test_wrong_latent(run, vae):
    with pytest.raises(ContractError, match="one stream"):
        run("FastH3Decode", vae=vae, latent={"samples": torch.zeros(1, 24, 7, 4, 6)}, tile_batch=0)


def test_negative_batch(run, vae, sampled):
    with pytest.raises(ConfigError, match="tile_batch=-1"):
        run("FastH3Decode", vae=vae, latent=sampled, tile_batch=-1)


def test_transformer_is_sent_away_when_there_is_no_room(run, vae, sampled, model, positive, latent, host, monkeypatch):
    """The order in the node: room for weights and canvas is asked for before anything is decoded."""
    asked = []

    def acquire(resident, device, working):
        asked.append((resident, working))
        model.store.release()  # as a host does that has no room for both
        resident.materialise(device)

    run("FastH3Sampler", model=model, positive=positive, latent=latent, seed=0)
    assert model.store.location is not None
    monkeypatch.setattr(host, "acquire", acquire)
    run("FastH3Decode", vae=vae, latent=sampled, tile_batch=0)
    assert model.store.location is None
    assert asked == [(vae, vae.working_bytes(0, 64, 96))]


class Starved:
    """A video VAE that runs out of memory on its first calls."""

    def __init__(self, real, failures):
        self.real, self.left, self.batches, self.device = real, failures, [], real.device

    def decode(self, latent, *, tile_batch, **rest):
        self.batches.append(tile_batch)
        if self.left:
            self.left -= 1
            raise torch.OutOfMemoryError("out of memory")
        return self.real.decode(latent, tile_batch=tile_batch, **rest)


def starve(vae, monkeypatch, failures):
    vae.materialise(torch.device("cpu"))
    starved = Starved(vae.video, failures)
    monkeypatch.setattr(type(vae), "video", property(lambda pair: starved))
    monkeypatch.setattr(type(vae), "materialise", lambda *args: None)
    monkeypatch.setattr(type(vae), "release", lambda *args: None)
    return starved


def test_out_of_memory_frees_everything_and_decodes_tile_by_tile(run, vae, sampled, model, positive, latent, host,
                                                                 monkeypatch, caplog):
    expected = run("FastH3Decode", vae=vae, latent=sampled, tile_batch=0).args[0]
    run("FastH3Sampler", model=model, positive=positive, latent=latent, seed=0)
    starved = starve(vae, monkeypatch, failures=1)
    images = run("FastH3Decode", vae=vae, latent=sampled, tile_batch=0).args[0]
    assert torch.equal(images, expected)
    assert starved.batches == [0, 1]
    assert model.store.location is None
    assert "sending all models away" in caplog.text


def test_out_of_memory_twice_passes_through(run, vae, sampled, monkeypatch):
    starve(vae, monkeypatch, failures=2)
    with pytest.raises(torch.OutOfMemoryError):
        run("FastH3Decode", vae=vae, latent=sampled, tile_batch=0)


def test_interrupt_passes_through_and_the_next_decode_works(run, vae, sampled, host, monkeypatch):
    class Stop(BaseException):
        pass

    def interrupt():
        raise Stop

    monkeypatch.setattr(host, "check_interrupt", interrupt)
    with pytest.raises(Stop):
        run("FastH3Decode", vae=vae, latent=sampled, tile_batch=0)
    monkeypatch.undo()
    assert run("FastH3Decode", vae=vae, latent=sampled, tile_batch=0).args[0].shape[0] == 22


def test_bar_counts_tiles(run, vae, host, monkeypatch):
    shown = []
    monkeypatch.setattr(host, "progress", lambda total: lambda done, picture=None: shown.append((done, total)))
    wide = _latents.join(torch.randn(1, 24, 2, 4, 20), torch.randn(1, 32, 2, 8))
    run("FastH3Decode", vae=vae, latent=wide, tile_batch=1)
    assert shown == [(1, 2), (2, 2)]


def test_broken_sound_is_said_on_the_node_and_in_the_log(run, vae, sampled, monkeypatch, caplog):
    vae.materialise(torch.device("cpu"))
    monkeypatch.setattr(type(vae.audio), "to_waveform", lambda self, latent, frames: torch.zeros(1, 2, 100))
    text = run("FastH3Decode", vae=vae, latent=sampled, tile_batch=0).ui["text"][0]
    assert "warning: the sound track is silent" in text
    assert "silent" in caplog.text


def test_no_attempt_is_hidden_from_other_errors(run, vae, sampled, monkeypatch):
    monkeypatch.setattr(decoding, "_decode_once", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run("FastH3Decode", vae=vae, latent=sampled, tile_batch=0)
