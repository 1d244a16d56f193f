"""stitch_tiles against tiles that are cut from one picture, and against the blend of two neighbours."""

import pytest
import torch
from comfyui_fasth3.kernels.stitch_tiles import Lines, stitch_tiles


@pytest.fixture(params=["reference", "triton"])
def run(request):
    """(backend, device) of one implementation."""
    return request.param, request.getfixturevalue("triton_device") if request.param == "triton" else "cpu"


def as_patches(pictures_BCFHW):
    """[B, C, F, H, W] as the rows of patches that a decoder makes."""
    B, C, F, H, W = pictures_BCFHW.shape
    split = pictures_BCFHW.reshape(B, C, F // 4, 4, H // 16, 16, W // 16, 16)
    return split.permute(0, 2, 4, 6, 1, 3, 5, 7).reshape(B, -1, C * 4 * 256).contiguous()


def lines(starts, size, device):
    return Lines.of(starts, size, torch.device(device))


GRIDS = {
    "one": ((0,), 32, (0,), 16),
    "overlaps": ((0, 16, 48), 48, (0, 32, 160), 144),
    "three at once": ((0, 16, 32), 64, (0,), 160),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("name", GRIDS)
def test_tiles_of_one_picture_give_it_back(name, dtype, run):
    """Blending equal pixels changes nothing: every line is found in its tile and in the one before."""
    backend, device = run
    tops, height, lefts, width = GRIDS[name]
    picture = torch.randn(3, 8, tops[-1] + height, lefts[-1] + width).to(dtype)
    tiles = torch.stack([picture[..., y : y + height, x : x + width] for y in tops for x in lefts])
    out = torch.full((3, 5, *picture.shape[2:]), float("nan"), device=device)
    broken = torch.zeros(1, dtype=torch.int32, device=device)
    rows, columns = lines(tops, height, device), lines(lefts, width, device)
    stitch_tiles(as_patches(tiles).to(device), rows, columns, 2, out, broken, backend=backend)
    torch.testing.assert_close(out.cpu(), picture[:, 2:7].float(), rtol=1e-6, atol=1e-6)
    assert broken.item() == 0


def test_neighbours_are_blended_as_they_are(run):
    """Four constant tiles: down first, then to the right with the left tile itself, not with what it became."""
    backend, device = run
    tiles = as_patches(torch.tensor([1.0, 2.0, 4.0, 8.0])[:, None, None, None, None].expand(-1, 3, 4, 48, 48))
    out = torch.full((3, 1, 80, 80), float("nan"), device=device)
    axis = lines((0, 32), 48, device)
    broken = torch.zeros(1, dtype=torch.int32, device=device)
    stitch_tiles(tiles.to(device), axis, axis, 3, out, broken, backend=backend)
    line = torch.arange(80)
    weight = (1 - (line - 32) / 16).clamp(0, 1) * (line >= 32)
    second = (line >= 32).float()
    value = torch.tensor([[1.0, 2.0], [4.0, 8.0]])
    own = value[second.long()[:, None], second.long()]
    above = value[0][second.long()].expand(80, -1)
    beside = value[:, 0][second.long()][:, None]
    expected = own + weight[:, None] * (above - own)
    expected = expected + weight * (beside - expected)
    torch.testing.assert_close(out[:, 0].cpu(), expected.expand(3, -1, -1), rtol=1e-6, atol=1e-6)
    assert not torch.allclose(out[0, 0].cpu() * 1.01, expected)


def test_fades_and_becomes_pixels(run):
    backend, device = run
    picture = torch.randn(3, 4, 16, 32)
    previous = torch.randn(3, 2, 16, 32)
    scale, shift = torch.tensor([0.2, 0.3, 0.4]), torch.tensor([0.5, 0.4, 0.45])
    out = torch.full((3, 4, 16, 32), float("nan"), device=device)
    broken = torch.zeros(1, dtype=torch.int32, device=device)
    stitch_tiles(
        as_patches(picture[None]).to(device), lines((0,), 16, device), lines((0,), 32, device), 0, out, broken,
        scale=scale.to(device), shift=shift.to(device), previous=previous.to(device), backend=backend,
    )  # fmt: skip
    expected = picture.clone()
    expected[:, 0] = previous[:, 0]
    expected[:, 1] = (picture[:, 1] + previous[:, 1]) / 2
    expected = (expected * scale[:, None, None, None] + shift[:, None, None, None]).clamp(0, 1)
    torch.testing.assert_close(out.cpu(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_no_number_is_told_and_frames_outside_do_not_count(value, run):
    backend, device = run
    picture = torch.zeros(3, 4, 16, 32)
    picture[2, 3, 7, 31] = value
    for frames, expected in ((3, 0), (4, 1)):
        out = torch.empty(3, frames, 16, 32, dtype=torch.float16, device=device)
        broken = torch.zeros(1, dtype=torch.int32, device=device)
        axes = (lines((0,), 16, device), lines((0,), 32, device))
        stitch_tiles(as_patches(picture[None]).to(device), *axes, 0, out, broken, backend=backend)
        assert broken.item() == expected
