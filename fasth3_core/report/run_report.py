"""What one run did, as plain data: the record that the sampler fills and nodes, files and people read."""

from dataclasses import asdict, dataclass, field
from typing import Any

ADAPTER_OUTCOMES = ("merged", "beside", "created", "unmatched")
"""What becomes of a tensor of an adapter: into the weight; kept with a weight that stays as it is; a weight that the
model lacked; nothing."""


@dataclass
class StepReport:
    index: int
    sigma_video: float
    sigma_audio: float
    sparse_blocks: int
    dense_blocks: int
    kept_tiles: int
    """Video tiles that each query tile of the sparse blocks kept."""
    seconds: float


@dataclass
class RunReport:
    """JSON-ready; `schema` changes when a field changes its meaning."""

    schema: str = "fasth3-run-1"
    model: dict[str, Any] = field(default_factory=dict)
    contract: dict[str, Any] = field(default_factory=dict)
    departures: list[str] = field(default_factory=list)
    """Every setting that differs from the contract."""
    warnings: list[str] = field(default_factory=list)
    geometry: dict[str, Any] = field(default_factory=dict)
    attention: dict[str, Any] = field(default_factory=dict)
    """Backend that ran, and the reasons of those that did not."""
    token_ops: list[dict[str, Any]] = field(default_factory=list)
    """The operations outside attention: a row each with backend, calls, and the reasons of those refused."""
    steps: list[StepReport] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    """By stage."""
    weights: dict[str, Any] = field(default_factory=dict)
    """Where the blocks were kept, and what was streamed."""
    memory: dict[str, int] = field(default_factory=dict)
    """Peak bytes on the device, where the device tells, and the tokens that went through the products together."""
    environment: dict[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def to_text(self) -> str:
        """A few lines for the node and the log. What is not recorded, as in files of other versions, is not told."""
        lines = list(_request_lines(self.model, self.contract, self.geometry, len(self.steps)))
        lines += [*_adapter_lines(self.model.get("adapters", ())), *_attention_lines(self.attention, self.steps)]
        lines += [f"not used: {name}: {why}" for name, why in self.attention.get("refused", {}).items()]
        if self.token_ops:
            lines.append("token-wise operations: " + ", ".join(sorted({row["backend"] for row in self.token_ops})))
        lines += _weights_lines(self.weights)
        lines += [f"departs from the contract: {text}" for text in self.departures]
        lines += [f"warning: {text}" for text in self.warnings]
        if self.seconds:
            lines.append(", ".join(f"{stage} {value:.2f} s" for stage, value in self.seconds.items()))
        return "\n".join(lines)


def _request_lines(model: dict[str, Any], contract: dict[str, Any], geometry: dict[str, Any], forwards: int):
    name, own = contract.get("name", "not recorded"), ""
    if {"shift_video", "shift_audio"} <= contract.keys():  # what departs from them is listed below
        own = f" (shifts {contract['shift_video']:g}/{contract['shift_audio']:g})"
    ran = [f"contract {name}{own}", f"{forwards} forwards", *filter(None, [model.get("dtype")])]
    yield f"{model.get('source', '?')}: " + ", ".join(ran)
    if geometry:
        width, height, frames, tokens = (geometry.get(key, "?") for key in ("width", "height", "frames", "tokens"))
        yield f"{width}x{height}, {frames} frames, {tokens} tokens"
    if str(model.get("contract_by", "")).startswith("default"):
        yield f"contract {name} by {model['contract_by']}"


def _adapter_lines(adapters: list[dict[str, Any]]):
    for adapter in adapters:
        used = ", ".join(f"{adapter[what]} {what}" for what in ADAPTER_OUTCOMES if adapter[what])
        yield f"adapter {adapter['name']} at {adapter['strength']:g}: {used} tensors"


def _attention_lines(attention: dict[str, Any], steps: list[StepReport]):
    sparse = sum(step.sparse_blocks for step in steps)
    total = sparse + sum(step.dense_blocks for step in steps)
    if attention.get("tile_size"):
        kept = sorted({step.kept_tiles for step in steps})
        yield (
            f"VSA: backend {attention.get('backend')}, tile {attention['tile_size']}, {sparse} of {total} block "
            f"calls sparse, {'/'.join(map(str, kept))} of {attention.get('video_tiles')} video tiles kept"
        )
    elif steps:
        yield f"dense attention by contract, {total} block calls"


def _weights_lines(weights: dict[str, Any]) -> list[str]:
    if "streamed_bytes" not in weights:
        return []
    pinned = weights["pinned_bytes"] / max(1, weights["host_bytes"])
    return [
        f"weights: {weights['placement']}; {weights['streamed_bytes'] / 2**30:.1f} GiB streamed in {weights['copies']} "
        f"copies, {pinned:.0%} of them page-locked, waited {weights['wait_seconds']:.2f} s"
    ]
