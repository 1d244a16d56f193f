"""What a decoder block is made of, as one decode runs it: implementations chosen once, by the registry."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ...kernels import registry
from ...kernels.device import Case
from ...kernels.fp8_linear import fp8_linear
from ...kernels.int8_linear import int8_linear
from ...kernels.quantise_rows import QuantisedRows
from .tensors import Linear

Rows = torch.Tensor | QuantisedRows

FF_ROWS = 16384
"""Tokens whose feed-forward is computed at once: 0.8 GB in fp16 at the released width. Whole frames have more."""


@dataclass(frozen=True)
class BlockOps:
    """Products leave their bias to the op after them where that reads every element anyway."""

    residual_rms: Callable
    head_norm_rope: Callable
    swiglu: Callable
    linear_swiglu: registry.Resolved
    bounded_attention: Callable
    quantise_rows: Callable
    form: str
    """Of the rows that go into products: "" as they are, "fp8" quantised, by the op that makes them."""
    leaves_bias: bool

    @classmethod
    def choose(cls, device: torch.device, dtype: torch.dtype, head_dim: int, form: str = "") -> "BlockOps":
        case = Case(device=device, dtype=dtype, head_dim=head_dim)
        adding = [registry.resolve(name, "auto", case) for name in ("residual_rms", "head_norm_rope", "swiglu")]
        names = ("linear_swiglu", "bounded_attention", "quantise_rows")
        others = [registry.resolve(name, "auto", case) for name in names]
        return cls(*adding, *others, form, leaves_bias=form != "" or all(op.name == "triton" for op in adding))

    def project(self, x: Rows, layer: Linear) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The product, and the bias that the op after it still has to add."""
        bias = None if self.leaves_bias else layer.bias
        if isinstance(layer.weight, torch.Tensor):
            y = F.linear(x, layer.weight, bias)
        elif isinstance(layer.weight, QuantisedRows):
            y = fp8_linear(x, layer.weight, layer.bias.dtype)
        else:
            y = int8_linear(x, layer.weight.data, layer.weight.scale, bias, group=layer.weight.group)
        return y, layer.bias if self.leaves_bias else None

    def rows(self, x: torch.Tensor) -> Rows:
        """What no op of ours made, in the form that products take."""
        return self.quantise_rows(x, self.form) if self.form else x

    def feed_forward(self, x: Rows, layer_in: Linear, layer_out: Linear) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The branch and the bias left to add, as of `project`; many rows in parts, whose hidden values are bounded."""
        if len(x) <= FF_ROWS:
            return self.project(self._hidden(x, layer_in), layer_out)
        made = [
            self.project(self._hidden(x[start : start + FF_ROWS], layer_in), layer_out)
            for start in range(0, len(x), FF_ROWS)
        ]
        return torch.cat([y for y, _ in made]), made[0][1]

    def _hidden(self, x: Rows, layer: Linear) -> Rows:
        """silu(gate) * value of a layer with the value's rows first."""
        in_one = self.linear_swiglu.name == "hopper" or not self.leaves_bias
        if in_one and isinstance(layer.weight, torch.Tensor):
            return self.linear_swiglu(x, layer.weight, layer.bias)
        y, bias = self.project(x, layer)
        return self.swiglu(*y.chunk(2, dim=-1), bias, self.form)
