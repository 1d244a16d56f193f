"""Mirrors fasth3_core/vae/draft.py: streamed decoding against the whole clip layer by layer, and what is refused."""

import pytest
import torch
import torch.nn.functional as F
from comfyui_fasth3.fasth3_core.errors import CheckpointError, ConfigError, FastH3Error, GeometryError, Interrupted
from comfyui_fasth3.fasth3_core.vae.chunks import decode_plan
from comfyui_fasth3.fasth3_core.vae.draft import DraftVAE

pytestmark = pytest.mark.usefixtures("one_thread")
RELEASED = (256, 128, 64)


def weights(widths=(16, 12, 8), last=8):
    """The tensors of the released file, at other widths."""
    tensors = {}

    def conv(name, out, inp, kernel=3, bias=True):
        tensors[f"decoder.{name}.weight"] = torch.randn(out, inp, kernel, kernel) * (1.5 / (inp * kernel**2)) ** 0.5
        if bias:
            tensors[f"decoder.{name}.bias"] = torch.randn(out) * 0.1

    conv("1", widths[0], 24)
    for start, width, grow, following in zip((3, 9, 15), widths, (1, 2, 2), (*widths[1:], last), strict=True):
        for index in range(start, start + 3):
            conv(f"{index}.conv.0", width, 2 * width)
            conv(f"{index}.conv.2", width, width)
            conv(f"{index}.conv.4", width, width)
        conv(f"{start + 4}.conv", grow * width, width, 1, bias=False)
        conv(str(start + 5), following, width, bias=False)
    conv("22", 12, last)
    return tensors


def whole_clip(tensors, latent):
    """The table of layers over all frames at once, in fp32."""

    def conv(x, name):
        weight = tensors[f"decoder.{name}.weight"]
        return F.conv2d(x, weight, tensors.get(f"decoder.{name}.bias"), padding=weight.shape[-1] // 2)

    x = conv(3 * torch.tanh(latent[0].movedim(1, 0) / 3), "1").relu()
    for start, grow in ((3, 1), (9, 2), (15, 2)):
        for index in range(start, start + 3):
            past = F.pad(x, (0, 0, 0, 0, 0, 0, 1, 0))[:-1]
            hidden = conv(torch.cat([x, past], dim=1), f"{index}.conv.0").relu()
            x = (conv(conv(hidden, f"{index}.conv.2").relu(), f"{index}.conv.4") + x).relu()
        x = conv(F.interpolate(x, scale_factor=2), f"{start + 4}.conv")
        first, *rest = x.chunk(grow, dim=1)
        x = torch.stack([first, *rest], dim=1).flatten(0, 1)
        x = conv(x, str(start + 5))
    frames = F.pixel_shuffle(conv(x.relu(), "22"), 2)
    kept = [f for f in range(len(frames)) if f % 20 >= 3]
    return frames[kept].movedim(1, 0)[None].clamp(0, 1)


@pytest.mark.parametrize("latents", [1, 2, 3, 5, 7, 12])
def test_latent_by_latent_is_the_whole_clip(latents):
    tensors, latent = weights(), torch.randn(1, 24, latents, 2, 3)
    vae = DraftVAE.from_tensors(tensors, torch.float32)
    expected = whole_clip(tensors, latent)
    assert expected.shape[2] == decode_plan(latents).frames and expected.std() > 0.02
    pixels = vae.decode(latent)
    torch.testing.assert_close(pixels, expected, rtol=0, atol=5e-5)
    assert (pixels * 1.01 - expected).abs().max() > 5e-5


def test_the_released_sizes_have_as_many_values():
    assert sum(tensor.numel() for tensor in weights(RELEASED, 64).values()) == 9_868_236


def test_frames_come_as_soon_as_they_are_final():
    vae, seen = DraftVAE.from_tensors(weights(), torch.float32), []
    parts = vae.decode_chunks(torch.randn(1, 24, 12, 2, 2), on_chunk=lambda *at: seen.append(at))
    assert next(parts).shape == (1, 3, 17, 32, 32) and seen[-1] == (5, 12)
    assert [part.shape[2] for part in parts] == [17, 5]


def test_fp16_is_close_and_moves():
    tensors, latent = weights(), torch.randn(1, 24, 2, 2, 2)
    exact, half = (DraftVAE.from_tensors(tensors, dtype) for dtype in (torch.float32, torch.float16))
    assert 0 < (half.decode(latent) - exact.decode(latent)).abs().max() < 0.02
    assert half.nbytes * 2 == exact.nbytes and half.to("meta").convs[0][1].weight.device.type == "meta"


def test_interrupt_passes_through():
    def stop():
        raise Interrupted

    with pytest.raises(Interrupted):
        DraftVAE.from_tensors(weights(), torch.float32).decode(torch.randn(1, 24, 2, 2, 2), check_interrupt=stop)


def test_pixels_that_are_none_are_an_error():
    tensors = weights()
    tensors["decoder.22.bias"].fill_(float("nan"))
    with pytest.raises(FastH3Error, match="NaN or infinity"):
        DraftVAE.from_tensors(tensors, torch.float32).decode(torch.randn(1, 24, 1, 2, 2))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"decoder.9.conv.2.weight": None}, r"no tensor decoder\.9\.conv\.2\.weight"),
        ({"decoder.13.conv.weight": torch.zeros(12, 12, 1, 1)}, r"13\.conv\.weight has shape .* \[24, 12, 1, 1\]"),
        ({"decoder.23.weight": torch.zeros(3)}, "not part of this architecture"),
    ],
)
def test_files_that_do_not_fit(change, message):
    broken = {name: value for name, value in (weights() | change).items() if value is not None}
    with pytest.raises(CheckpointError, match=message):
        DraftVAE.from_tensors(broken, torch.float32)


def test_wrong_arguments():
    vae = DraftVAE.from_tensors(weights(), torch.float32)
    for shape in ((1, 16, 2, 2, 2), (1, 24, 0, 2, 2)):
        with pytest.raises(GeometryError, match=r"expected \[1, 24, T, h, w\]"):
            vae.decode_chunks(torch.zeros(shape))
    with pytest.raises(ConfigError, match="float8_e4m3fn"):
        DraftVAE.from_tensors(weights(), torch.float8_e4m3fn)
