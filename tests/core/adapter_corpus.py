"""Adapters in every spelling that is met, with the weights that they should give by the plain formula in fp64.

What an adapter says is made once, for split q, k, v and the value half first; `spelled` writes it as others would.
"""

import itertools

import torch

RANK = 3
ALPHAS = {"q": 2.0, "k": 5.0, "v": 0.5}
"""For the parts of a fused layer; other layers have 4."""

SPELLINGS = [
    dict(style=style, prefix=prefix, factors=factors, infix=infix, alpha=alpha)
    for style, prefixes in {
        "diffusers": ["", "transformer.", "diffusion_model.", "base_model.model.", "diffusion_model.diffusion_model."],
        "fused": ["", "diffusion_model.", "model.diffusion_model.", "transformer."],
        "mixed": ["", "diffusion_model."],
        "flat diffusers": ["lora_unet_", "lora_unet_lora_unet_", "lycoris_"],
        "flat fused": ["lora_unet_", "lora_unet_diffusion_model_"],
    }.items()
    for prefix, factors, infix, alpha in itertools.product(
        prefixes, [("lora_A", "lora_B"), ("lora_down", "lora_up")], ["", ".default"], [True, False]
    )
]


def changes(config: dict, seed: int = 0) -> dict[str, tuple[torch.Tensor, torch.Tensor, float]]:
    """Diffusers layer -> (down [r, in], up [out, r], alpha): every kind of layer, in a block and in the refiner."""
    generator = torch.Generator().manual_seed(seed)
    hidden, inner, ffn, time = (config[key] for key in ("hidden_size", "inner", "ffn_dim", "time_embed_dim"))
    sizes = {f"attn.to_{part}": (inner, hidden) for part in "qkv"} | {
        "attn.to_out.0": (hidden, inner), "ff.net.0.proj": (2 * ffn, hidden), "ff.net.2": (hidden, ffn),
    }  # fmt: skip
    layers = {f"{stack}.1.{name}": size for stack in ("transformer_blocks", "token_refiner.refiner_blocks")
              for name, size in sizes.items()}  # fmt: skip
    if time:
        layers |= {
            "transformer_blocks.1.adaln_proj.linear": (18 * hidden, time), "norm_out.linear": (2 * hidden, time),
        }
    layers |= {"context_embedder": (hidden, config["text_dim"]), "proj_out": (96, hidden)}
    return {
        layer: (
            torch.randn(RANK, columns, generator=generator) * 0.3,
            torch.randn(rows, RANK, generator=generator) * 0.3,
            ALPHAS.get(layer[-1], 4.0) if ".attn.to_" in layer else 4.0,
        )
        for layer, (rows, columns) in layers.items()
    }


def deltas(pairs: dict, alpha: bool) -> dict[str, torch.Tensor]:
    """Diffusers layer -> change of its weight, fp64, by the formula."""
    return {
        layer: up.double() @ down.double() * (scale / RANK if alpha else 1.0)
        for layer, (down, up, scale) in pairs.items()
    }


def expected(base: dict[str, torch.Tensor], delta: dict[str, torch.Tensor], strength: float = 1.0) -> dict:
    """Canonical weights of the base with the changes, fp64; the order of rows is worked out here, by hand."""
    out = {name: tensor.double() for name, tensor in base.items()}
    top = {"context_embedder": "condition_proj", "proj_out": "final_layer.video_out", "proj_in": "video_patch_proj",
           "norm_out.linear": "final_layer.adaln_proj.linear"}  # fmt: skip
    for layer, change in delta.items():
        name = layer.replace("refiner_blocks", "blocks").replace("transformer_blocks", "blocks")
        change = strength * change
        if name in top:
            out[f"{top[name]}.weight"] += change
        elif ".attn.to_out" in name:
            out[name.replace("to_out.0", "out_proj") + ".weight"] += change
        elif name.endswith(("to_q", "to_k", "to_v")):
            rows = change.shape[0]
            start = "qkv".index(name[-1]) * rows
            out[name[: -len("to_q")] + "qkv_proj.weight"][start : start + rows] += change
        elif name.endswith("ff.net.0.proj"):
            value, gate = change.chunk(2)
            out[name.replace("ff.net.0.proj", "mlp.fc1") + ".weight"] += torch.cat([gate, value])
        elif name.endswith("ff.net.2"):
            out[name.replace("ff.net.2", "mlp.fc2") + ".weight"] += change
        else:
            out[f"{name}.weight"] += change
    return out


def spelled(
    pairs: dict, style: str, prefix: str, factors: tuple[str, str], infix: str, alpha: bool
) -> dict[str, torch.Tensor]:
    """The tensors of an adapter file."""
    fused = "fused" in style
    layers = _fuse(pairs, alpha) if fused else dict(pairs)
    tensors = {}
    for layer, (down, up, scale) in layers.items():
        if style == "mixed" or fused:
            layer = layer.replace("refiner_blocks", "blocks").replace("transformer_blocks", "blocks")
        stem = prefix + (layer.replace(".", "_") if style.startswith("flat") else layer)
        tensors[f"{stem}.{factors[0]}{infix}.weight"] = down
        tensors[f"{stem}.{factors[1]}{infix}.weight"] = up
        if alpha:
            tensors[f"{stem}.alpha"] = torch.tensor(scale)
    return tensors


def _fuse(pairs: dict, with_alpha: bool) -> dict:
    """Single-file names: q, k and v as one pair of three times the rank, `up` block-diagonal; the gate half first."""
    top = {"context_embedder": "condition_proj", "proj_out": "final_layer.video_out",
           "norm_out.linear": "final_layer.adaln_proj.linear"}  # fmt: skip
    out = {}
    for layer, (down, up, alpha) in pairs.items():
        if layer in top:
            out[top[layer]] = (down, up, alpha)
        elif layer.endswith("attn.to_q"):
            parts = [pairs[f"{layer[:-1]}{part}"] for part in "qkv"]
            # one alpha for all three: the parts' own go into the factors
            ups = [u * (a / 4.0 if with_alpha else 1.0) for _, u, a in parts]
            out[layer.replace("to_q", "qkv_proj")] = (
                torch.cat([d for d, _, _ in parts]), torch.block_diag(*ups), 4.0 * 3,
            )  # fmt: skip
        elif layer.endswith(("to_k", "to_v")):
            continue
        elif layer.endswith("ff.net.0.proj"):
            value, gate = up.chunk(2)
            out[layer.replace("ff.net.0.proj", "mlp.fc1")] = (down, torch.cat([gate, value]), alpha)
        else:
            name = layer.replace("ff.net.2", "mlp.fc2").replace("attn.to_out.0", "attn.out_proj")
            out[name] = (down, up, alpha)
    return out
