"""The same functions in plain torch, in one dtype throughout: what low precision costs, to measure kernels against.

Small cases only: masks are dense and nothing is chunked.
"""

import torch
import torch.nn.functional as F

from ...kernels.tile_mean import tile_mean_reference
from ...kernels.tile_topk import tile_topk_reference
from ..config import VSAConfig
from ..vae.video_decoder import EPS, PATCH
from ..vsa.selection import pooled_scores
from ..vsa.tiles import TilePlan


def plain_vsa(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gate: torch.Tensor | None,
    plan: TilePlan,
    config: VSAConfig,
    *,
    step: int = 0,
    layer: int = 0,
) -> torch.Tensor:
    """Masked attention plus gated coarse branch, [S, H, D] in tile order; attention and gate in q's dtype."""
    P, V = plan.num_prefix_tiles, plan.num_video_tiles
    q_mean, k_mean, v_mean = (tile_mean_reference(x, plan.offsets, plan.tile_size) for x in (q, k, v))
    scores = pooled_scores(q_mean, k_mean)  # [H, N, N]
    index, _ = tile_topk_reference(scores[:, -V:], P, config.kept_tiles(V, step, layer), config.mode)
    allowed = torch.ones_like(scores, dtype=torch.bool)
    allowed[:, P:] = F.one_hot(index.long() + 1, P + V + 1).any(dim=2)[..., 1:]
    tile = torch.repeat_interleave(plan.tile_sizes())
    mask = allowed[:, tile][:, :, tile]  # [H, S, S]
    out = F.scaled_dot_product_attention(*(x.transpose(0, 1) for x in (q, k, v)), attn_mask=mask).transpose(0, 1)
    if gate is None:
        return out
    coarse = (scores.softmax(-1) @ v_mean).to(q.dtype).transpose(0, 1)
    return out + gate * coarse[tile]


class PlainViTDecoder:
    """The ViT of the video VAE with its residual stream, norms and scales in the weights' dtype, too."""

    def __init__(self, weights: dict[str, torch.Tensor], dtype: torch.dtype, device: torch.device, like) -> None:
        """`like`: the decoder it stands in for, which says the head's width."""
        self._w = {name: t.to(device, dtype) for name, t in weights.items()}
        self.dtype, self.head_dim, self.latent_channels = dtype, like.head_dim, like.latent_channels
        self._depth = len(like.blocks)

    def rotations(self, grid: tuple[int, int, int], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        count = self.head_dim // 8
        frequencies = 100.0 ** (-torch.arange(count, dtype=torch.float32) / count)
        coordinates = torch.meshgrid(*(2 * (torch.arange(n) + 0.5) / n - 1 for n in grid), indexing="ij")
        angles = torch.cat([2 * torch.pi * c.reshape(-1, 1) * frequencies for c in coordinates], dim=-1)
        suffix = self._w["decoder.register_tokens"].shape[1] + 1
        angles = F.pad(angles, (0, 0, 0, suffix)).repeat(1, 2)[:, None].to(device)
        return angles.cos().to(self.dtype), angles.sin().to(self.dtype)

    def __call__(self, latents: torch.Tensor, rotations: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        B, t, h, w, _ = latents.shape
        weight = self._w["post_quant_conv.weight"].flatten(1)
        x = F.linear(latents.to(self.dtype), weight, self._w["post_quant_conv.bias"]).flatten(1, 3)
        x = self._linear(x, "decoder.proj_in")
        registers = self._w["decoder.register_tokens"]
        x = torch.cat([x, registers.expand(B, -1, -1), torch.zeros_like(registers[:, :1]).expand(B, -1, -1)], dim=1)
        for i in range(self._depth):
            name = f"decoder.transformer_blocks.{i}"
            x = x + self._w[f"{name}.scale1"] * self._attention(self._rms(x, f"{name}.norm1"), name, rotations)
            value, gate = self._linear(self._rms(x, f"{name}.norm2"), f"{name}.ff.net.0.proj").chunk(2, dim=-1)
            x = x + self._w[f"{name}.scale2"] * self._linear(value * F.silu(gate), f"{name}.ff.net.2")
        norm = self._w["decoder.norm_out.weight"], self._w["decoder.norm_out.bias"]
        out = self._linear(F.layer_norm(x[:, : t * h * w], x.shape[-1:], *norm, EPS), "decoder.proj_out")
        pixels = out.view(B, t, h, w, *PATCH).permute(0, 4, 1, 5, 2, 6, 3, 7)
        return pixels.reshape(B, PATCH[0], t * PATCH[1], h * PATCH[2], w * PATCH[3])

    def _attention(self, x: torch.Tensor, name: str, rotations: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        q, k, v = (self._linear(x, f"{name}.attn.to_{p}").unflatten(-1, (-1, self.head_dim)) for p in "qkv")
        q, k = (_rotate(F.rms_norm(y, (self.head_dim,), eps=EPS), *rotations) for y in (q, k))
        out = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        return self._linear(out.transpose(1, 2).flatten(2), f"{name}.attn.to_out.0")

    def _rms(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], self._w[f"{name}.weight"], EPS)

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(x, self._w[f"{name}.weight"], self._w[f"{name}.bias"])


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = cos.shape[-1] // 2
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    cos, sin = cos[..., :half], sin[..., :half]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)
