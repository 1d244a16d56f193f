"""residual_rms_modulate with torch alone: the two ops one after the other."""

from ..gated_residual.eager import gated_residual_eager
from ..rms_modulate.eager import rms_modulate_eager


def residual_rms_modulate_eager(x_SC, y_SC, gate_RC, weight_C, scale_RC, shift_RC, segments, eps, form=""):
    gated_residual_eager(x_SC, y_SC, gate_RC, segments)
    return rms_modulate_eager(x_SC, weight_C, scale_RC, shift_RC, segments, eps, form)
