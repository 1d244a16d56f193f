"""The nodes as saved workflows know them: ids, order of inputs, defaults and texts. A change here breaks graphs."""

import asyncio

import comfyui_fasth3
import pytest
from comfyui_fasth3.fasth3_core.contracts import CONTRACTS
from comfyui_fasth3.nodes import NODES

# node -> (input, type, default) in order, then output types. Append only.
EXPECTED = {
    "FastH3LoadModel": (
        [("model_name", "COMBO", None), ("contract", "COMBO", "auto"), ("dtype", "COMBO", "auto")],
        ["FASTH3_MODEL"],
    ),
    "FastH3LoadVAE": (
        [("video_vae", "COMBO", None), ("audio_vae", "COMBO", None), ("dtype", "COMBO", "auto")],
        ["FASTH3_VAE"],
    ),
    "FastH3VSAConfig": (
        [
            ("keep_rule", "COMBO", "contract"), ("sparsity", "FLOAT", 0.9), ("top_k", "INT", 64),
            ("tile_size", "COMBO", "contract"), ("mode", "COMBO", "exempt"), ("dense_first_steps", "INT", 0),
            ("dense_layers", "STRING", ""), ("backend", "COMBO", "auto"),
        ],
        ["FASTH3_VSA"],
    ),
    "FastH3EmptyLatent": (
        [
            ("width", "INT", 1344), ("height", "INT", 768), ("seconds", "FLOAT", 5.0), ("aspect", "COMBO", "custom"),
            ("megapixels", "FLOAT", 0.0),
        ],
        ["LATENT", "INT"],
    ),
    "FastH3Sampler": (
        [
            ("model", "FASTH3_MODEL", None), ("positive", "CONDITIONING", None), ("latent", "LATENT", None),
            ("seed", "INT", 0), ("vsa", "FASTH3_VSA", None), ("offload", "FASTH3_OFFLOAD", None),
            ("grid", "COMBO", "contract"), ("shift_video", "FLOAT", 0.0), ("shift_audio", "FLOAT", 0.0),
        ],
        ["LATENT", "FASTH3_REPORT"],
    ),
    "FastH3Decode": (
        [("vae", "FASTH3_VAE", None), ("latent", "LATENT", None), ("tile_batch", "INT", 0)],
        ["IMAGE", "AUDIO"],
    ),
    "FastH3SavePreview": (
        [
            ("images", "IMAGE", None), ("audio", "AUDIO", None), ("filename_prefix", "STRING", "video/FastH3"),
            ("report", "FASTH3_REPORT", None),
        ],
        [],
    ),
    "FastH3SavePromptEmbeds": (
        [("positive", "CONDITIONING", None), ("filename_prefix", "STRING", "fasth3_prompts/prompt")],
        [],
    ),
    "FastH3LoadPromptEmbeds": ([("file", "COMBO", None)], ["CONDITIONING"]),
    "FastH3ApplyAdapter": (
        [
            ("model", "FASTH3_MODEL", None), ("adapter_name", "COMBO", None), ("strength", "FLOAT", 1.0),
            ("contract", "COMBO", "auto"), ("mode", "COMBO", "auto"), ("alpha", "FLOAT", 0.0),
            ("unmatched", "COMBO", "refuse"), ("adaln_source", "COMBO", "none"),
        ],
        ["FASTH3_MODEL", "STRING"],
    ),
    "FastH3Offload": (
        [
            ("policy", "COMBO", "auto"), ("device_gib", "FLOAT", 0.0), ("slots", "INT", 2),
            ("resident_blocks", "INT", -1), ("pinned_gib", "FLOAT", -1.0), ("after_run", "COMBO", "keep"),
        ],
        ["FASTH3_OFFLOAD"],
    ),
    "FastH3Plan": (
        [
            ("model", "FASTH3_MODEL", None), ("width", "INT", 1344), ("height", "INT", 768), ("seconds", "FLOAT", 5.0),
            ("aspect", "COMBO", "custom"), ("megapixels", "FLOAT", 0.0), ("text_tokens", "INT", 300),
            ("vsa", "FASTH3_VSA", None), ("offload", "FASTH3_OFFLOAD", None),
        ],
        ["INT", "INT", "FLOAT", "INT", "STRING"],
    ),
    "FastH3DecodeToVideo": (
        [
            ("vae", "FASTH3_VAE", None), ("latent", "LATENT", None), ("filename_prefix", "STRING", "video/FastH3"),
            ("format", "COMBO", "mp4 h264"), ("crf", "INT", 18), ("bit_depth", "COMBO", "8"),
            ("audio_codec", "COMBO", "auto"), ("keep_latent", "COMBO", "on failure"), ("tile_batch", "INT", 0),
            ("report", "FASTH3_REPORT", None),
        ],
        ["STRING", "AUDIO"],
    ),
    "FastH3SaveLatent": (
        [
            ("latent", "LATENT", None), ("filename_prefix", "STRING", "latents/FastH3"),
            ("report", "FASTH3_REPORT", None),
        ],
        [],
    ),
    "FastH3LoadLatent": ([("file", "COMBO", None)], ["LATENT", "FASTH3_REPORT"]),
    "FastH3Keyframes": (
        [
            ("positive", "CONDITIONING", None), ("vae", "FASTH3_VAE", None), ("latent", "LATENT", None),
            ("first_frame", "IMAGE", None), ("last_frame", "IMAGE", None), ("fit", "COMBO", "cover"),
            ("alpha", "COMBO", "drop"), ("posterior", "COMBO", "sample"), ("clip", "CLIP", None),
            ("prompt", "STRING", ""),
        ],
        ["CONDITIONING"],
    ),
    "FastH3References": (
        [
            ("vae", "FASTH3_VAE", None), ("latent", "LATENT", None), ("positive", "CONDITIONING", None),
            ("clip", "CLIP", None), ("images", "COMFY_AUTOGROW_V3", None), ("videos", "COMFY_AUTOGROW_V3", None),
            ("audios", "COMFY_AUTOGROW_V3", None), ("prompt", "STRING", ""), ("size", "COMBO", "trained"),
            ("alpha", "COMBO", "drop"), ("posterior", "COMBO", "sample"), ("video_sound", "COMBO", "use"),
        ],
        ["CONDITIONING"],
    ),
}
OPTIONAL = {
    ("FastH3Plan", "vsa"), ("FastH3Plan", "offload"),
    ("FastH3Sampler", "vsa"), ("FastH3Sampler", "offload"), ("FastH3SavePreview", "audio"),
    ("FastH3DecodeToVideo", "report"), ("FastH3SaveLatent", "report"), ("FastH3SavePreview", "report"),
    ("FastH3EmptyLatent", "aspect"), ("FastH3EmptyLatent", "megapixels"),
    *(("FastH3Keyframes", name) for name in (
        "positive", "first_frame", "last_frame", "fit", "alpha", "posterior", "clip", "prompt")),
    *(("FastH3References", name) for name in (
        "positive", "clip", "images", "videos", "audios", "prompt", "size", "alpha", "posterior", "video_sound")),
}


