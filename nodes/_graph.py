"""What the graph around a node says about a prompt: its text, and the encoder's file."""

import hashlib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..fasth3_core.errors import CheckpointError
from ._paths import resolve

_TEXT_INPUTS = ("text", "prompt")
_ENCODER_INPUT = "clip_name"
_LENGTH_BYTES = 8
"""A safetensors file starts with the length of its header."""


def prompt_facts(graph: Mapping[str, Any] | None, node_id: str | None, encoder_roots: Iterable[Path]) -> dict[str, str]:
    """Metadata of an encoded prompt: `prompt`, and `encoder` with `encoder_hash` where a loader is upstream.

    Args:
        graph: the queued graph in API form, or None where a host gives none.
        node_id: the saving node; everything upstream of it is looked at.
    """
    texts, encoders = [], []
    for node in _upstream(graph or {}, node_id):
        inputs = node.get("inputs", {})
        texts += [inputs[name] for name in _TEXT_INPUTS if isinstance(inputs.get(name), str)]
        if isinstance(inputs.get(_ENCODER_INPUT), str):
            encoders.append(inputs[_ENCODER_INPUT])
    facts = {"prompt": texts[0]} if texts else {}
    if encoders:
        facts["encoder"] = encoders[0]
        with suppress(CheckpointError):  # a loader of another pack reads elsewhere: then the name alone is known
            facts["encoder_hash"] = header_hash(resolve(encoder_roots, encoders[0]))
    return facts


def header_hash(path: Path) -> str:
    """SHA-256 of a safetensors header: names, shapes and dtypes identify an encoder without reading its 14 GB."""
    with open(path, "rb") as file:
        prefix = file.read(_LENGTH_BYTES)
        return hashlib.sha256(prefix + file.read(int.from_bytes(prefix, "little"))).hexdigest()


def _upstream(graph: Mapping[str, Any], node_id: str | None) -> Iterable[Mapping[str, Any]]:
    """Nodes that feed `node_id`, nearest first."""
    seen, queue = {node_id}, [node_id]
    while queue:
        node = graph.get(queue.pop(0), {})
        yield node
        for value in node.get("inputs", {}).values():
            if isinstance(value, list) and len(value) == 2 and value[0] in graph and value[0] not in seen:
                seen.add(value[0])
                queue.append(value[0])
