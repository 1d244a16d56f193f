"""References through `run`: a picture and a video file from the input folder, into a prompt file."""

import json

import av
import numpy as np
import pytest
from comfyui_fasth3.cli import main
from comfyui_fasth3.cli.demo_bundle import write_bundle
from comfyui_fasth3.nodes import _prompt_file
from PIL import Image
from safetensors.torch import load_file, save_file

GRAPH = {
    "1": {"class_type": "FastH3LoadPromptEmbeds", "inputs": {"file": ""}},
    "2": {"class_type": "FastH3LoadVAE", "inputs": {
        "video_vae": "whole_video.safetensors", "audio_vae": "whole_audio.safetensors", "dtype": "auto"}},
    "3": {"class_type": "FastH3EmptyLatent", "inputs": {"width": 96, "height": 64, "seconds": 0.9}},
    "4": {"class_type": "LoadImage", "inputs": {"image": "a.png"}},
    "5": {"class_type": "LoadVideo", "inputs": {"file": "film.mkv"}},
    "6": {"class_type": "FastH3References", "inputs": {
        "positive": ["1", 0], "vae": ["2", 0], "latent": ["3", 0], "images.image_0": ["4", 0],
        "videos.video_0": ["5", 0], "size": "as the video"}},
    "7": {"class_type": "FastH3SavePromptEmbeds", "inputs": {"positive": ["6", 0], "filename_prefix": "p"}},
}  # fmt: skip


@pytest.fixture
def folder(tmp_path, golden_dir):
    names = write_bundle(tmp_path)
    for kind in ("video", "audio"):
        recorded = load_file(golden_dir / f"{kind}_vae.safetensors")
        weights = {n.removeprefix("weights."): t.float() for n, t in recorded.items() if n.startswith("weights.")}
        save_file(weights, tmp_path / "models" / "vae" / f"whole_{kind}.safetensors")
    Image.new("RGB", (96, 64), (200, 60, 20)).save(tmp_path / "input" / "a.png")
    with av.open(str(tmp_path / "input" / "film.mkv"), "w") as container:
        stream = container.add_stream("ffv1", rate=12)
        stream.width, stream.height, stream.pix_fmt = 96, 64, "bgr0"
        for i in range(6):
            pixels = np.full((64, 96, 3), 40 * i, np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode(None))
    GRAPH["1"]["inputs"]["file"] = names.prompt
    (tmp_path / "graph.json").write_text(json.dumps(GRAPH))
    return tmp_path


def run(folder, *more: str) -> int:
    folders = ("--models", str(folder / "models"), "--input", str(folder / "input"), "--output", str(folder / "out"))
    return main(["run", str(folder / "graph.json"), *folders, "--device", "cpu", *more])


def test_a_picture_and_a_film(folder):
    assert run(folder) == 0
    prompt, _ = _prompt_file.load(folder / "out" / "p_00001_.safetensors")
    assert [r.kind for r in prompt.references] == ["image", "video"]
    assert prompt.references[1].latent.shape == (1, 24, 2, 4, 6), "12 frames at 24 a second: one clip, two latents"


def test_a_slot_that_is_none(folder, capsys):
    changed = json.loads(json.dumps(GRAPH))
    changed["6"]["inputs"]["images.picture"] = ["4", 0]
    (folder / "graph.json").write_text(json.dumps(changed))
    assert run(folder) == 1
    assert "there is no input 'images.picture'" in capsys.readouterr().err
