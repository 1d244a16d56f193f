"""A draft decoder (taeh3) in place of the video VAE, from the loader to the frames."""

import pytest
import torch
from comfyui_fasth3.fasth3_core.checkpoint.load import load_video_vae
from comfyui_fasth3.fasth3_core.errors import CheckpointError
from comfyui_fasth3.fasth3_core.vae.draft import DraftVAE
from safetensors.torch import save_file


def weights(width=8):
    """The tensors of the released file, at one width throughout."""
    shapes = {"1": (width, 24, 3, 3), "22": (12, width, 3, 3)}
    for start, grow in ((3, 1), (9, 2), (15, 2)):
        for index in range(start, start + 3):
            shapes |= {f"{index}.conv.{part}": (width, width + width * (part == 0), 3, 3) for part in (0, 2, 4)}
        shapes |= {f"{start + 4}.conv": (grow * width, width, 1, 1), str(start + 5): (width, width, 3, 3)}
    tensors = {f"decoder.{name}.weight": torch.randn(shape) / shape[1] ** 0.5 / 3 for name, shape in shapes.items()}
    biased = [name for name in shapes if name in ("1", "22") or ".conv." in name]
    return tensors | {f"decoder.{name}.bias": torch.zeros(shapes[name][0]) for name in biased}


@pytest.fixture
def pair(run, bundle):
    extra = {"encoder.0.weight": torch.zeros(4, 12, 3, 3)}
    stored = {name: tensor.half() for name, tensor in (weights() | extra).items()}
    save_file(stored, bundle.root / "models" / "vae" / "taeh3.safetensors")
    return run("FastH3LoadVAE", video_vae="taeh3.safetensors", audio_vae=bundle.names.audio_vae, dtype="auto")


def test_the_loader_says_so_and_the_clip_is_decoded(run, pair, latent, host):
    (text,) = pair.ui["text"]
    assert "draft decoder (taeh3)" in text and "not the released picture" in text
    vae = pair.args[0]
    decoded = run("FastH3Decode", vae=vae, latent=latent)
    assert "warning: draft decoder (taeh3)" in decoded.ui["text"][0]
    images, audio = decoded.args
    assert images.shape == (5, 64, 64, 3) and audio["waveform"].shape[1] == 2
    assert isinstance(vae.video, DraftVAE)
    video, _ = latent["samples"].unbind()
    expected = vae.video.decode(video)[0].movedim(0, -1)
    assert torch.equal(images, expected)
    assert vae.encoder is None


def test_it_has_no_encoder_to_read(pair, bundle):
    with pytest.raises(CheckpointError, match="decoder only"):
        load_video_vae(bundle.root / "models" / "vae" / "taeh3.safetensors", only="encoder")


def test_other_decoders_have_nothing_to_say(run, bundle):
    names = bundle.names
    output = run("FastH3LoadVAE", video_vae=names.video_vae, audio_vae=names.audio_vae, dtype="auto")
    assert output.ui is None
