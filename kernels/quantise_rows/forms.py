"""The 8-bit forms of an activation, shared by the ops that make one."""

from dataclasses import dataclass

import torch

FORMS = {"fp8": (torch.float8_e4m3fn, 448.0), "int8": (torch.int8, 127.0)}
"""Form -> (dtype, largest magnitude used)."""

TINY = 1e-30
"""Least scale: a row of zeros stays zeros."""


@dataclass(frozen=True, slots=True, eq=False)
class QuantisedRows:
    """Rows data * scale."""

    data: torch.Tensor
    """[S, C] in a dtype of FORMS."""
    scale: torch.Tensor
    """fp32 [S, 1]."""

    def __len__(self) -> int:
        """S."""
        return len(self.data)

    def __getitem__(self, rows: slice) -> "QuantisedRows":
        """Some of the rows, as views."""
        return QuantisedRows(self.data[rows], self.scale[rows])

    def dequantise(self, dtype: torch.dtype) -> torch.Tensor:
        """Plain rows [S, C]; the product is fp32 and rounds once."""
        return (self.data.float() * self.scale).to(dtype)


def empty_rows(S: int, C: int, form: str, device: torch.device) -> QuantisedRows:
    """Unwritten rows for a kernel to fill."""
    data = torch.empty(S, C, dtype=FORMS[form][0], device=device)
    return QuantisedRows(data, torch.empty(S, 1, dtype=torch.float32, device=device))
