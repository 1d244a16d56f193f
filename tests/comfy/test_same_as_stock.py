"""Our sampler against ComfyUI's own, given the same weights, conditioning and noise: dense, uniform grid, euler.

ComfyUI negates velocities and carries the sound scaled by shift_video / shift_audio on one schedule; ours keeps two
schedules and blends. In exact arithmetic both give the same latents, so what is left is fp32 rounding of four steps
(a few 1e-6 of the largest value). A wrong sign, audio scale, row order or condition time is off by its whole size.
"""

import pytest
import torch
from comfyui_fasth3.fasth3_core.checkpoint.load import load_model
from comfyui_fasth3.fasth3_core.packing.layout import Keyframe, Reference
from comfyui_fasth3.fasth3_core.packing.rows import unpack_audio
from comfyui_fasth3.fasth3_core.sampling.loop import sample
from comfyui_fasth3.fasth3_core.sampling.noise import draw
from comfyui_fasth3.fasth3_core.sampling.request import Request
from safetensors.torch import save_file

from . import graphs

pytestmark = pytest.mark.comfy

TOLERANCE = 5e-6
"""Of the largest value."""


def close(ours: torch.Tensor, stock: torch.Tensor) -> bool:
    return bool((ours - stock).abs().max() <= TOLERANCE * stock.abs().max())


def assert_same(ours: dict, stock: dict) -> None:
    for stream in ("video", "audio"):
        assert stock[stream].std() > 0.1, "an all but empty latent would agree with anything"
        error = (ours[stream] - stock[stream]).abs().max() / stock[stream].abs().max()
        assert close(ours[stream], stock[stream]), f"{stream}: {error:.2e} of the largest value"
        assert not close(ours[stream] * 1.01, stock[stream])


def noise_for(server, name: str, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What FastH3Sampler draws for a seed, written where FixtureNoise finds it."""
    latents, sound = 7, 37  # of 22 frames
    drawn = draw(seed, (1, 24, latents, graphs.HEIGHT // 16, graphs.WIDTH // 16), (2 * sound, 32), (), "none")
    noise = {"video": drawn.video, "audio": unpack_audio(drawn.audio_rows).contiguous()}
    save_file(noise, server.base / "input" / name)
    return noise["video"], noise["audio"]


def stock_run(server, name: str, model: str, extra: dict, shifts=(12.0, 3.0), seed: int = 7) -> dict:
    """Latents of ComfyUI's euler on `simple` with 4 steps, and the conditioning that it was given."""
    noise_for(server, f"{name}.safetensors", seed)
    graph = {**graphs.text_encoder(), **graphs.stock_vaes(), **extra,
             **graphs.stock_sampler(model, 4, graphs.file_noise(f"{name}.safetensors"), *shifts),
             **graphs.keep(name, latent=("sampler", 0), positive=("positive", 0))}
    server.run(graph)
    return server.kept(name)


@pytest.mark.parametrize("model", ["tiny_dense", "tiny_dense_curve"])
@pytest.mark.parametrize("shifts", [(12.0, 3.0), (6.0, 3.0)], ids=["12-3", "6-3"])
def test_node_against_stock_sampler(server, model, shifts):
    """FastH3Sampler in the server, on the noise that its own seed draws."""
    name = f"same_{model}_{shifts[0]:g}"
    stock = stock_run(server, name, f"{model}.safetensors", graphs.conditioning(), shifts)
    options = {"grid": "uniform", "shift_video": shifts[0], "shift_audio": shifts[1]}
    server.run({
        **graphs.text_encoder(), **graphs.stock_vaes(), **graphs.conditioning(),
        **graphs.our_sampler(f"{model}.safetensors", "preview-4-dense", **options),
        **graphs.keep(f"{name}_ours", latent=("sampler", 0)),
    })
    assert_same(server.kept(f"{name}_ours"), stock)


def test_int8_against_stock_sampler(server):
    """An int8_convrot file that ComfyUI's quantiser wrote. It also rounds activations to 8 bits, ours does not."""
    stock = stock_run(server, "int8", "tiny_dense_int8.safetensors", graphs.conditioning())
    for model in ("tiny_dense", "tiny_dense_int8"):
        server.run({
            **graphs.text_encoder(), **graphs.stock_vaes(), **graphs.conditioning(),
            **graphs.our_sampler(f"{model}.safetensors", "preview-4-dense", grid="uniform"),
            **graphs.keep(f"int8_{model}", latent=("sampler", 0)),
        })
    ours, source = server.kept("int8_tiny_dense_int8"), server.kept("int8_tiny_dense")
    for stream in ("video", "audio"):
        lost = relative(ours[stream], source[stream])
        assert 1e-4 < lost < 0.02, f"{stream}: int8 weights against their source: {lost:.4f}"
        assert relative(ours[stream], stock[stream]) < 0.03


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """L2 of the difference, of the second's."""
    return ((a - b).norm() / b.norm()).item()


def core_run(server, models, name: str, model: str, stock: dict, **conditions) -> dict:
    """The core on the conditioning that the stock run was given, its condition noise drawn by ComfyUI's rule."""
    video, audio = noise_for(server, f"{name}.safetensors", 7)
    request = Request(
        text_states=stock["text_states"], token_tags=stock["token_tags"].long(), latent_frames=video.shape[2],
        latent_height=video.shape[3], latent_width=video.shape[4], audio_latents=audio.shape[3], seed=7,
        noise=(video, audio), condition_noise="comfy", **conditions,
    )
    handle = load_model(models / "diffusion_models" / model, contract="preview-4-dense")
    result = sample(handle, request, device="cpu", grid="uniform")
    return {"video": result.video, "audio": result.audio}


def test_keyframes_against_stock_sampler(server, models):
    frames = {"first_frame": ["picture_a", 0], "last_frame": ["picture_b", 0]}
    stock = stock_run(server, "keyframes", "tiny_dense.safetensors", graphs.pictures() | graphs.conditioning(**frames))
    found = sorted(key for key in stock if key.startswith("keyframe"))
    assert [key.split(".")[1] for key in found] == ["0", str(graphs.FRAMES - 1)]
    keyframes = [Keyframe(latent=stock[key], frame=int(key.split(".")[1])) for key in found]
    ours = core_run(server, models, "keyframes", "tiny_dense.safetensors", stock, keyframes=keyframes)
    assert_same(ours, stock)

    # the conditions matter: the same run without them is far away
    bare = core_run(server, models, "keyframes", "tiny_dense.safetensors", stock)
    assert not close(bare["video"], stock["video"])


def test_references_against_stock_sampler(server, models):
    """A picture, a sound, and a clip with its soundtrack."""
    stock = stock_run(server, "references", "tiny_dense.safetensors", graphs.references())
    references = [
        Reference(kind="image", latent=stock["reference0.image"]),
        Reference(kind="video_audio", latent=stock["reference1.video_audio"],
                  audio_latent=stock["reference1.video_audio.sound"]),
        Reference(kind="audio", audio_latent=stock["reference2.audio.sound"]),
    ]
    ours = core_run(server, models, "references", "tiny_dense.safetensors", stock, references=references)
    assert_same(ours, stock)
