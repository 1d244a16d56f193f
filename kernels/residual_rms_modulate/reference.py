"""Ground truth for residual_rms_modulate. S tokens, C channels, R modulation rows."""

from ..gated_residual.reference import gated_residual_reference
from ..rms_modulate.reference import rms_modulate_reference


def residual_rms_modulate_reference(x_SC, y_SC, gate_RC, weight_C, scale_RC, shift_RC, segments, eps, form=""):
    """x += gate[r] * y, then the modulated norm of x as stored. fp32 inside; one rounding of x, one of the result."""
    gated_residual_reference(x_SC, y_SC, gate_RC, segments)
    return rms_modulate_reference(x_SC, weight_C, scale_RC, shift_RC, segments, eps, form)
