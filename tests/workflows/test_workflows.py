"""The shipped workflows: both forms say the same, every value is legal, and a reader finds the files they name."""

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "workflows"
NAMES = [
    "fasth3_first_last_frame", "fasth3_references", "fasth3_t2v_adapter", "fasth3_t2v_from_embeds",
    "fasth3_t2v_preview",
]
STOCK = json.loads((ROOT / "tests" / "comfy" / "stock_nodes.json").read_text("utf-8"))
"""Schemas of ComfyUI's own nodes, as its server announces them, file lists emptied."""

NOTE = "MarkdownNote"
COMPANIONS = {("FastH3Sampler", "seed"): "fixed", ("LoadImage", "image"): "image"}
"""Widgets behind which the editor stores one more value: what to do with a seed after the run, the upload button."""
GROWING = ("images", "videos", "audios")
"""Inputs that unfold to as many sockets as are connected, and one more: images.image_0, ..."""
WIDGET_TYPES = ("INT", "FLOAT", "STRING", "BOOLEAN", "COMBO")
FOLDERS = {
    ("FastH3LoadModel", "model_name"): "diffusion_models", ("FastH3LoadVAE", "video_vae"): "vae",
    ("FastH3LoadVAE", "audio_vae"): "vae", ("VAELoader", "vae_name"): "vae",
    ("CLIPLoader", "clip_name"): "text_encoders", ("FastH3ApplyAdapter", "adapter_name"): "loras",
}  # fmt: skip


def ui_of(name):
    return json.loads((FOLDER / f"{name}.json").read_text("utf-8"))


def api_of(name):
    return json.loads((FOLDER / "api" / f"{name}.json").read_text("utf-8"))


@pytest.fixture(scope="module")
def schemas() -> dict[str, dict]:
    """Node id -> {input: (type, options)}, widgets and sockets, in order."""
    from comfyui_fasth3.nodes import NODES

    infos = {**STOCK, **{cls.GET_SCHEMA().node_id: cls.GET_NODE_INFO_V1() for cls in NODES}}
    return {
        node_id: {
            name: (spec[0], spec[1] if len(spec) > 1 else {})
            for section in ("required", "optional")
            for name, spec in info["input"].get(section, {}).items()
        }
        for node_id, info in infos.items()
    }


@pytest.fixture(scope="module")
def order() -> dict[str, list[str]]:
    """Node id -> names of its widgets in the order in which the editor stores their values."""
    from comfyui_fasth3.nodes import NODES

    own = {
        cls.GET_SCHEMA().node_id: [i.id for i in cls.GET_SCHEMA().inputs if i.io_type in WIDGET_TYPES] for cls in NODES
    }
    stock = {
        node_id: [name for section in ("required", "optional")
                  for name, spec in info["input"].get(section, {}).items()
                  if isinstance(spec[0], list) or spec[0] in WIDGET_TYPES]
        for node_id, info in STOCK.items()
    }  # fmt: skip
    return stock | own


def widget_values(node, order) -> dict:
    """Name -> value, from the positional list of the editor's form."""
    values, given = {}, list(node["widgets_values"])
    for name in order[node["type"]]:
        values[name] = given.pop(0)
        if (companion := COMPANIONS.get((node["type"], name))) is not None:
            assert given.pop(0) == companion
    assert given == [], f"{node['type']} stores more values than it has widgets"
    return values


def to_api(ui, order) -> dict:
    links = {link[0]: link for link in ui["links"]}
    graph = {}
    for node in ui["nodes"]:
        if node["type"] == NOTE:
            continue
        inputs = widget_values(node, order)
        for socket in node["inputs"]:
            if socket["link"] is not None:
                _, source, slot, *_ = links[socket["link"]]
                inputs[socket["name"]] = [str(source), slot]
        graph[str(node["id"])] = {"class_type": node["type"], "inputs": inputs}
    return graph


def test_exactly_these_are_shipped_in_both_forms():
    assert sorted(p.stem for p in FOLDER.glob("*.json")) == NAMES
    assert sorted(p.stem for p in (FOLDER / "api").glob("*.json")) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_both_forms_say_the_same(name, order):
    stored = {i: {"class_type": n["class_type"], "inputs": n["inputs"]} for i, n in api_of(name).items()}
    assert to_api(ui_of(name), order) == stored


@pytest.mark.parametrize("name", NAMES)
def test_every_node_and_value_is_legal(name, schemas):
    for node_id, node in api_of(name).items():
        schema = schemas[node["class_type"]]
        required = [n for n, (kind, options) in schema.items() if n not in node["inputs"] and "default" not in options]
        optional = {"vsa", "offload", "audio", "report", "first_frame", "last_frame", "positive", "clip", *GROWING}
        assert set(required) <= optional, f"node {node_id} lacks {required}"
        for given, value in node["inputs"].items():
            kind, options = schema[given.split(".")[0]]
            if isinstance(value, list):
                continue
            choices = kind if isinstance(kind, list) else options.get("options", [])
            is_file = isinstance(value, str) and "." in value and kind != "STRING"
            if choices and not is_file:
                assert value in choices, f"{node['class_type']}.{given}={value!r}"
            if kind in ("INT", "FLOAT"):
                assert options["min"] <= value <= options["max"], f"{node['class_type']}.{given}={value}"
                assert isinstance(value, int if kind == "INT" else (int, float))


