"""gated_residual with torch alone: one multiply-add a segment, in place."""


def gated_residual_eager(x_SC, y_SC, gate_RC, segments):
    for start, stop, row in segments.spans:
        x_SC[start:stop].addcmul_(y_SC[start:stop], gate_RC[row])
    return x_SC
