"""Write tiny seeded H3 models in ComfyUI's single-file formats: `python write_models.py MODELS_DIR`.

Runs under ComfyUI's Python with COMFY_APP set, because ComfyUI's own classes define the names and shapes. Weights are
seeded by tensor name, so a file does not depend on the order of construction.
"""

import json
import math
import os
import re
import sys
import zlib
from pathlib import Path

sys.path[:0] = [os.environ["COMFY_APP"], str(Path(__file__).parents[1] / "fixture_pack")]

import comfy.options  # noqa: E402

comfy.options.enable_args_parsing(False)
from comfy.cli_args import args  # noqa: E402

args.cpu = True

import comfy.ops  # noqa: E402
import torch  # noqa: E402
from comfy.ldm.minimax.audio_vae import MiniMaxH3AudioVAE  # noqa: E402
from comfy.ldm.minimax.model import MiniMaxH3Model  # noqa: E402
from comfy.quant_ops import QuantizedTensor  # noqa: E402
from comfy.text_encoders.minimax import MiniMaxQwen3VL  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from shrink import AUDIO_VAE, DIT, DIT_CURVE, shrink  # noqa: E402

KEEP = ("inv_freq", "adaln_t_table", "filter", "latents_mean", "latents_std", "mask_token")
"""Buffers that have a formula or recorded values, and one that nothing reads."""


def seeded(state: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    """Norm weights near 1, vectors small, matrices N(0, 1 / fan-in): activations keep their size through the layers."""
    out = {}
    for name, tensor in state.items():
        generator = torch.Generator().manual_seed(seed * 1_000_003 + zlib.crc32(name.encode()))
        draw = torch.randn(tensor.shape, generator=generator)
        if name.endswith(KEEP):
            draw = tensor.float()
        elif tensor.ndim <= 1:
            draw = draw * 0.05 + (1.0 if "norm" in name and name.endswith("weight") else 0.0)
        else:
            draw = draw / math.sqrt(tensor[0].numel())
        out[name] = draw.to(tensor.dtype).contiguous()
    return out


def transformer(sizes: dict, gates: bool, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    model = MiniMaxH3Model(**sizes, dtype=dtype, device="cpu", operations=comfy.ops.manual_cast)
    n = sizes["rope_inv_freq_len"]
    model.rope.inv_freq.copy_(10000.0 ** (-torch.arange(n, dtype=torch.float32) / n))
    if "adaln_curve_grid" in sizes:  # smooth over time, as the published tables are
        grid, width = model.adaln_t_table.shape
        time = torch.linspace(0.0, math.pi, grid)
        model.adaln_t_table.copy_(torch.cos(time[:, None] * torch.arange(width)))
    state = model.state_dict()
    if gates:
        for i in range(sizes["num_layers"]):
            rows = sizes["num_attention_heads"] * sizes["attention_head_dim"]
            state[f"blocks.{i}.attn.to_gate_compress.weight"] = torch.empty(rows, sizes["hidden_size"], dtype=dtype)
    return seeded(state, seed=1)


def int8_rotated(state: dict[str, torch.Tensor], group: int) -> dict[str, torch.Tensor]:
    """The layers that published int8_convrot files quantise, by ComfyUI's own quantiser; smaller rotation groups."""
    out = {}
    for name, tensor in state.items():
        layer = name.removesuffix(".weight")
        if not re.search(r"blocks\.\d+\.(attn|mlp)\.(qkv_proj|out_proj|fc1|fc2)\.weight$", name):
            out[name] = tensor
            continue
        quantised = QuantizedTensor.from_float(
            tensor, "TensorWiseINT8Layout", per_channel=True, convrot=True, convrot_groupsize=group
        )
        marker = {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": group}
        out |= quantised.state_dict(name)
        out[f"{layer}.comfy_quant"] = torch.tensor(list(json.dumps(marker).encode()), dtype=torch.uint8)
    return out


def audio_vae() -> dict[str, torch.Tensor]:
    vae = MiniMaxH3AudioVAE(**AUDIO_VAE)
    channels = torch.arange(32, dtype=torch.float32)
    vae.latents_mean.copy_(0.3 * torch.sin(channels))
    vae.latents_std.copy_(1.5 + 0.5 * torch.cos(channels))
    return seeded(vae.state_dict(), seed=3)


def main(root: Path) -> None:
    import comfy.ldm.minimax.vae as video

    shrink()
    pixels = video.MiniMaxH3VideoVAE().state_dict()
    text = MiniMaxQwen3VL({}, torch.float32, "cpu", comfy.ops.manual_cast).state_dict()
    dense = transformer(DIT, False, torch.float32)
    files = {
        "diffusion_models/tiny_vsa.safetensors": transformer(DIT, True, torch.float32),
        "diffusion_models/tiny_vsa_curve.safetensors": transformer(DIT_CURVE, True, torch.bfloat16),
        "diffusion_models/tiny_dense.safetensors": dense,
        "diffusion_models/tiny_dense_int8.safetensors": int8_rotated(dense, group=16),
        "diffusion_models/tiny_dense_curve.safetensors": transformer(DIT_CURVE, False, torch.bfloat16),
        "text_encoders/tiny_text.safetensors": {k: v.bfloat16() for k, v in seeded(text, seed=4).items()},
        "vae/tiny_video_vae.safetensors": {k: v.half() for k, v in seeded(pixels, seed=2).items()},
        "vae/tiny_audio_vae.safetensors": audio_vae(),
    }
    for name, tensors in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, root / name)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
