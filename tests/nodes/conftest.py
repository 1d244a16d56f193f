"""A tiny model in the real file formats, and a host over plain folders, for tests of the nodes."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from comfyui_fasth3.cli.demo_bundle import write_bundle
from comfyui_fasth3.nodes import NODES, _host
from comfyui_fasth3.nodes._host_standalone import StandaloneHost
from safetensors.torch import load_file, save_file


@pytest.fixture(scope="session")
def bundle(tmp_path_factory) -> SimpleNamespace:
    """The demo's model, written once: `root` and the names that loaders know it by."""
    root = tmp_path_factory.mktemp("bundle")
    return SimpleNamespace(root=root, names=write_bundle(root))


@pytest.fixture
def folders(bundle, tmp_path) -> Path:
    """models (shared), input and output (fresh) under one root."""
    (tmp_path / "models").symlink_to(bundle.root / "models")
    shutil.copytree(bundle.root / "input", tmp_path / "input")
    (tmp_path / "output").mkdir()
    return tmp_path


@pytest.fixture
def host(folders):
    host = StandaloneHost(folders / "models", folders / "input", folders / "output")
    _host.use(host)
    yield host
    _host.use(None)


@pytest.fixture
def run(host):
    """run("FastH3EmptyLatent", width=64, ...) -> NodeOutput, through the node API as ComfyUI calls it."""
    classes = {cls.GET_SCHEMA().node_id: cls for cls in NODES}

    def run(node_id, hidden=None, **inputs):
        clone = classes[node_id].PREPARE_CLASS_CLONE({"hidden_inputs": hidden or {}})
        return clone.EXECUTE_NORMALIZED(**inputs)

    return run


@pytest.fixture
def model(run, bundle):
    return run("FastH3LoadModel", model_name=bundle.names.model, contract="auto", dtype="fp32").args[0]


@pytest.fixture
def vae(run, bundle):
    names = bundle.names
    return run("FastH3LoadVAE", video_vae=names.video_vae, audio_vae=names.audio_vae, dtype="auto").args[0]


@pytest.fixture
def positive(run, bundle):
    return run("FastH3LoadPromptEmbeds", file=bundle.names.prompt).args[0]


@pytest.fixture
def latent(run):
    """5 frames of 64x64."""
    return run("FastH3EmptyLatent", width=64, height=64, seconds=0.2).args[0]


@pytest.fixture(scope="session")
def vae_weights(golden_dir) -> SimpleNamespace:
    """Small VAEs with encoders, which the demo's have not: `video` and `audio`."""
    def read(name):
        recorded = load_file(golden_dir / f"{name}_vae.safetensors")
        return {n.removeprefix("weights."): t.float() for n, t in recorded.items() if n.startswith("weights.")}

    return SimpleNamespace(video=read("video"), audio=read("audio"))


@pytest.fixture
def whole_vae(run, bundle, vae_weights):
    folder = bundle.root / "models" / "vae"
    save_file(vae_weights.video, folder / "whole.safetensors")
    save_file(vae_weights.audio, folder / "whole_audio.safetensors")
    files = {"video_vae": "whole.safetensors", "audio_vae": "whole_audio.safetensors"}
    return run("FastH3LoadVAE", **files, dtype="auto").args[0]


@pytest.fixture
def canvas(run):
    """22 frames of 96 x 64."""
    return run("FastH3EmptyLatent", width=96, height=64, seconds=0.9).args[0]


class TextEncoder:
    """Stands in for ComfyUI's text encoder of MiniMax-H3: a token for each thing beside the text, two for the text."""

    def __init__(self, sees=True, tags=True):
        self.sees, self.tags = sees, tags

    def tokenize(self, text, *, images=(), minimax_ref_items=()):
        self.text, self.beside = text, [*({"type": "image", "data": image} for image in images), *minimax_ref_items]
        return [*(item["type"] for item in self.beside), "text", "text"]

    def encode_from_tokens_scheduled(self, tokens):
        seen = [0 if self.sees and kind in ("image", "video") else 1 for kind in tokens]
        extra = {"minimax_token_tags": torch.tensor(seen)} if self.tags else {}
        return [[torch.randn(1, len(tokens), 64), extra]]


@pytest.fixture
def text_encoder() -> type[TextEncoder]:
    return TextEncoder
