"""Nodes that move exact values between a graph and the test process: latents, noise, conditioning, pixels, sound."""

import sys
from pathlib import Path

import comfy.nested_tensor
import folder_paths
from safetensors.torch import load_file, save_file

CATEGORY = "fixture"


class FixtureNoise:
    """The NOISE of a file in the input folder with `video` and `audio`, instead of a seed's."""

    RETURN_TYPES, FUNCTION, CATEGORY = ("NOISE",), "load", CATEGORY

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"file": ("STRING", {}), "seed": ("INT", {"default": 0})}}

    def load(self, file, seed):
        return (_FileNoise(load_file(Path(folder_paths.get_input_directory()) / file), seed),)


class _FileNoise:
    def __init__(self, tensors, seed):
        self.tensors, self.seed = tensors, seed

    def generate_noise(self, input_latent):
        return comfy.nested_tensor.NestedTensor((self.tensors["video"], self.tensors["audio"]))


class FixtureKeep:
    """Write whatever is connected to OUTPUT/kept/NAME.safetensors."""

    RETURN_TYPES, FUNCTION, CATEGORY, OUTPUT_NODE = (), "keep", CATEGORY, True

    @classmethod
    def INPUT_TYPES(cls):
        return {
            "required": {"name": ("STRING", {})},
            "optional": {
                "latent": ("LATENT",), "positive": ("CONDITIONING",), "images": ("IMAGE",), "audio": ("AUDIO",),
            },
        }

    def keep(self, name, latent=None, positive=None, images=None, audio=None):
        tensors = {}
        if latent is not None:
            tensors["video"], tensors["audio"] = latent["samples"].unbind()
        if images is not None:
            tensors["images"] = images
        if audio is not None:
            tensors["waveform"] = audio["waveform"]
        if positive is not None:
            (states, extra), = positive
            tensors["text_states"], tensors["token_tags"] = states, extra["minimax_token_tags"]
            for i, keyframe in enumerate(extra.get("minimax_keyframes", ())):
                tensors[f"keyframe{i}.{keyframe['resolved_frame_index']}"] = keyframe["latent"]
            for i, reference in enumerate(extra.get("minimax_refs", ())):
                key = f"reference{i}.{reference['kind']}"
                if reference.get("latent") is not None:
                    tensors[key] = reference["latent"]
                if reference.get("audio_latent") is not None:
                    tensors[f"{key}.sound"] = reference["audio_latent"]
        folder = Path(folder_paths.get_output_directory()) / "kept"
        folder.mkdir(exist_ok=True)
        exact = {key: value.float().cpu().contiguous() for key, value in tensors.items()}
        save_file(exact, folder / f"{name}.safetensors")
        return {"ui": {"text": [name]}}


class FixtureFail:
    """Raises when it runs; passes a latent on where it does not."""

    RETURN_TYPES, FUNCTION, CATEGORY = ("LATENT",), "fail", CATEGORY

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"latent": ("LATENT",), "message": ("STRING", {"default": "the fixture fails"})}}

    def fail(self, latent, message):
        raise RuntimeError(message)


class FixtureFresh:
    """Passes a latent on and is never cached, so that everything behind it runs again."""

    RETURN_TYPES, FUNCTION, CATEGORY = ("LATENT",), "go", CATEGORY

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"latent": ("LATENT",)}}

    @classmethod
    def IS_CHANGED(cls, latent):
        return float("nan")

    def go(self, latent):
        return (latent,)


class FixtureTravel:
    """Passes a latent on and lets the weights of a tiny model be streamed, which are too small for it otherwise."""

    RETURN_TYPES, FUNCTION, CATEGORY = ("LATENT",), "go", CATEGORY

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"latent": ("LATENT",)}}

    def go(self, latent):
        for name, module in list(sys.modules.items()):
            if name.endswith("fasth3_core.weights.masters"):
                module.SMALL = 512
        return (latent,)


_NODES = (FixtureNoise, FixtureKeep, FixtureFail, FixtureFresh, FixtureTravel)
NODE_CLASS_MAPPINGS = {node.__name__: node for node in _NODES}
