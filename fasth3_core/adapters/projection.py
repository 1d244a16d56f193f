"""From AdaLN inputs of full width to the few that a rank or curve file keeps.

Such a file writes the time features u(t) [wide] as V c(t) (+ mean) with a few c [narrow], and stores W V in place of W.
A change of W of full width is therefore a change of (change @ V), and of change @ mean in the bias.
"""

from dataclasses import dataclass

import torch

from ...kernels.precision import full_precision_matmul
from ..checkpoint.kinds import Entry
from ..checkpoint.reading import Reader


@dataclass(frozen=True, slots=True, eq=False)
class Projection:
    wide: int
    narrow: int
    basis: Entry | torch.Tensor
    """The rank form's `adaln_basis.weight` [narrow, wide], read when needed; or V transposed, fitted."""
    mean: torch.Tensor | None = None
    """[wide] fp32 for a centred basis."""

    def apply(self, values: torch.Tensor, reader: Reader) -> torch.Tensor:
        """[rows, wide] fp32 -> [rows, narrow] fp32."""
        fitted = isinstance(self.basis, torch.Tensor)
        basis = self.basis if fitted else self.basis.load(reader, torch.float32)
        with full_precision_matmul():
            return values @ basis.to(values.device).T
