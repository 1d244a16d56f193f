"""Settings of the process that belong to somebody else change no bit: default dtype and device, autocast, grad mode."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest
import torch
from comfyui_fasth3.fasth3_core.checkpoint import audio_names
from comfyui_fasth3.fasth3_core.checkpoint.load import load_audio_vae, load_model, load_video_vae
from comfyui_fasth3.fasth3_core.checkpoint.save import save
from comfyui_fasth3.fasth3_core.media.preview import latent_preview
from comfyui_fasth3.fasth3_core.packing.layout import Keyframe, Reference
from comfyui_fasth3.fasth3_core.sampling.loop import sample
from comfyui_fasth3.fasth3_core.sampling.request import Request

from .checkpoints import recorded
from .tiny import TEXT_DIM, tiny_tensors


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


STATES: dict[str, Callable[[], AbstractContextManager]] = {
    "default-float64": lambda: default_dtype(torch.float64),
    "default-float16": lambda: default_dtype(torch.float16),
    "default-device": lambda: torch.device("meta"),
    "autocast-bf16": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast-fp16": lambda: torch.autocast("cpu", torch.float16),
    "inference-mode": torch.inference_mode,
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Transformer, video VAE and audio VAE as files; the audio VAE without its filters, which a formula then makes."""
    folder = tmp_path_factory.mktemp("models")
    save(tiny_tensors(), folder / "transformer", layout="diffusers", config={"rope_freq_dim": 4})
    save(recorded("video_vae"), folder / "video.safetensors", layout="diffusers")
    audio = audio_names.to_canonical(recorded("audio_vae"))
    plain = {name: tensor.float() for name, tensor in audio.items() if not name.endswith(".filter")}
    save(plain, folder / "audio.safetensors")
    return folder


@pytest.fixture(scope="module")
def inputs():
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    return {
        "request": Request(
            text_states=draw(1, 6, TEXT_DIM), latent_frames=2, latent_height=4, latent_width=10, audio_latents=8,
            keyframes=[Keyframe(0, draw(1, 24, 1, 4, 10))], references=[Reference("audio", None, draw(1, 32, 2, 3))],
        ),
        "latent": draw(1, 24, 7, 2, 18), "pixels": draw(1, 3, 18, 32, 32).sigmoid(),
        "sound": draw(1, 32, 2, 8), "wave": draw(2, 1, 900) / 4,
    }  # fmt: skip


def outputs(models, inputs) -> list[torch.Tensor]:
    """Load everything and run everything once."""
    model = load_model(models / "transformer", contract="preview-4")
    sampled = sample(model, inputs["request"], device="cpu")
    latent_preview(sampled.video)
    out = [sampled.video, sampled.audio]
    for dtype in ("fp32", "bf16"):
        video = load_video_vae(models / "video.safetensors", dtype)
        out.append(video.decode(inputs["latent"]))
    out += [video.encode(inputs["pixels"]), video.condition_latent(inputs["pixels"][:, :, :1])]
    audio = load_audio_vae(models / "audio.safetensors")
    return [*out, audio.to_waveform(inputs["sound"], 5), audio.encode(inputs["wave"])]


@pytest.fixture(scope="module")
def expected(models, inputs):
    return outputs(models, inputs)


@pytest.mark.parametrize("state", STATES)
def test_the_state_of_the_process_changes_no_bit(state, models, inputs, expected):
    with STATES[state]():
        found = outputs(models, inputs)
    assert [(x.dtype, x.device.type) for x in found] == [(x.dtype, x.device.type) for x in expected]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
