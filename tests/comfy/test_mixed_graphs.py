"""Graphs that mix our nodes with ComfyUI's own text encoder, H3 conditioning and VAE nodes, through /prompt."""

import pytest
import torch

from . import graphs
from .media import probe

pytestmark = pytest.mark.comfy


def test_text_to_video(server):
    outputs = server.run(graphs.t2v("mixed/t2v"))
    movie = probe(next(path for path in server.files(outputs) if path.suffix == ".mp4"))
    assert movie.frames == graphs.FRAMES and movie.size == (graphs.WIDTH, graphs.HEIGHT) and movie.fps == 24
    assert movie.audio_rate in (32000, 48000) and movie.audio_channels == 2
    assert movie.audio_seconds == pytest.approx(graphs.FRAMES / 24, abs=0.08)


def test_first_and_last_frame(server):
    outputs = server.run(graphs.first_last_frame("mixed/fl2v"))
    movie = probe(next(path for path in server.files(outputs) if path.suffix == ".mp4"))
    assert movie.frames == graphs.FRAMES and movie.size == (graphs.WIDTH, graphs.HEIGHT)


def test_keyframes_reach_the_sampler(server):
    """The same graph without its pictures gives another latent."""
    with_pictures = graphs.first_last_frame("mixed/a")
    without = {**graphs.first_last_frame("mixed/b"), **graphs.conditioning()}
    latents = []
    for name, graph in (("with_pictures", with_pictures), ("without_pictures", without)):
        for node in ("decode", "vae", "save"):
            del graph[node]
        server.run({**graph, **graphs.keep(name, latent=("sampler", 0))})
        latents.append(server.kept(name)["video"])
    assert (latents[0] - latents[1]).abs().max() > 0.01


def test_our_latent_through_the_stock_decoders(server):
    """Our sampler's LATENT is what VAEDecode and VAEDecodeAudio expect, and our decoder agrees with them."""
    graph = graphs.t2v("mixed/stock_decoded")
    del graph["save"]
    graph |= graphs.stock_decode() | graphs.stock_save("mixed/stock_decoded")
    graph |= graphs.keep("stock_decoded", images=("pixels", 0), audio=("sound", 0))
    graph |= graphs.keep("our_decoded", images=("decode", 0), audio=("decode", 1))
    outputs = server.run(graph)
    movie = probe(next(path for path in server.files(outputs) if path.suffix == ".mp4"))
    assert movie.frames == graphs.FRAMES and movie.audio_channels == 2

    stock, ours = server.kept("stock_decoded"), server.kept("our_decoded")
    assert stock["images"].shape == ours["images"].shape == (graphs.FRAMES, graphs.HEIGHT, graphs.WIDTH, 3)
    assert stock["images"].std() > 0.02  # a flat picture would agree with anything
    assert (stock["images"] - ours["images"]).abs().max() < 2e-3
    assert_same_sound(ours["waveform"], stock["waveform"])


def assert_same_sound(ours: torch.Tensor, stock: torch.Tensor) -> None:
    """Equal but for what each node does on purpose: ours ends with the frames, the stock one turns loud clips down."""
    assert ours.shape == (1, 2, round(graphs.FRAMES / 24 * 32000)) and ours.std() > 1e-3
    stock = stock[..., : ours.shape[2]]
    turned_down = (ours * stock).sum() / (stock * stock).sum()
    assert turned_down >= 0.9999
    assert (stock * turned_down - ours).abs().max() < 1e-3 * ours.abs().max()


def test_a_stock_latent_through_our_decoder(server):
    noise = graphs.seed_noise()
    graph = {**graphs.text_encoder(), **graphs.stock_vaes(), **graphs.conditioning(),
             **graphs.stock_sampler("tiny_dense.safetensors", 4, noise, 12.0, 3.0),
             **graphs.our_decode(), **graphs.stock_decode(),
             **graphs.keep("stock_of_stock", images=("pixels", 0)),
             **graphs.keep("ours_of_stock", images=("decode", 0))}
    server.run(graph)
    stock, ours = server.kept("stock_of_stock")["images"], server.kept("ours_of_stock")["images"]
    assert stock.std() > 0.02
    assert (stock - ours).abs().max() < 2e-3


def test_an_empty_latent_of_either_pack_is_the_same(server):
    """FastH3EmptyLatent and the empty latent of ComfyUI's H3 node can replace each other."""
    empty = {"empty": {"class_type": "FastH3EmptyLatent", "inputs": {
        "width": graphs.WIDTH, "height": graphs.HEIGHT, "seconds": graphs.SECONDS}}}
    graph = {**graphs.text_encoder(), **graphs.stock_vaes(), **graphs.conditioning(), **empty,
             **graphs.keep("empty_ours", latent=("empty", 0)), **graphs.keep("empty_stock", latent=("positive", 1))}
    server.run(graph)
    ours, stock = server.kept("empty_ours"), server.kept("empty_stock")
    assert {k: v.shape for k, v in ours.items()} == {k: v.shape for k, v in stock.items()}
    assert not any(v.any() for v in (*ours.values(), *stock.values()))
