"""Weight norm of the audio VAE, folded into plain weights when the file is read."""

from collections.abc import Mapping

import torch

from ..errors import CheckpointError

FORMS = ((".weight_g", ".weight_v"), (".parametrizations.weight.original0", ".parametrizations.weight.original1"))
"""Suffixes of magnitude g and direction v: the old hook's, and the newer parametrisation's."""


def fold_weight_norm(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Replace each pair (g, v) by `.weight` = v * g / ||v||, the norm over all dims but the first, in fp32.

    Names without weight norm pass through. The rounding of a fold differs from that of another order of the same
    product in the last bit, 2.4e-7 on a decoded wave.
    """
    folded = {}
    for name, value in tensors.items():
        for g_suffix, v_suffix in FORMS:
            if name.endswith(v_suffix):
                base = name[: -len(v_suffix)]
                if base + g_suffix not in tensors:
                    raise CheckpointError(f"audio VAE: {name} has no magnitude {base + g_suffix} beside it")
                v, g = value.float(), tensors[base + g_suffix].float()
                norm = torch.linalg.vector_norm(v, dim=tuple(range(1, v.ndim)), keepdim=True)
                folded[f"{base}.weight"] = v * (g / norm)
                break
            if name.endswith(g_suffix):
                break
        else:
            folded[name] = value
    return folded
