"""Check an API prompt against node schemas as ComfyUI's server does, but for every node, reached or not."""


def node_errors(prompt: dict, object_info: dict) -> dict[str, list[str]]:
    """What ComfyUI would refuse in an API prompt: node id -> reasons; {} if it is sound.

    Checked: node types, missing required inputs, links (existing node and slot, matching type), combo values, ranges.
    """
    found: dict[str, list[str]] = {}
    for node_id, node in prompt.items():
        schema = object_info.get(node["class_type"])
        reasons = _reasons(node, schema, prompt, object_info) if schema else [f"unknown node type {node['class_type']}"]
        if reasons:
            found[node_id] = reasons
    return found


def _reasons(node: dict, schema: dict, prompt: dict, object_info: dict) -> list[str]:
    reasons = []
    inputs = node["inputs"]
    for section in ("required", "optional"):
        for name, (kind, *options) in schema["input"].get(section, {}).items():
            option = options[0] if options else {}
            if name not in inputs:
                dynamic = any(given.startswith(f"{name}.") for given in inputs) or str(kind).startswith("COMFY_")
                if section == "required" and not dynamic:
                    reasons.append(f"{name}: required input is missing")
            elif isinstance(inputs[name], list):
                reasons += _link_reasons(name, inputs[name], kind, prompt, object_info)
            else:
                reasons += _value_reasons(name, inputs[name], kind, option)
    return reasons


def _link_reasons(name: str, link: list, kind, prompt: dict, object_info: dict) -> list[str]:
    source, slot = link
    outputs = object_info.get(prompt.get(source, {}).get("class_type"), {}).get("output", [])
    if slot >= len(outputs):
        return [f"{name}: links to output {slot} of node {source}, which has {len(outputs)}"]
    given, wanted = str(outputs[slot]), "COMBO" if isinstance(kind, list) else str(kind)
    if "*" in (given, wanted) or set(given.split(",")) & set(wanted.split(",")):
        return []
    return [f"{name}: takes {wanted}, node {source} gives {given}"]


def _value_reasons(name: str, value, kind, option: dict) -> list[str]:
    choices = kind if isinstance(kind, list) else option.get("options") if kind == "COMBO" else None
    if choices and isinstance(choices[0], str) and value not in choices:
        return [f"{name}: {value!r} is none of {choices[:8]}"]
    if kind in ("INT", "FLOAT"):
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            return [f"{name}: {value!r} is no {kind}"]
        if not option.get("min", value) <= value <= option.get("max", value):
            return [f"{name}: {value} is outside {option.get('min')} to {option.get('max')}"]
    return []
