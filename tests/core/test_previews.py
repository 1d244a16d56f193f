"""Mirrors fasth3_core/media/preview.py, preview_budget.py and rgb_map.py: small, several moments, colours, cheap."""

import pytest
import torch
from comfyui_fasth3.fasth3_core.media import images, rgb_map
from comfyui_fasth3.fasth3_core.media.preview import (
    MAX_SIDE,
    MOMENTS,
    draft_preview,
    frames_preview,
    latent_preview,
    moments,
)
from comfyui_fasth3.fasth3_core.media.preview_budget import SHARE, PreviewBudget


def test_moments():
    assert moments(37) == [0, 12, 24, 36] and moments(4) == [0, 1, 2, 3] and moments(2) == [0, 1] and moments(1) == [0]


@pytest.mark.parametrize("h, w, lines", [(4, 4, 2), (48, 84, 2), (84, 48, 2), (126, 32, 1), (24, 96, 4)])
def test_strip_is_small_and_keeps_the_aspect(h, w, lines):
    picture = latent_preview(torch.randn(1, 24, 7, h, w))
    assert max(picture.size) <= MAX_SIDE
    cell = picture.width / (MOMENTS // lines), picture.height / lines
    assert cell[0] / cell[1] == pytest.approx(w / h, rel=0.02)
    assert max(picture.size) > 0.8 * MAX_SIDE or h * 16 == cell[1]


def test_cells_show_their_moments():
    """Channel 9 is brightness; it rises along the clip."""
    latent = torch.zeros(1, 24, 10, 8, 8)
    latent[:, 9] = torch.linspace(-1, 1, 10)[:, None, None]
    sheet = images.to_tensor(latent_preview(latent)).mean(dim=-1)
    half = sheet.shape[0] // 2
    cells = [float(cell.mean()) for line in sheet.split(half) for cell in line.split(half, dim=1)]
    assert len(cells) == 4 and cells == sorted(cells) and cells[3] - cells[0] > 0.4


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16])
def test_frames(dtype):
    top = torch.iinfo(dtype).max
    frames = torch.zeros(17, 96, 160, 3, dtype=dtype)
    frames[:, :, 80:] = top
    picture = images.to_tensor(frames_preview(frames))
    assert picture.shape[0] <= MAX_SIDE and picture.shape[1] <= MAX_SIDE
    assert picture[10, 10].max() == 0 and picture[10, picture.shape[1] // 2 - 10].min() == 1


@pytest.mark.parametrize("h, w", [(48, 84), (84, 48), (4, 6)])
def test_of_a_small_decoder(h, w):
    """It is asked for single moments, at the size at which they are shown."""
    asked = []

    def decode(latent):
        asked.append(tuple(latent.shape))
        grey = latent[:, :3].clamp(0, 1)
        return grey.repeat_interleave(16, 3).repeat_interleave(16, 4)

    latent = torch.linspace(0, 1, 10)[None, None, :, None, None].expand(1, 24, 10, h, w)
    picture = draft_preview(latent, decode)
    assert len(asked) == MOMENTS and len(set(asked)) == 1
    assert asked[0][:3] == (1, 24, 1) and max(asked[0][3:]) <= 16
    assert max(picture.size) <= MAX_SIDE
    corners = images.to_tensor(picture)
    assert corners[5, 5].max() < 0.1 and corners[-5, -5].min() > 0.9


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.mark.parametrize("cost", [0.0005, 0.02, 0.5, 30.0])
@pytest.mark.parametrize("step", [0.001, 0.5, 4.0, 60.0])
def test_previews_stay_within_their_share(step, cost):
    """After the first, whose cost nobody can know: that one is taken for 10 ms."""
    clock = Clock()
    budget = PreviewBudget(clock)
    shown = 0
    for _ in range(200):
        clock.now += step
        if budget.due():
            with budget.spending():
                clock.now += cost
            shown += 1
            assert budget.spent <= SHARE * clock.now or shown == 1
    if cost <= SHARE * step:
        assert shown == 200


def test_a_map_is_found_from_what_was_decoded():
    """Frames that are another linear map of the latent: the fit finds it where the built-in one is far off."""
    truth = 0.1 * torch.randn(25, 3)
    truth[-1] = 0.5
    fit = rgb_map.Fit()
    latent = torch.randn(1, 24, 12, 20, 20)
    for clip in range(2):
        rgb = rgb_map.RGBMap(truth).apply(latent[0, :, 5 * clip + 2].movedim(0, -1))
        big = rgb.repeat_interleave(16, 0).repeat_interleave(16, 1)
        frames = torch.rand(17, *big.shape)
        frames[5:9] = big  # the frames of the third latent
        fit.add(latent, clip, frames)
    found = fit.solve()
    assert (found.weights - truth).abs().max() < 0.02
    assert (rgb_map.BUILT_IN.weights - truth).abs().max() > 0.2
    assert fit.explained(found) > 0.99 > fit.explained(rgb_map.BUILT_IN)


def test_noise_explains_nothing():
    fit = rgb_map.Fit()
    fit.add(torch.randn(1, 24, 7, 40, 40), 0, torch.rand(17, 640, 640, 3))
    assert fit.explained(fit.solve()) < 0.1


def test_what_was_not_seen_stays_the_built_in_map():
    fit = rgb_map.Fit()
    fit.add(torch.zeros(1, 24, 7, 4, 4), 0, torch.full((17, 64, 64, 3), 0.5))
    torch.testing.assert_close(fit.solve().weights[:-1], rgb_map.BUILT_IN.weights[:-1])


def test_map_file(tmp_path):
    path = tmp_path / "vae.safetensors.fasth3-preview.json"
    saved = rgb_map.RGBMap(torch.randn(25, 3))
    rgb_map.save(path, saved)
    assert torch.equal(rgb_map.load(path).weights, saved.weights)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"format": "fasth3-rgb-1", "weights": [[1]]}', '{"weights": "x"}'])
def test_a_damaged_map_file_is_no_map(tmp_path, text):
    (tmp_path / "a").write_text(text)
    assert rgb_map.load(tmp_path / "a") is None
    assert rgb_map.load(tmp_path / "absent") is None
