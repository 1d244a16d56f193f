"""Both VAEs against recorded truth."""

from collections.abc import Iterator
from dataclasses import replace

import torch

from ..vae.audio import AudioVAE
from ..vae.video import VideoVAE
from .golden import Golden, Row, Target
from .plain import PlainViTDecoder


def verify_video_vae(golden: Golden, target: Target) -> Iterator[Row]:
    weights = golden.other().weights()
    weights = {name: tensor.float() for name, tensor in weights.items()}
    vae = VideoVAE.from_tensors(weights, target.dtype, target.device)
    low = None
    if not target.exact:
        low = replace(vae, decoder=PlainViTDecoder(weights, target.dtype, target.device, vae.decoder))
    for i in golden.cases("decode{}.latent"):
        latent = golden.tensor(f"decode{i}.latent")
        case = f"decode {'x'.join(map(str, latent.shape[2:]))}"
        plain = None if low is None else low.decode(latent)
        truth = golden.tensor(f"decode{i}.pixels").float()
        yield target.row(golden, case, "max abs", vae.decode(latent), truth, 5e-4, plain=plain)
    fp32 = replace(target, dtype=torch.float32)  # encoding is fp32 whatever the dtype of the decoder
    encodes = [f"encode{i}" for i in golden.cases("encode{}.pixels")]
    for name in [*encodes, *(["keyframe"] if "keyframe.pixels" in golden.names else [])]:
        pixels = golden.tensor(f"{name}.pixels").float()
        mean = vae.encode(pixels)
        yield fp32.row(golden, f"{name} mean", "max abs", mean, golden.tensor(f"{name}.mean"), 1e-5)
        if (normalised := golden.optional(f"{name}.normalised")) is not None:
            tolerance = 1e-5 / min(1.0, vae.latents_std.min().item())  # the same error, divided by the least std
            yield fp32.row(golden, f"{name} normalised", "max abs", vae.normalise(mean), normalised, tolerance)


def verify_audio_vae(golden: Golden, target: Target) -> Iterator[Row]:
    fp32 = replace(target, dtype=torch.float32)  # the audio VAE has no other precision
    weights = {name: tensor.float() for name, tensor in golden.other().weights().items()}
    vae = AudioVAE.from_tensors(weights, device=target.device)
    for i in golden.cases("decode{}.latent"):
        latent = golden.tensor(f"decode{i}.latent")
        case = f"decode {latent.shape[-1]} latents"
        yield fp32.row(golden, case, "max abs", vae.decode(latent), golden.tensor(f"decode{i}.wave"), 1e-5)
    if "encode.wave" in golden.names:
        mean = vae.encode(golden.tensor("encode.wave"))
        yield fp32.row(golden, "encode mean", "max abs", mean, golden.tensor("encode.mean"), 1e-5)
        normalised = vae.normalise(mean)
        yield fp32.row(golden, "encode normalised", "max abs", normalised, golden.tensor("encode.normalised"), 1e-5)
