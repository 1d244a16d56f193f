"""Our nodes' schemas, as this process sees them, and the small recorded set of ComfyUI's own."""

import json
from pathlib import Path

RECORDED = Path(__file__).with_name("stock_nodes.json")
"""/object_info of the stock nodes that the shipped workflows use, from ComfyUI 0.33.0; file lists emptied."""


def own_schemas() -> dict[str, dict]:
    """node id -> what /object_info says of it, from whichever node API this process has."""
    from comfyui_fasth3.nodes import NODES

    return {node.GET_SCHEMA().node_id: plain(node.GET_NODE_INFO_V1()) for node in NODES}


def _options(spec: list) -> list | None:
    """The list of choices inside an input's schema, in either of its two forms, or None."""
    if isinstance(spec[0], list):
        return spec[0]
    return spec[1].get("options") if len(spec) > 1 else None


def plain(info: dict) -> dict:
    """JSON form, without what depends on the machine: the module's name and lists of files."""
    info = json.loads(json.dumps(info))
    info.pop("python_module", None)
    for section in info["input"].values():
        for spec in section.values():
            options = _options(spec)
            if options and any(isinstance(option, str) and "." in option for option in options):
                options[:] = [option for option in options if option == "none"]  # where a file may lack
                if not options and len(spec) > 1:
                    spec[1].pop("default", None)
    return info


def recorded_stock() -> dict[str, dict]:
    return json.loads(RECORDED.read_text("utf-8"))


def offer_files(object_info: dict, prompts: list[dict]) -> dict:
    """The schemas with every file name that the prompts use put back into the emptied lists."""
    object_info = json.loads(json.dumps(object_info))
    for node in (node for prompt in prompts for node in prompt.values()):
        for section in object_info[node["class_type"]]["input"].values():
            for name, spec in section.items():
                value, options = node["inputs"].get(name), _options(spec)
                if isinstance(options, list) and isinstance(value, str) and "." in value and value not in options:
                    options.append(value)
    return object_info
