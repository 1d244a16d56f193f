"""Mirrors cli/graph.py, cli/check.py and cli/executor.py."""

import json

import pytest
from comfyui_fasth3.cli.check import check
from comfyui_fasth3.cli.executor import execute
from comfyui_fasth3.cli.graph import GraphError, apply_settings, read_graph

from .nodes_for_tests import CLASSES


def node(class_type, **inputs):
    return {"class_type": class_type, "inputs": inputs}


def graph():
    return {
        "9": node("Show", number=["2", 0], text=["2", 1]),
        "2": node("Add", a=["1", 0], b=5, flavour="salted"),
        "1": node("Number", value=3),
    }


def test_runs_in_order_with_links_hidden_inputs_and_async_nodes():
    seen = []
    results = execute(graph(), CLASSES, on_node=lambda *args: seen.append(args))
    assert seen == [(1, 3, "1", "Number"), (2, 3, "2", "Add"), (3, 3, "9", "Show")]
    assert results["2"].outputs == (8, "salted")
    assert results["9"].ui == {"text": ("9: 8 salted of 3",)}
    assert results["1"].ui == {}


@pytest.mark.parametrize("inputs, value", [
    ({"kind": "off"}, [("kind", "off")]),
    ({"kind": "tuned", "kind.strength": 4}, [("kind", "tuned"), ("strength", 4)]),
])
def test_dotted_inputs_arrive_nested(inputs, value):
    given = {"1": {"class_type": "Mixer", "inputs": inputs}, "2": node("Show", number=1, text=["1", 0])}
    assert execute(given, CLASSES)["1"].outputs == (str(value),)


def test_a_link_to_one_node_from_two_runs_it_once():
    seen = []
    given = {"1": node("Number", value=1), "2": node("Add", a=["1", 0], b=["1", 0]), "3": node("Show", number=["2", 0])}
    results = execute(given, CLASSES, on_node=lambda *args: seen.append(args[2]))
    assert seen == ["1", "2", "3"]
    assert results["2"].outputs[0] == 2


def test_what_a_node_raises_passes_through():
    with pytest.raises(ValueError, match="no 3 today"):
        execute({"1": node("Fail", number=3)}, CLASSES)


