"""Comparing tensors."""


def close(actual, expected, atol):
    return actual.shape == expected.shape and bool(((actual - expected).abs() <= atol).all())