@pytest.fixture
def schemas(host):
    return {cls.GET_SCHEMA().node_id: cls.GET_SCHEMA() for cls in NODES}


def test_every_node_is_expected_and_no_more(schemas):
    assert list(schemas) == list(EXPECTED)


@pytest.mark.parametrize("node_id", EXPECTED)
def test_inputs_and_outputs(schemas, node_id):
    schema, (inputs, outputs) = schemas[node_id], EXPECTED[node_id]
    assert [(i.id, i.io_type, getattr(i, "default", None)) for i in schema.inputs] == inputs
    assert [o.io_type for o in schema.outputs] == outputs
    assert {(node_id, i.id) for i in schema.inputs if i.optional} == {pair for pair in OPTIONAL if pair[0] == node_id}


@pytest.mark.parametrize("node_id", EXPECTED)
def test_texts_are_there_and_plain(schemas, node_id):
    schema = schemas[node_id]
    assert schema.category == "FastH3"
    assert schema.description
    assert schema.display_name.isascii() and schema.display_name.startswith("FastH3 ")
    for given in schema.inputs:
        plain_socket = given.io_type in ("FASTH3_MODEL",)
        assert given.tooltip or plain_socket, f"{given.id} has no tooltip"
        assert given.tooltip is None or given.tooltip.isascii()


@pytest.mark.parametrize("node_id", EXPECTED)
def test_combos_hold_strings_and_their_default(schemas, node_id):
    for given in schemas[node_id].inputs:
        if given.io_type == "COMBO":
            assert all(isinstance(option, str) for option in given.options)
            assert given.default is None or given.default in given.options


def test_contracts_are_offered_by_name(schemas):
    options = {i.id: i for i in schemas["FastH3LoadModel"].inputs}["contract"].options
    assert options == ["auto", *CONTRACTS]


def test_nodes_that_save_or_show_are_outputs(schemas):
    saving = {node_id for node_id, schema in schemas.items() if schema.is_output_node}
    assert saving == {
        "FastH3DecodeToVideo", "FastH3Plan", "FastH3SaveLatent", "FastH3SavePreview", "FastH3SavePromptEmbeds",
    }


def test_the_package_offers_the_v3_entry_point_alone():
    assert not hasattr(comfyui_fasth3, "NODE_CLASS_MAPPINGS")  # it would hide comfy_entrypoint from ComfyUI
    extension = asyncio.run(comfyui_fasth3.comfy_entrypoint())
    assert asyncio.run(extension.get_node_list()) == NODES


@pytest.mark.parametrize("cls", NODES)
def test_a_choice_is_offered_once(cls, host):
    for one in cls.define_schema().inputs:
        options = getattr(one, "options", None) or []
        assert len(set(map(str, options))) == len(options), one.id