BAD = {
    "unknown-class": ({"1": node("CLIPLoader")}, r"(?s)node 1: there is no CLIPLoader here\n.*'submit'"),
    "missing": ({"1": node("Show")}, r"node 1 \(Show\): input 'number' is missing"),
    "unknown-input": ({"1": node("Show", number=1, colour=2)}, "no input 'colour'"),
    "missing-node": ({"1": node("Show", number=["7", 0])}, "'number' links to node 7, which is not there"),
    "missing-output": (
        {"1": node("Number", value=1), "2": node("Show", number=["1", 1])}, "output 1 of node 1, which has 1"),
    "type": (
        {"1": node("Number", value=1), "2": node("Show", number=1, text=["1", 0])}, "'text' takes STRING, node 1"),
    "choice": (
        {"1": node("Add", a=1, b=1, flavour="sweet"), "2": node("Show", number=1)},
        "flavour='sweet' is not one of 'plain', 'salted'"),
    "range": ({"1": node("Number", value=11), "2": node("Show", number=1)}, "value=11 is outside 0 to 10"),
    "no-number": ({"1": node("Show", number="x")}, "number='x' is no INT"),
    "bool-is-no-number": ({"1": node("Show", number=True)}, "number=True is no INT"),
    "float-is-no-int": ({"1": node("Show", number=1.5)}, "number=1.5 is no INT"),
    "no-text": ({"1": node("Show", number=1, text=2)}, "text=2 is no STRING"),
    "nothing-shown": ({"1": node("Number", value=1)}, "no node saves or shows anything"),
    "cycle": (
        {"1": node("Add", a=["2", 0], b=1), "2": node("Add", a=["1", 0], b=1), "3": node("Show", number=["1", 0])},
        "in a cycle: 1 -> 2 -> 1"),
    "itself": ({"1": node("Add", a=["1", 0], b=1), "3": node("Show", number=1)}, "in a cycle: 1 -> 1"),
    "dynamic-choice": ({"1": node("Mixer", kind="x"), "2": node("Show", number=1)}, "kind='x' is not one of 'off', 't"),
    "dynamic-missing": (
        {"1": node("Mixer", kind="tuned"), "2": node("Show", number=1)}, "input 'kind.strength' is missing"),
    "dynamic-range": (
        {"1": {"class_type": "Mixer", "inputs": {"kind": "tuned", "kind.strength": 99}}, "2": node("Show", number=1)},
        "kind.strength=99 is outside 0 to 9"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_graph(name):
    given, message = BAD[name]
    with pytest.raises(GraphError, match=message):
        check(given, CLASSES)


def test_all_problems_are_told_at_once():
    with pytest.raises(GraphError) as raised:
        check({"1": node("Number", value=99), "2": node("Show", number=["7", 0]), "3": node("Show")}, CLASSES)
    assert len(str(raised.value).splitlines()) == 4


def test_an_integer_is_a_fine_float():
    check({"1": node("Add", a=1, b=1, scale=1), "2": node("Show", number=1)}, CLASSES)


def write(tmp_path, data):
    path = tmp_path / "g.json"
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return path


@pytest.mark.parametrize("wrapped", [False, True])
def test_read(tmp_path, wrapped):
    assert read_graph(write(tmp_path, {"prompt": graph()} if wrapped else graph())) == graph()


def test_read_what_a_windows_editor_saved(tmp_path):
    path = tmp_path / "g.json"
    path.write_text(json.dumps(graph()), encoding="utf-8-sig")
    assert read_graph(path) == graph()


@pytest.mark.parametrize("data, message", [
    ("{", "cannot be read as JSON"), ("[" * 100_000, "cannot be read as JSON"),
    ({"nodes": [], "links": []}, "the editor's form.*Export"),
    ([], "no API-format graph"), ({}, "no API-format graph"), ({"1": {"class_type": "X"}}, "no API-format graph"),
    ({"1": 5}, "no API-format graph"),
])  # fmt: skip
def test_read_refuses(tmp_path, data, message):
    with pytest.raises(GraphError, match=message):
        read_graph(write(tmp_path, data))


def test_read_missing_file(tmp_path):
    with pytest.raises(GraphError, match="cannot be read"):
        read_graph(tmp_path / "gone.json")


@pytest.mark.parametrize("setting, where, value", [
    ("1.value=7", ("1", "value"), 7), ("Number.value=7", ("1", "value"), 7),
    ("2.flavour=plain", ("2", "flavour"), "plain"), ('2.flavour="plain"', ("2", "flavour"), "plain"),
    ("2.a=[\"1\",0]", ("2", "a"), ["1", 0]), ("9.text=a=b", ("9", "text"), "a=b"), ("2.scale=1.5", ("2", "scale"), 1.5),
    ("9.text=", ("9", "text"), ""), ("2.flavour=10", ("2", "flavour"), "10"),
    ("2.kind.strength=3", ("2", "kind.strength"), 3),
])  # fmt: skip
def test_settings(setting, where, value):
    changed = graph()
    apply_settings(changed, [setting])
    assert changed[where[0]]["inputs"][where[1]] == value


@pytest.mark.parametrize("setting, message", [
    ("value", "expected NODE.INPUT=VALUE"), ("1=2", "expected NODE.INPUT=VALUE"), ("1.=2", "expected NODE.INPUT"),
    ("7.value=1", "0 nodes are called '7'"), ("Sub.value=1", "0 nodes are called 'Sub'.*1 .Number."),
])  # fmt: skip
def test_settings_refuse(setting, message):
    with pytest.raises(GraphError, match=message):
        apply_settings(graph(), [setting])


def test_a_class_that_occurs_twice_needs_the_id():
    twice = graph() | {"3": node("Number", value=1)}
    with pytest.raises(GraphError, match="2 nodes are called 'Number'"):
        apply_settings(twice, ["Number.value=1"])
