"""Ground truth for gated_residual. S tokens, C channels, R modulation rows."""


def gated_residual_reference(x_SC, y_SC, gate_RC, segments):
    """x = x + gate[r] * y, every row with the r of its segment, in fp32; written once to x."""
    for start, stop, row in segments.spans:
        x_SC[start:stop] = x_SC[start:stop].float() + gate_RC[row].float() * y_SC[start:stop].float()
    return x_SC
