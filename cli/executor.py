"""Runs a checked API-format graph in this process, on the node API alone: every node once, in order, no cache."""

import asyncio
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..nodes._host import dynamic_inputs, io, nest_inputs
from .check import check
from .graph import Graph, is_link


@dataclass(frozen=True)
class NodeResult:
    outputs: tuple[Any, ...]
    ui: Mapping[str, Any] = field(default_factory=dict)
    """What ComfyUI's interface would show: "images", "text", ..."""


def execute(
    graph: Graph,
    classes: Mapping[str, type],
    on_node: Callable[[int, int, str, str], None] = lambda index, total, node_id, class_type: None,
) -> dict[str, NodeResult]:
    """Run all nodes of a graph.

    Args:
        classes: V3 node classes by id.
        on_node: called before each node as (number from 1, of how many, node id, class).

    Returns:
        Results by node id.

    Raises:
        GraphError: before anything runs, naming every node and input at fault. What a node raises passes through.
    """
    order = check(graph, classes)
    results: dict[str, NodeResult] = {}
    for number, node_id in enumerate(order, 1):
        class_type = graph[node_id]["class_type"]
        on_node(number, len(order), node_id, class_type)
        results[node_id] = _execute_node(graph, node_id, classes[class_type], results)
    return results


def _execute_node(graph: Graph, node_id: str, cls: type, results: Mapping[str, NodeResult]) -> NodeResult:
    values = {
        name: results[str(value[0])].outputs[value[1]] if is_link(value) else value
        for name, value in graph[node_id]["inputs"].items()
    }
    _, _, dynamic = dynamic_inputs(cls, values)
    hidden = {io.Hidden.unique_id: node_id, io.Hidden.prompt: graph}
    clone = cls.PREPARE_CLASS_CLONE({**dynamic, "hidden_inputs": hidden})
    returned = getattr(clone, cls.FUNCTION)(**nest_inputs(values, dynamic))
    output = asyncio.run(returned) if inspect.isawaitable(returned) else returned
    ui = output.ui.as_dict() if hasattr(output.ui, "as_dict") else output.ui
    return NodeResult(tuple(output.result or ()), ui or {})
