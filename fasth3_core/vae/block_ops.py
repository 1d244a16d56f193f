"""What a decoder block does besides its products, as one decode runs it: chosen once, by the registry."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ...kernels import registry
from ...kernels.device import Case
from .tensors import Linear


@dataclass(frozen=True)
class BlockOps:
    residual_rms: Callable
    head_norm_rope: Callable
    biased_swiglu: Callable
    fused: bool
    """Kernels read every element once and add the biases on the way; else the products add them, in their epilogue."""

    @classmethod
    def choose(cls, device: torch.device, dtype: torch.dtype, head_dim: int) -> "BlockOps":
        case = Case(device=device, dtype=dtype, head_dim=head_dim)
        names = ("residual_rms", "head_norm_rope", "biased_swiglu")
        chosen = [registry.resolve(name, "auto", case) for name in names]
        return cls(*chosen, fused=all(op.name == "triton" for op in chosen))

    def project(self, x: torch.Tensor, layer: Linear) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The product, and the bias that the op after it still has to add."""
        if self.fused:
            return F.linear(x, layer.weight), layer.bias
        return layer(x), None

    def feed_forward_hidden(self, x: torch.Tensor, layer: Linear) -> torch.Tensor:
        """silu(gate) * value of a layer with the value's rows first."""
        if self.fused:
            value, gate = F.linear(x, layer.weight).chunk(2, dim=-1)
            return self.biased_swiglu(value, gate, layer.bias)
        # two products instead of one of double width: both halves stay contiguous, and work in place
        (value, value_bias), (gate, gate_bias) = zip(layer.weight.chunk(2), layer.bias.chunk(2), strict=True)
        return self.biased_swiglu(F.linear(x, value, value_bias), F.linear(x, gate, gate_bias), None)
