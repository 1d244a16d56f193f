"""Adapters and quantised files in the real ComfyUI: our node there, and our files in its own loader."""

import pytest
import torch
from comfyui_fasth3.fasth3_core.adapters.apply import apply_adapter
from comfyui_fasth3.fasth3_core.checkpoint.load import load_model
from comfyui_fasth3.fasth3_core.sampling.loop import sample
from comfyui_fasth3.fasth3_core.sampling.request import Request

from . import graphs
from .derived import ADAPTER, FORMS
from .test_same_as_stock import assert_same, relative, stock_run

pytestmark = pytest.mark.comfy

LOST = {"int8": (1e-4, 0.02), "fp8": (1e-3, 0.1), "int8_adaln": (1e-4, 0.03)}
"""What the weights' 8 bits may change of the latents of four steps; three bits of mantissa lose more."""


@pytest.mark.parametrize("form", FORMS)
def test_stock_loader_runs_our_quantised_files(server, form):
    """It reads the same weights, and rounds activations to 8 bits where it multiplies in them."""
    name = f"tiny_dense_ours_{form}.safetensors"
    stock = stock_run(server, f"ours_{form}", name, graphs.conditioning())
    whole = stock_run(server, "whole", "tiny_dense.safetensors", graphs.conditioning())
    server.run({
        **graphs.text_encoder(), **graphs.stock_vaes(), **graphs.conditioning(),
        **graphs.our_sampler(name, "preview-4-dense", grid="uniform"),
        **graphs.keep(f"ours_{form}_here", latent=("sampler", 0)),
    })
    ours = server.kept(f"ours_{form}_here")
    low, high = LOST[form]
    for stream in ("video", "audio"):
        assert low < relative(ours[stream], whole[stream]) < high
        assert low < relative(stock[stream], whole[stream]) < 2 * high
        assert relative(ours[stream], stock[stream]) < 2 * high


def test_adapter_node(server, models):
    """FastH3ApplyAdapter in the server gives what the core gives in this process."""
    graph = {
        **graphs.text_encoder(), **graphs.stock_vaes(), **graphs.conditioning(),
        **graphs.our_sampler("tiny_dense.safetensors", "auto"),
        "adapter": {"class_type": "FastH3ApplyAdapter", "inputs": {
            "model": ["model", 0], "adapter_name": ADAPTER.removeprefix("loras/"), "strength": 1.0,
            "contract": "auto", "mode": "auto", "alpha": 0.0, "unmatched": "refuse", "adaln_source": "none"}},
        **graphs.keep("adapter", latent=("sampler", 0), positive=("positive", 0)),
    }
    graph["sampler"]["inputs"]["model"] = ["adapter", 0]
    server.run(graph)
    kept = server.kept("adapter")
    model, _ = apply_adapter(load_model(models / "diffusion_models" / "tiny_dense.safetensors"), models / ADAPTER)
    video, audio = kept["video"], kept["audio"]
    request = Request(
        text_states=kept["text_states"], token_tags=kept["token_tags"].long(), latent_frames=video.shape[2],
        latent_height=video.shape[3], latent_width=video.shape[4], audio_latents=audio.shape[3], seed=7,
    )
    model.store.materialise(torch.device("cpu"))
    result = sample(model, request, device=torch.device("cpu"))
    assert result.report.contract["name"] == "preview-4"
    assert_same(kept, {"video": result.video, "audio": result.audio})
