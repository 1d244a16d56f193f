"""Output heads of students that predict several fine steps at once (FastH3 Omni).

The output projections hold a bank: row block j is the head of fine step j. One forward covers a few consecutive fine
steps, and its velocity is the average of their heads, weighted by the sigma that each step covers on the stream's own
grid. A linear head commutes with that average, so the bank collapses to one small matrix a forward and stream.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

FORMS = ("absolute", "residual")
"""How a file stores the bank: every head itself (diffusers), or head 0 and the differences to it (single-file)."""

STREAMS = ("video", "audio")


@dataclass(frozen=True)
class Bank:
    """How the fine steps of a bank are spread over the forwards of a run."""

    fine_sigmas: Mapping[str, torch.Tensor]
    """Stream -> [heads + 1], from noise to 0."""
    per_forward: int


Heads = Mapping[str, tuple[torch.Tensor, torch.Tensor]]
"""Stream -> weight [out, in] and bias [out] of its output projection."""


def heads_of_steps(top: Mapping[str, torch.Tensor], bank: Bank | None, form: str, forwards: int) -> tuple[Heads, ...]:
    """The output projections of every forward; without a bank they are the same for all.

    Args:
        top: weights outside the blocks.
        form: how the weights store the bank, see FORMS.
    """
    stored = {s: (top[f"final_layer.{s}_out.weight"], top[f"final_layer.{s}_out.bias"]) for s in STREAMS}
    if bank is None:
        return (stored,) * forwards
    n = bank.per_forward
    return tuple(
        {s: collapse(*stored[s], bank.fine_sigmas[s], i * n, (i + 1) * n, form) for s in STREAMS}
        for i in range(forwards)
    )


def collapse(
    weight: torch.Tensor, bias: torch.Tensor, fine_sigmas: torch.Tensor, first: int, last: int, form: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """The head of one forward, in fp32.

    Args:
        weight: [heads * out, in]; bias: [heads * out].
        fine_sigmas: [heads + 1], from noise to 0, of this stream.
        first, last: the forward covers fine steps first ... last - 1.
        form: see FORMS.

    Returns:
        weight [out, in] and bias [out].
    """
    heads = fine_sigmas.numel() - 1
    covered = (fine_sigmas[:-1] - fine_sigmas[1:]).to(weight.device, torch.float32)
    share = torch.zeros_like(covered)
    share[first:last] = covered[first:last] / covered[first:last].sum()
    if form == "residual":
        share[0] = 1.0  # the differences' shares sum to at most one on top of head 0
    bank, biases = weight.float().unflatten(0, (heads, -1)), bias.float().unflatten(0, (heads, -1))
    return torch.einsum("j,joi->oi", share, bank), share @ biases
