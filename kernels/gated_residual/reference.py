"""Ground truth for gated_residual. S tokens, C channels, R modulation rows."""


def gated_residual_reference(x_SC, y_SC, gate_RC, segments):
    """x + gate[r] * y, every row with the r of its segment, in fp32; cast once to x's dtype."""
    out = x_SC.float()
    for start, stop, row in segments:
        out[start:stop] += gate_RC[row].float() * y_SC[start:stop].float()
    return out.to(x_SC.dtype)
