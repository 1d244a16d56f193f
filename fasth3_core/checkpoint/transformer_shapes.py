"""Which tensors a transformer has, under canonical names, and how their sizes hang together."""

from ..model.time import BLOCK_ROWS
from .shapes import Shapes, Size, Template, count


def templates(present: Shapes) -> tuple[Template, Template]:
    """(required, optional) shapes; AdaLN form, gates, blocks and output heads follow what is there."""
    curve, rank = "adaln_t_table" in present, "adaln_basis.weight" in present
    heads = output_heads(present)
    required: dict[str, tuple[Size, ...]] = {
        **_linear("video_patch_proj", "hidden", "video_row"),
        **_linear("audio_patch_proj", "hidden", "audio_row"),
        **_linear("condition_proj", "hidden", "text"),
        "token_refiner.final_norm.weight": ("hidden",),
        "final_layer.norm.weight": ("hidden",),
        **_linear("final_layer.adaln_proj.linear", "2*hidden", "modulation"),
        **_linear("final_layer.video_out", f"{heads}*video_row", "hidden"),
        **_linear("final_layer.audio_out", f"{heads}*audio_row", "hidden"),
    }
    if curve:
        required["adaln_t_table"] = ("grid", "modulation")
    else:
        time = "time" if rank else "modulation"
        required |= _linear("time_embedder.proj_in", "time_hidden", "freq")
        required |= _linear("time_embedder.proj_out", time, "time_hidden")
    if rank:
        required["adaln_basis.weight"] = ("modulation", "time")
    gated = any(name.endswith(".attn.to_gate_compress.weight") for name in present)
    for i in range(max(1, count(present, "token_refiner.blocks."))):
        required |= _block(f"token_refiner.blocks.{i}")
    for i in range(max(1, count(present, "blocks."))):
        required |= _block(f"blocks.{i}")
        required |= _linear(f"blocks.{i}.adaln_proj.linear", f"{BLOCK_ROWS}*hidden", "modulation")
        if gated:
            required[f"blocks.{i}.attn.to_gate_compress.weight"] = ("inner", "hidden")
    return required, {"rope.inv_freq": ("rope",)}


def output_heads(present: Shapes) -> int:
    """How many output heads the last layers hold: 1, or N for a bank that both streams agree on."""
    counts = set()
    for stream in ("video", "audio"):
        for part in ("weight", "bias"):
            rows = (present.get(f"final_layer.{stream}_out.{part}") or (0,))[0]
            width = (present.get(f"{stream}_patch_proj.weight") or (0, 0))[1]
            counts.add(rows // width if width and rows % width == 0 else 0)
    return counts.pop() or 1 if len(counts) == 1 else 1


def _block(name: str) -> dict[str, tuple[Size, ...]]:
    return {
        f"{name}.norm1.weight": ("hidden",),
        f"{name}.norm2.weight": ("hidden",),
        f"{name}.attn.qkv_proj.weight": ("3*inner", "hidden"),
        f"{name}.attn.q_norm.weight": ("head",),
        f"{name}.attn.k_norm.weight": ("head",),
        f"{name}.attn.out_proj.weight": ("hidden", "inner"),
        f"{name}.mlp.fc1.weight": ("2*ffn", "hidden"),
        f"{name}.mlp.fc2.weight": ("hidden", "ffn"),
    }


def _linear(name: str, rows: str, columns: str) -> dict[str, tuple[Size, ...]]:
    return {f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)}
