"""Operators of the products with quantised weights. S tokens, I input and O output features."""

import torch

from .. import registry
from ..quantise_rows import QuantisedRows
from .define import operator
from .token_ops import empty_pair, pair

_quantise_rows_operator = operator(
    "quantise_rows",
    "(str backend, Tensor x, str form) -> (Tensor, Tensor)",
    empty_pair,
    lambda implementation, x, form: pair(implementation(x, form)),
)


@registry.traced("quantise_rows")
def quantise_rows(backend, x, form):
    return QuantisedRows(*_quantise_rows_operator(backend, x, form))


def _fp8_linear(implementation, x, x_scale, weight, weight_scale, dtype):
    return implementation(QuantisedRows(x, x_scale), QuantisedRows(weight, weight_scale), dtype)


_fp8_linear_operator = operator(
    "fp8_linear",
    "(str backend, Tensor x, Tensor x_scale, Tensor weight, Tensor weight_scale, ScalarType dtype) -> Tensor",
    lambda x, x_scale, weight, weight_scale, dtype: x.new_empty(x.shape[0], weight.shape[0], dtype=dtype),
    _fp8_linear,
)


@registry.traced("fp8_linear")
def fp8_linear(backend, x, weight, dtype, out=None):
    y = _fp8_linear_operator(backend, x.data, x.scale, weight.data, weight.scale, dtype)
    return y if out is None else out.copy_(y)


def _int8_linear_fake(x, weight, scale, bias, group) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


_int8_linear_operator = operator(
    "int8_linear",
    "(str backend, Tensor x, Tensor weight, Tensor scale, Tensor? bias, int? group) -> Tensor",
    _int8_linear_fake,
)


@registry.traced("int8_linear")
def int8_linear(backend, x, weight, scale, bias, group, out=None):
    y = _int8_linear_operator(backend, x, weight, scale, bias, group)
    return y if out is None else out.copy_(y)
