"""Video and audio VAE: latents to pixels and sound, and back."""

from .audio import AudioVAE
from .latents import sample_posterior
from .video import VideoVAE

__all__ = ["AudioVAE", "VideoVAE", "sample_posterior"]
