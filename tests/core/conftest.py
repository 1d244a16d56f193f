"""What several test files of the core share."""

import pytest
import torch
from comfyui_fasth3.fasth3_core.vae import VideoVAE
from safetensors.torch import load_file


@pytest.fixture(scope="module")
def one_thread():
    """For recorded models that are so small that waking a second thread costs more than the work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def recorded(golden_dir):
    """Of the video VAE, as are `weights` and `vae`, where a file has no other."""
    return {name: value.float() for name, value in load_file(golden_dir / "video_vae.safetensors").items()}


@pytest.fixture(scope="module")
def weights(recorded):
    return {name.removeprefix("weights."): value for name, value in recorded.items() if name.startswith("weights.")}


@pytest.fixture(scope="module")
def vae(weights):
    return VideoVAE.from_tensors(weights)
