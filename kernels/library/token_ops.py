"""Operators of the token-wise ops. S tokens, C channels, R modulation rows."""

from collections.abc import Sequence

import torch

from .. import registry
from ..quantise_rows import QuantisedRows
from ..quantise_rows.forms import empty_rows
from ..segments import Segments
from .define import operator

_SEGMENTS = "int[] spans, Tensor rows"


def _flat(segments: Segments) -> tuple[list[int], torch.Tensor]:
    return [number for span in segments.spans for number in span], segments.rows


def _segments(spans: Sequence[int], rows: torch.Tensor) -> Segments:
    return Segments(tuple(zip(spans[::3], spans[1::3], spans[2::3], strict=True)), rows)


def pair(rows: torch.Tensor | QuantisedRows) -> tuple[torch.Tensor, torch.Tensor]:
    """What an operator returns for rows of either kind: data and scales, or plain rows and nothing."""
    return (rows, rows.new_empty(0)) if isinstance(rows, torch.Tensor) else (rows.data, rows.scale)


def rows_of(data: torch.Tensor, scale: torch.Tensor, form: str) -> torch.Tensor | QuantisedRows:
    """The inverse of `pair`."""
    return QuantisedRows(data, scale) if form else data


def empty_pair(like: torch.Tensor, form: str) -> tuple[torch.Tensor, torch.Tensor]:
    """`pair` for a fake: rows as wide as `like` [S, C]."""
    return pair(empty_rows(*like.shape, form, like.device) if form else like.new_empty(like.shape))


def _rms_modulate(implementation, x, weight, scale, shift, spans, rows, eps, form):
    return pair(implementation(x, weight, scale, shift, _segments(spans, rows), eps, form))


_rms_modulate_operator = operator(
    "rms_modulate",
    f"(str backend, Tensor x, Tensor weight, Tensor scale, Tensor shift, {_SEGMENTS}, float eps, str form)"
    " -> (Tensor, Tensor)",
    lambda x, weight, scale, shift, spans, rows, eps, form: empty_pair(x, form),
    _rms_modulate,
)


@registry.traced("rms_modulate")
def rms_modulate(backend, x, weight, scale, shift, segments, eps, form=""):
    return rows_of(*_rms_modulate_operator(backend, x, weight, scale, shift, *_flat(segments), eps, form), form)


def _residual_rms_modulate(implementation, x, y, gate, weight, scale, shift, spans, rows, eps, form):
    return pair(implementation(x, y, gate, weight, scale, shift, _segments(spans, rows), eps, form))


_residual_rms_modulate_operator = operator(
    "residual_rms_modulate",
    "(str backend, Tensor(a!) x, Tensor y, Tensor gate, Tensor weight, Tensor scale, Tensor shift, "
    f"{_SEGMENTS}, float eps, str form) -> (Tensor, Tensor)",
    lambda x, y, gate, weight, scale, shift, spans, rows, eps, form: empty_pair(x, form),
    _residual_rms_modulate,
)


@registry.traced("residual_rms_modulate")
def residual_rms_modulate(backend, x, y, gate, weight, scale, shift, segments, eps, form=""):
    flat = _flat(segments)
    return rows_of(
        *_residual_rms_modulate_operator(backend, x, y, gate, weight, scale, shift, *flat, eps, form), form
    )


def _gated_residual(implementation, x, y, gate, spans, rows):
    implementation(x, y, gate, _segments(spans, rows))


_gated_residual_operator = operator(
    "gated_residual",
    f"(str backend, Tensor(a!) x, Tensor y, Tensor gate, {_SEGMENTS}) -> ()",
    lambda x, y, gate, spans, rows: None,
    _gated_residual,
)


@registry.traced("gated_residual")
def gated_residual(backend, x, y, gate, segments):
    _gated_residual_operator(backend, x, y, gate, *_flat(segments))
    return x


_qk_norm_rope_operator = operator(
    "qk_norm_rope",
    "(str backend, Tensor(a!) q, Tensor(b!) k, Tensor q_weight, Tensor k_weight, Tensor cos, Tensor sin, float eps)"
    " -> ()",
    lambda q, k, q_weight, k_weight, cos, sin, eps: None,
)


@registry.traced("qk_norm_rope")
def qk_norm_rope(backend, q, k, q_weight, k_weight, cos, sin, eps):
    _qk_norm_rope_operator(backend, q, k, q_weight, k_weight, cos, sin, eps)


def _swiglu(implementation, value, gate, bias, form):
    data, scale = pair(implementation(value, gate, bias, form))
    # an operator may return none of its arguments, and implementations work in place on the value or the gate
    in_place = data.data_ptr() in (value.data_ptr(), gate.data_ptr())
    return (data.clone(memory_format=torch.contiguous_format) if in_place else data), scale


_swiglu_operator = operator(
    "swiglu",
    "(str backend, Tensor(a!) value, Tensor(b!) gate, Tensor? bias, str form) -> (Tensor, Tensor)",
    lambda value, gate, bias, form: empty_pair(value, form),
    _swiglu,
)


@registry.traced("swiglu")
def swiglu(backend, value, gate, bias=None, form=""):
    return rows_of(*_swiglu_operator(backend, value, gate, bias, form), form)
