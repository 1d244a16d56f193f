"""API-format graphs: reading and changing them."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..fasth3_core.errors import FastH3Error

Graph = dict[str, dict[str, Any]]
"""Node id -> {"class_type", "inputs": {name: value or [node id, output slot]}}."""


class GraphError(FastH3Error):
    """A graph that cannot run; the message names every node and input at fault."""


def read_graph(path: str | Path) -> Graph:
    """Read an API-format file, or the `prompt` of a file that wraps one."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8-sig"))  # Windows editors write a mark
    except OSError as error:
        raise GraphError(f"{path}: cannot be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:  # no UTF-8, no JSON, or nested beyond all measure
        raise GraphError(f"{path}: cannot be read as JSON: {error}") from error
    if isinstance(data, dict) and isinstance(data.get("nodes"), list):
        raise GraphError(
            f"{path} is the editor's form of a workflow. Export it with 'Export (API)', or take the file of the same "
            "name in workflows/api/."
        )
    graph = data.get("prompt", data) if isinstance(data, dict) else None
    if not isinstance(graph, dict) or not graph or not all(
        isinstance(node, dict) and isinstance(node.get("class_type"), str) and isinstance(node.get("inputs"), dict)
        for node in graph.values()
    ):
        raise GraphError(f"{path} is no API-format graph: expected {{node id: {{class_type, inputs}}}}.")
    return graph


def apply_settings(graph: Graph, settings: Sequence[str]) -> None:
    """Change inputs in place. Each setting is NODE.INPUT=VALUE: NODE is an id, or a class that occurs once; VALUE is
    JSON, or else text; where the graph has text, a number is text, too."""
    for setting in settings:
        target, equals, text = setting.partition("=")
        node_name, dot, name = target.partition(".")
        if not equals or not dot or not name:
            raise GraphError(f"{setting!r}: expected NODE.INPUT=VALUE, for example 5.seed=1 or FastH3Sampler.seed=1.")
        ids = [node_name] if node_name in graph else [i for i, n in graph.items() if n["class_type"] == node_name]
        if len(ids) != 1:
            known = ", ".join(f"{i} ({node['class_type']})" for i, node in graph.items())
            raise GraphError(f"{setting!r}: {len(ids)} nodes are called {node_name!r}. There are {known}.")
        try:
            value = json.loads(text)
        except json.JSONDecodeError:
            value = text
        inputs = graph[ids[0]]["inputs"]
        inputs[name] = text if isinstance(inputs.get(name), str) and not isinstance(value, (str, list)) else value


def saved_files(ui: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    """Files that a node saved, by what it tells the interface, in whatever list ("images" holds videos too)."""
    for value in ui.values():
        for item in value if isinstance(value, list) else ():
            if isinstance(item, dict) and item.get("filename") and item.get("type") == "output":
                yield item


def is_link(value: Any) -> bool:
    match value:
        case [str() | int(), int()]:
            return True
    return False
