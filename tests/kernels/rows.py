"""Checks of quantised rows, for every op that ends in them."""

import torch
from comfyui_fasth3.kernels.quantise_rows import FORMS, QuantisedRows

# half a step is 2**-4 of a value in fp8 and 1/254 of the row's largest, up to 5 times the root mean square, in int8
QUANTISED = {"fp8": 0.04, "int8": 0.02}
GAIN = 5e-3


def error(out, reference):
    return ((out.float() - reference).norm() / reference.norm()).item()


def assert_quantised(rows, reference, form, rounding=1e-6):
    """Close to what was quantised, the largest of every row at the end of the range, and a step that bites.

    rounding: relative, of what was quantised.
    """
    assert isinstance(rows, QuantisedRows) and rows.data.dtype == FORMS[form][0] and rows.scale.dtype == torch.float32
    assert bool((rows.data.float().abs().amax(dim=1) == FORMS[form][1]).all())
    largest = reference.abs().amax(dim=1, keepdim=True) / FORMS[form][1]
    torch.testing.assert_close(rows.scale, largest, rtol=1e-2 if form == "fp8" else rounding, atol=0)
    out = rows.dequantise(torch.float32)
    assert error(out, reference) <= QUANTISED[form] < error(out * (1 + 2 * QUANTISED[form]), reference)
    # errors of rounding cancel out, so that one per cent too much shows where it is less than a step
    gain = ((out * reference).sum() / reference.square().sum()).item()
    assert abs(gain - 1) <= GAIN < abs(1.01 * gain - 1)
