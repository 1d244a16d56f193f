"""FastH3Keyframes in the real ComfyUI: its keyframes are the stock node's, and both samplers take them."""

import pytest
import torch
from safetensors.torch import save_file

from . import graphs

pytestmark = pytest.mark.comfy

PROMPT_ALONE = {**graphs.text_encoder(), **graphs.stock_vaes(), **graphs.conditioning()}


def ours(source: str, fit: str, posterior: str = "mean", **pictures) -> dict:
    """FastH3Keyframes on the conditioning `source`, reading the empty latent of the stock node `positive`."""
    return {"class_type": "FastH3Keyframes", "inputs": {
        "positive": [source, 0], "vae": ["vae", 0], "latent": ["positive", 1], "fit": fit, "alpha": "drop",
        "posterior": posterior, **pictures}}


def graph(posterior: str = "mean") -> dict:
    """As the stock node fits them: the first picture stretched, the last one covering."""
    return {
        **PROMPT_ALONE, **graphs.pictures(), "vae": graphs.our_decode()["vae"],
        "first": ours("positive", "stretch", posterior, first_frame=["picture_a", 0]),
        "both": ours("first", "cover", posterior, last_frame=["picture_b", 0]),
    }


def test_the_means_are_the_stock_nodes_latents(server):
    frames = {"first_frame": ["picture_a", 0], "last_frame": ["picture_b", 0]}
    stock_graph = {**PROMPT_ALONE, **graphs.pictures(), **graphs.conditioning(**frames)}
    server.run({**stock_graph, **graphs.keep("keyframes_stock", positive=("positive", 0))})
    server.run({**graph(), **graphs.keep("keyframes_ours", positive=("both", 0))})
    stock, made = server.kept("keyframes_stock"), server.kept("keyframes_ours")
    found = sorted(key for key in stock if key.startswith("keyframe"))
    assert found == sorted(key for key in made if key.startswith("keyframe")) and len(found) == 2
    for key in found:
        assert stock[key].shape == made[key].shape and stock[key].std() > 0.05
        # two implementations of the encoder, and of LANCZOS on the same 8-bit picture
        assert (stock[key] - made[key]).abs().max() <= 1e-3 * stock[key].abs().max()
        assert (stock[key] - made[key] * 1.01).abs().max() > 1e-3 * stock[key].abs().max()


def test_the_text_encoder_sees_what_the_stock_node_shows_it(server):
    """With clip in place of positive. The pictures have the aspect of the video: covered and stretched are the same."""
    frames = {"first_frame": ["picture_a", 0], "last_frame": ["picture_b", 0]}
    stock_graph = {**PROMPT_ALONE, **graphs.pictures(), **graphs.conditioning(**frames)}
    both = ours("positive", "cover", **frames, clip=["clip", 0], prompt=graphs.PROMPT)
    del both["inputs"]["positive"]
    server.run({**stock_graph, **graphs.keep("keyframes_shown_stock", positive=("positive", 0))})
    server.run({**graph(), "both": both, **graphs.keep("keyframes_shown_ours", positive=("both", 0))})
    stock, made = server.kept("keyframes_shown_stock"), server.kept("keyframes_shown_ours")
    assert list(stock) == list(made)
    assert (made["token_tags"] == stock["token_tags"]).all() and not stock["token_tags"].all()
    difference = (made["text_states"] - stock["text_states"]).square().mean().sqrt()
    assert difference < 0.02 * stock["text_states"].std()  # 50 layers in bf16


def test_both_samplers_take_them(server):
    """With the pictures and without, the same sampler gives different videos."""
    for name, sampler in (
        ("stock", graphs.stock_sampler("tiny_dense.safetensors", 4, graphs.file_noise("keyframes.safetensors"), 12, 3)),
        ("ours", graphs.our_sampler("tiny_dense.safetensors", "preview-4-dense")),
    ):
        videos = []
        if name == "stock":
            write_noise(server)
        for source in ("positive", "both"):
            swapped = swap(sampler, source)
            server.run({**graph("sample"), **swapped, **graphs.keep(f"{name}_{source}", latent=("sampler", 0))})
            videos.append(server.kept(f"{name}_{source}")["video"])
        assert all(video.isfinite().all() for video in videos)
        assert (videos[0] - videos[1]).abs().max() > 0.01, name


def swap(nodes: dict, source: str) -> dict:
    """The nodes with their conditioning from another node; the latent stays where it is."""
    return {
        key: {**node, "inputs": {
            name: [source, 0] if value == ["positive", 0] else value for name, value in node["inputs"].items()
        }}
        for key, node in nodes.items()
    }


def write_noise(server) -> None:
    generator = torch.Generator().manual_seed(7)
    video = torch.randn(1, 24, 7, graphs.HEIGHT // 16, graphs.WIDTH // 16, generator=generator)
    audio = torch.randn(1, 32, 2, 37, generator=generator)
    save_file({"video": video, "audio": audio}, server.base / "input" / "keyframes.safetensors")
