"""Which video tiles a query tile keeps. H heads, P prefix tiles, V video tiles, N = P + V."""

import torch

from ...kernels.precision import full_precision_matmul


@torch.library.custom_op("comfyui_fasth3::pooled_scores", mutates_args=())  # a compiler cannot look into its context
def pooled_scores(q_mean: torch.Tensor, k_mean: torch.Tensor) -> torch.Tensor:
    """<q_mean, k_mean> / sqrt(D): no softmax, no weighting by tile size.

    Always full fp32, whatever the process allows: a lower-precision product would keep other tiles.

    Args:
        q_mean: [H, M, D] fp32 tile means, after QK norm and rotation.
        k_mean: [H, N, D] fp32.

    Returns:
        [H, M, N] fp32.
    """
    with full_precision_matmul():
        return torch.bmm(q_mean, k_mean.transpose(1, 2)).mul_(q_mean.shape[-1] ** -0.5)


@pooled_scores.register_fake
def _(q_mean: torch.Tensor, k_mean: torch.Tensor) -> torch.Tensor:
    return q_mean.new_empty(*q_mean.shape[:2], k_mean.shape[1])
