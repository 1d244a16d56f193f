"""API-format graphs for the tests, at sizes where a tiny model needs a fraction of a second."""

WIDTH, HEIGHT, FRAMES = 96, 64, 22
SECONDS = 0.9
"""Snaps to 22 frames."""

PROMPT = "A red fox crosses a frozen river at dawn; ice creaks, wind in the reeds."


def text_encoder() -> dict:
    return {"clip": {"class_type": "CLIPLoader", "inputs": {
        "clip_name": "tiny_text.safetensors", "type": "minimax", "device": "default"}}}


def stock_vaes() -> dict:
    return {
        "video_vae": {"class_type": "VAELoader", "inputs": {"vae_name": "tiny_video_vae.safetensors"}},
        "audio_vae": {"class_type": "VAELoader", "inputs": {"vae_name": "tiny_audio_vae.safetensors"}},
    }


def conditioning(prompt: str = PROMPT, **keyframes) -> dict:
    """ComfyUI's own H3 node: output 0 is CONDITIONING, output 1 an empty LATENT. keyframes: first_frame, last_frame."""
    inputs = {"clip": ["clip", 0], "vae": ["video_vae", 0], "prompt": prompt, "width": WIDTH, "height": HEIGHT,
              "length": FRAMES, **keyframes}
    return {"positive": {"class_type": "MiniMaxH3ImageToVideo", "inputs": inputs}}


def pictures() -> dict:
    return {"picture_a": {"class_type": "LoadImage", "inputs": {"image": "a.png"}},
            "picture_b": {"class_type": "LoadImage", "inputs": {"image": "b.png"}}}


def references() -> dict:
    """ComfyUI's reference node under the id `positive`, with a picture, a clip with its soundtrack, and a sound."""
    inputs = {"clip": ["clip", 0], "vae": ["video_vae", 0], "audio_vae": ["audio_vae", 0], "prompt": PROMPT,
              "width": WIDTH, "height": HEIGHT, "length": FRAMES, "ref_image_size": "match",
              "ref_images.ref_image_0": ["picture_a", 0], "ref_videos.ref_video_0": ["film", 0],
              "ref_video_audios.ref_video_audio_0": ["tone", 0], "ref_audios.ref_audio_0": ["tone", 0]}
    return {
        **pictures(),
        "film": {"class_type": "RepeatImageBatch", "inputs": {"image": ["picture_b", 0], "amount": 22}},
        "tone": {"class_type": "LoadAudio", "inputs": {"audio": "tone.wav"}},
        "positive": {"class_type": "MiniMaxH3ReferenceToVideo", "inputs": inputs},
    }


def our_sampler(model: str, contract: str, seed: int = 7, latent: tuple = ("positive", 1), **options) -> dict:
    """FastH3LoadModel and FastH3Sampler reading the node `positive`."""
    return {
        "model": {"class_type": "FastH3LoadModel", "inputs": {
            "model_name": model, "contract": contract, "dtype": "auto"}},
        "sampler": {"class_type": "FastH3Sampler", "inputs": {
            "model": ["model", 0], "positive": ["positive", 0], "latent": list(latent), "seed": seed,
            "grid": "contract", "shift_video": 0.0, "shift_audio": 0.0, **options}},
    }


def our_decode(latent: tuple = ("sampler", 0)) -> dict:
    return {
        "vae": {"class_type": "FastH3LoadVAE", "inputs": {
            "video_vae": "tiny_video_vae.safetensors", "audio_vae": "tiny_audio_vae.safetensors", "dtype": "auto"}},
        "decode": {"class_type": "FastH3Decode", "inputs": {
            "vae": ["vae", 0], "latent": list(latent), "tile_batch": 0}},
    }


def our_save(prefix: str) -> dict:
    return {"save": {"class_type": "FastH3SavePreview", "inputs": {
        "images": ["decode", 0], "audio": ["decode", 1], "filename_prefix": prefix, "report": ["sampler", 1]}}}


def stock_sampler(model: str, steps: int, noise: dict, shift_video: float, shift_audio: float) -> dict:
    """ComfyUI's euler on its `simple` schedule, without guidance, reading the node `positive`."""
    return {
        "unet": {"class_type": "UNETLoader", "inputs": {"unet_name": model, "weight_dtype": "default"}},
        "shift": {"class_type": "MiniMaxH3SigmaShift", "inputs": {
            "model": ["unet", 0], "shift_video": shift_video, "shift_audio": shift_audio}},
        "guider": {"class_type": "BasicGuider", "inputs": {
            "model": ["shift", 0], "conditioning": ["positive", 0]}},
        "euler": {"class_type": "KSamplerSelect", "inputs": {"sampler_name": "euler"}},
        "sigmas": {"class_type": "BasicScheduler", "inputs": {
            "model": ["shift", 0], "scheduler": "simple", "steps": steps, "denoise": 1.0}},
        "noise": noise,
        "sampler": {"class_type": "SamplerCustomAdvanced", "inputs": {
            "noise": ["noise", 0], "guider": ["guider", 0], "sampler": ["euler", 0], "sigmas": ["sigmas", 0],
            "latent_image": ["positive", 1]}},
    }


def seed_noise(seed: int = 7) -> dict:
    return {"class_type": "RandomNoise", "inputs": {"noise_seed": seed}}


def file_noise(file: str) -> dict:
    return {"class_type": "FixtureNoise", "inputs": {"file": file, "seed": 7}}


def stock_decode(latent: tuple = ("sampler", 0)) -> dict:
    return {
        "pixels": {"class_type": "VAEDecode", "inputs": {"samples": list(latent), "vae": ["video_vae", 0]}},
        "sound": {"class_type": "VAEDecodeAudio", "inputs": {"samples": list(latent), "vae": ["audio_vae", 0]}},
    }


def stock_save(prefix: str) -> dict:
    return {
        "video": {"class_type": "CreateVideo", "inputs": {"images": ["pixels", 0], "audio": ["sound", 0], "fps": 24.0}},
        "save": {"class_type": "SaveVideo", "inputs": {
            "video": ["video", 0], "filename_prefix": prefix, "format": "auto", "codec": "auto"}},
    }


def keep(name: str, **links) -> dict:
    """FixtureKeep under the id `keep_NAME`; links: latent, positive, images, audio."""
    inputs = {"name": name, **{key: list(link) for key, link in links.items()}}
    return {f"keep_{name}": {"class_type": "FixtureKeep", "inputs": inputs}}


def t2v(prefix: str, seed: int = 7) -> dict:
    """Our model, sampler and decoder on ComfyUI's own text encoder."""
    return {**text_encoder(), **stock_vaes(), **conditioning(),
            **our_sampler("tiny_vsa.safetensors", "preview-4", seed), **our_decode(), **our_save(prefix)}


def first_last_frame(prefix: str) -> dict:
    """The same with a first and a last frame, on a dense student."""
    frames = {"first_frame": ["picture_a", 0], "last_frame": ["picture_b", 0]}
    return {**text_encoder(), **stock_vaes(), **pictures(), **conditioning(**frames),
            **our_sampler("tiny_dense.safetensors", "turbo-4"), **our_decode(), **our_save(prefix)}
