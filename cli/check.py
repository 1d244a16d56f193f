"""An API-format graph against the nodes there are: all problems at once, before anything runs."""

import inspect
from collections.abc import Mapping
from typing import Any

from ..nodes._host import dynamic_inputs, io
from .graph import Graph, GraphError, is_link

_NUMBERS = {"INT": int, "FLOAT": float}
_LISTED = 8
"""Choices of a combo that a message names."""


def check(graph: Graph, classes: Mapping[str, type]) -> list[str]:
    """Order of execution: node ids, each after those it reads from.

    Raises:
        GraphError: unknown classes, missing inputs, links to nothing or of another type, values that a widget does
            not take, a cycle, or no node that saves or shows anything.
    """
    known = {i: classes[node["class_type"]] for i, node in graph.items() if node["class_type"] in classes}
    problems = [f"node {i}: there is no {node['class_type']} here" for i, node in graph.items() if i not in known]
    if problems:
        problems.append(f"there are {', '.join(sorted(classes))}; a running ComfyUI has more: see the command 'submit'")
    else:
        for i, cls in known.items():
            where = f"node {i} ({graph[i]['class_type']})"
            problems += [f"{where}: {text}" for text in _node_problems(graph, i, cls, known)]
        if not any(cls.OUTPUT_NODE for cls in known.values()):
            problems.append("no node saves or shows anything")
        if not problems:  # what nodes check themselves, of values that fit their widgets
            for i, cls in known.items():
                where = f"node {i} ({graph[i]['class_type']})"
                problems += [f"{where}: {text}" for text in _own_checks(graph[i]["inputs"], cls)]
    if problems:
        raise GraphError("the graph cannot run:\n" + "\n".join(f"  {text}" for text in problems))
    return _order(graph)


def _node_problems(graph: Graph, node_id: str, cls: type, known: Mapping[str, type]) -> list[str]:
    inputs = graph[node_id]["inputs"]
    required, optional, _ = dynamic_inputs(cls, inputs)
    declared = cls.INPUT_TYPES()  # a dynamic input with a wrong choice unfolds to nothing
    specs = {**declared.get("optional", {}), **declared.get("required", {}), **optional, **required}
    problems = [f"input {name!r} is missing" for name in required if name not in inputs]
    for name, value in inputs.items():
        spec = specs.get(name)
        if spec is None:
            problems.append(f"there is no input {name!r}")
        elif is_link(value):
            problems += _link_problems(name, value, spec, known)
        else:
            problems += _value_problems(name, value, spec)
    return problems


def _own_checks(inputs: Mapping[str, Any], cls: type) -> list[str]:
    """What the node's validate_inputs finds in the values that it asks for by name; links have none yet."""
    if cls.validate_inputs.__func__ is io.ComfyNode.validate_inputs.__func__:
        return []
    named = set(inspect.signature(cls.validate_inputs).parameters)
    found = cls.validate_inputs(**{k: v for k, v in inputs.items() if k in named and not is_link(v)})
    return [found] if isinstance(found, str) else []


def _link_problems(name: str, link: list, spec: tuple, known: Mapping[str, type]) -> list[str]:
    source = known.get(str(link[0]))
    if source is None:
        return [f"{name!r} links to node {link[0]}, which is not there"]
    outputs = source.RETURN_TYPES
    if link[1] not in range(len(outputs)):
        return [f"{name!r} links to output {link[1]} of node {link[0]}, which has {len(outputs)}"]
    have, want = outputs[link[1]], spec[0]
    if "*" in (have, want) or isinstance(want, list) or set(have.split(",")) & set(want.split(",")):
        return []
    return [f"{name!r} takes {want}, node {link[0]} gives {have}"]


def _value_problems(name: str, value: Any, spec: tuple) -> list[str]:
    kind, options = spec[0], spec[1] if len(spec) > 1 else {}
    choices = _choices(kind, options)
    if choices is not None:
        if value in choices:
            return []
        if not choices:
            return [f"{name}={value!r} is not there, and there is no other: see the options --models and --input"]
        listed = ", ".join(map(repr, choices[:_LISTED])) + (", ..." if len(choices) > _LISTED else "")
        return [f"{name}={value!r} is not one of {listed}"]
    if kind in _NUMBERS:
        if isinstance(value, bool) or not isinstance(value, (int, _NUMBERS[kind])):
            return [f"{name}={value!r} is no {kind}"]
        low, high = options.get("min", value), options.get("max", value)
        return [] if low <= value <= high else [f"{name}={value!r} is outside {low} to {high}"]
    if kind in ("STRING", "BOOLEAN"):
        return [] if isinstance(value, str if kind == "STRING" else bool) else [f"{name}={value!r} is no {kind}"]
    return [f"{name!r} takes a link to a {kind}, not a value"]


def _choices(kind: Any, options: Mapping[str, Any]) -> list | None:
    """What a combo, in any of its three forms, may hold; None for everything else."""
    if isinstance(kind, list):
        return kind
    if kind == "COMBO":
        return options["options"]
    if str(kind).startswith("COMFY_DYNAMICCOMBO"):
        return [option["key"] for option in options["options"]]
    return None


def _order(graph: Graph) -> list[str]:
    done: list[str] = []
    path: list[str] = []

    def visit(node_id: str) -> None:
        if node_id in done:
            return
        if node_id in path:
            cycle = " -> ".join([*path[path.index(node_id):], node_id])
            raise GraphError(f"the graph cannot run:\n  nodes read from each other in a cycle: {cycle}")
        path.append(node_id)
        for value in graph[node_id]["inputs"].values():
            if is_link(value):
                visit(str(value[0]))
        path.pop()
        done.append(node_id)

    for node_id in graph:
        visit(node_id)
    return done
