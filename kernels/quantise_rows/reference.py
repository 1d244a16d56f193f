"""Ground truth for quantise_rows. S rows, C channels."""

from .forms import FORMS, TINY, QuantisedRows


def quantise_rows_reference(x_SC, form):
    """scale = max|row| / top; data = row / scale in fp32, rounded to the form once."""
    dtype, top = FORMS[form]
    x = x_SC.float()
    scale = (x.abs().amax(dim=-1, keepdim=True) / top).clamp_min(TINY)
    data = x / scale
    return QuantisedRows((data.round() if form == "int8" else data).clamp(-top, top).to(dtype), scale)