@pytest.mark.parametrize("name", NAMES)
def test_links_join_what_is_there(name):
    ui = ui_of(name)
    nodes = {node["id"]: node for node in ui["nodes"]}
    assert len(nodes) == len(ui["nodes"])
    assert ui["last_node_id"] == max(nodes)
    assert ui["last_link_id"] == max(link[0] for link in ui["links"])
    for link_id, source, slot, target, socket, kind in ui["links"]:
        output, given = nodes[source]["outputs"][slot], nodes[target]["inputs"][socket]
        assert link_id in output["links"] and given["link"] == link_id
        assert output["type"] == given["type"] == kind
    used = [link for node in ui["nodes"] for output in node["outputs"] for link in output["links"] or []]
    assert sorted(used) == sorted(link[0] for link in ui["links"])


@pytest.mark.parametrize("name", NAMES)
def test_sockets_and_outputs_are_those_of_the_schema(name, schemas, order):
    from comfyui_fasth3.nodes import NODES

    outputs = {cls.GET_SCHEMA().node_id: list(cls.RETURN_TYPES) for cls in NODES} | {
        node_id: info["output"] for node_id, info in STOCK.items()
    }
    for node in ui_of(name)["nodes"]:
        if node["type"] == NOTE:
            continue
        assert [o["type"] for o in node["outputs"]] == outputs[node["type"]]
        sockets = [i["name"].split(".")[0] for i in node["inputs"] if "widget" not in i]
        assert set(sockets) == set(schemas[node["type"]]) - set(order[node["type"]])
        assert [i["name"] for i in node["inputs"] if "widget" in i] == order[node["type"]]


def loaded_files(name, order):
    """(file, folder, node) of every model file that the workflow names."""
    for node in ui_of(name)["nodes"]:
        for given in order.get(node["type"], ()):
            if (folder := FOLDERS.get((node["type"], given))) is not None:
                yield widget_values(node, order)[given], folder, node


@pytest.mark.parametrize("name", NAMES)
def test_loaders_tell_the_editor_where_files_come_from(name, order):
    for file, folder, node in loaded_files(name, order):
        entries = {model["name"]: model for model in node["properties"]["models"]}
        assert entries[file]["directory"] == folder
        assert entries[file]["url"].startswith("https://huggingface.co/")
        assert entries[file]["url"].endswith("/" + file)


@pytest.mark.parametrize("name", NAMES)
def test_notes_name_every_file_and_its_folder(name, order):
    notes = "\n".join(node["widgets_values"][0] for node in ui_of(name)["nodes"] if node["type"] == NOTE)
    for file, folder, node in loaded_files(name, order):
        assert file in notes and f"models/{folder}" in notes, (file, folder)
        assert all(model["url"] in notes for model in node["properties"]["models"])


def test_keyframe_note_is_honest():
    notes = "\n".join(n["widgets_values"][0] for n in ui_of("fasth3_first_last_frame")["nodes"] if n["type"] == NOTE)
    assert "Off contract" in notes and "text to video with sound only" in notes


def box(node):
    title = 30
    return node["pos"][0], node["pos"][1] - title, node["pos"][0] + node["size"][0], node["pos"][1] + node["size"][1]


@pytest.mark.parametrize("name", NAMES)
def test_layout_is_readable(name):
    ui = ui_of(name)
    boxes = {node["id"]: box(node) for node in ui["nodes"]}
    for a, (left, top, right, bottom) in boxes.items():
        for b, other in boxes.items():
            apart = right <= other[0] or other[2] <= left or bottom <= other[1] or other[3] <= top
            assert a >= b or apart, f"nodes {a} and {b} overlap"
    groups = [group["bounding"] for group in ui["groups"]]
    for node in ui["nodes"]:
        left, top, right, bottom = boxes[node["id"]]
        inside = [g for g in groups if g[0] <= left and g[1] <= top and right <= g[0] + g[2] and bottom <= g[1] + g[3]]
        assert len(inside) == (0 if node["type"] == NOTE else 1), f"node {node['id']} is in {len(inside)} groups"


@pytest.mark.parametrize("name", NAMES)
def test_form(name):
    ui = ui_of(name)
    assert ui["version"] == 0.4
    assert {node["mode"] for node in ui["nodes"]} == {0}
    assert all(node["_meta"]["title"] for node in api_of(name).values())
