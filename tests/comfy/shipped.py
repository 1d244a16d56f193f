"""The workflows that this repository ships, cut down to what a tiny model runs in a second."""

import json
import shutil
from pathlib import Path

from . import graphs
from .server import ROOT

FOLDER = ROOT / "workflows"

SMALL = {
    "FastH3EmptyLatent": {"aspect": "custom", "width": graphs.WIDTH, "height": graphs.HEIGHT,
                          "seconds": graphs.SECONDS},
    "FastH3References": {"size": "as the video"},
    "MiniMaxH3ImageToVideo": {"width": graphs.WIDTH, "height": graphs.HEIGHT, "length": graphs.FRAMES},
    "MiniMaxH3ReferenceToVideo": {"width": graphs.WIDTH, "height": graphs.HEIGHT, "length": graphs.FRAMES},
}
WIDGETS = {f"{node}.{name}": value for node, inputs in SMALL.items() for name, value in inputs.items()}
"""The same for browser.mjs."""


def ui_files() -> list[Path]:
    return sorted(FOLDER.glob("*.json"))


def api_files() -> list[Path]:
    return sorted((FOLDER / "api").glob("*.json"))


def prompt_of(path: Path) -> dict:
    return json.loads(path.read_text("utf-8"))


def small(prompt: dict) -> dict:
    """The prompt with small sizes wherever a value is given and not linked."""
    prompt = json.loads(json.dumps(prompt))
    for node in prompt.values():
        for name, value in SMALL.get(node["class_type"], {}).items():
            if not isinstance(node["inputs"].get(name), list):
                node["inputs"][name] = value
    return prompt


def stand_in(node: dict, name: str, value: str) -> str | None:
    """Which tiny file plays the model file that an input names; None if it names none."""
    if not value.endswith(".safetensors"):
        return None
    if node["inputs"].get("contract") == "omniref-8":
        return "diffusion_models/tiny_omni.safetensors" if name == "model_name" else None
    if name in ("model_name", "unet_name"):
        dense = node["inputs"].get("contract") in ("base", "turbo-4", "turbo-8", "preview-4-dense")
        dense = dense or "minimax_h3_fl2va" in value
        return f"diffusion_models/tiny_{'dense' if dense else 'vsa'}{'_curve' if 'pruned' in value else ''}.safetensors"
    if name == "adapter_name":
        return "loras/tiny_adapter.safetensors"
    if name == "clip_name":
        return "text_encoders/tiny_text.safetensors"
    if name in ("video_vae", "audio_vae", "vae_name"):
        return f"vae/tiny_{'audio' if 'audio' in value else 'video'}_vae.safetensors"
    return None


def offer(prompts: list[dict], models: Path, inputs: Path) -> None:
    """Put a tiny file, or a picture, under every name that the prompts ask for."""
    for prompt in prompts:
        for node in prompt.values():
            for name, value in node["inputs"].items():
                if node["class_type"] == "LoadImage" and name == "image":
                    if not (inputs / value).exists():
                        shutil.copy(inputs / "a.png", inputs / value)
                elif isinstance(value, str) and (source := stand_in(node, name, value)):
                    target = models / source.split("/")[0] / value
                    target.parent.mkdir(parents=True, exist_ok=True)
                    if not target.exists():
                        shutil.copy(models / source, target)


def prompt_files(prompts: list[dict]) -> set[str]:
    """Encoded prompts that the workflows load from the input folder."""
    return {node["inputs"]["file"] for prompt in prompts for node in prompt.values()
            if node["class_type"] == "FastH3LoadPromptEmbeds"}
