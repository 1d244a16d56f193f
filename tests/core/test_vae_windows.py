"""Mirrors fasth3_core/vae/windows.py, probe.py and checkpoint/window_choice.py: windows against a dense mask, the
released tile, frames of a clip, and a probe whose answer is known."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from comfyui_fasth3.cli import main
from comfyui_fasth3.fasth3_core.checkpoint.load import load_video_vae
from comfyui_fasth3.fasth3_core.checkpoint.window_choice import choice_file, recall, remember
from comfyui_fasth3.fasth3_core.errors import CheckpointError, ConfigError, FastH3Error
from comfyui_fasth3.fasth3_core.media.latent_file import save
from comfyui_fasth3.fasth3_core.vae import VideoVAE
from comfyui_fasth3.fasth3_core.vae.chunks import blend_tail, decode_plan
from comfyui_fasth3.fasth3_core.vae.probe import probe
from comfyui_fasth3.fasth3_core.vae.video_decoder import as_frames, window_attention
from comfyui_fasth3.fasth3_core.vae.windows import WindowOptions, groups, spans, window_coordinates
from safetensors.torch import load_file, save_file

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def weights(golden_dir):
    recorded = load_file(golden_dir / "video_vae.safetensors")
    kept = ("weights.decoder.", "weights.post_quant")
    return {n.removeprefix("weights."): t.float() for n, t in recorded.items() if n.startswith(kept)}


def dense(query, key, value, grid, shift, suffix):
    """The same with one mask over the whole sequence: one window, or either side is the suffix."""
    T, h, w = grid
    y, x = ((torch.arange(size) + shift) // 16 for size in (h, w))
    window = (y[:, None] * 1000 + x).expand(T, h, w).flatten()
    tokens = len(window)
    allowed = torch.ones(tokens + suffix, tokens + suffix, dtype=torch.bool)
    allowed[:tokens, :tokens] = window[:, None] == window
    heads = (x.transpose(0, 1)[None] for x in (query, key, value))
    return F.scaled_dot_product_attention(*heads, attn_mask=allowed)[0].transpose(0, 1).flatten(1)


@pytest.mark.parametrize("shift", [0, 8])
@pytest.mark.parametrize("grid", [(2, 16, 16), (1, 12, 20), (2, 30, 17), (1, 9, 33), (3, 5, 4)])
def test_windows_are_the_dense_mask(grid, shift):
    suffix = 5
    q, k, v = torch.randn(3, torch.Size(grid).numel() + suffix, 2, 16)
    windows = groups(grid, shift, suffix, CPU)
    out, expected = window_attention(q, k, v, windows), dense(q, k, v, grid, shift, suffix)
    assert (out - expected).abs().max() <= 1e-6 < (out * 1.01 - expected).abs().max()
    covered = torch.cat([group.queries.flatten() for group in windows]).sort().values
    assert torch.equal(covered, torch.arange(torch.Size(grid).numel()))


def test_a_shifted_axis_starts_with_a_short_window():
    assert window_coordinates(24, 8)[:8].tolist() == window_coordinates(16, 0)[8:].tolist()
    assert window_coordinates(24, 8)[8:].tolist() == window_coordinates(16, 0).tolist()


def test_one_window_of_a_released_clip_is_the_released_tile(weights):
    decoder = VideoVAE.from_tensors(weights).decoder
    raw = torch.randn(7, 16, 16, 24)
    times = 2 * (torch.arange(7) + 0.5) / 7 - 1
    tile = as_frames(decoder(raw[None], decoder.rotations((7, 16, 16), CPU))[0], (7, 16, 16))
    window = decoder.whole_frames(raw, times, 0.0, WindowOptions(shift="off", time="seven"))
    torch.testing.assert_close(window, tile, rtol=0, atol=2e-5)
    shifted = decoder.whole_frames(raw, times, 0.0, WindowOptions())
    assert (shifted - tile).abs().max() > 1e-3


@pytest.mark.parametrize("last", ["own", "before", "repeat"])
@pytest.mark.parametrize("latents", [1, 2, 5, 7, 12, 37, 72, 107])
def test_spans_make_the_frames_of_the_released_plan(latents, last):
    made = list(spans(latents, last))
    assert sum(len(span.kept_frames()) for span in made) == decode_plan(latents).frames
    assert all(max(span.kept_frames()) < 4 * len(span) for span in made)


@pytest.mark.parametrize("options", [{}, {"last": "before"}, {"last": "repeat"}, {"context": "clips"}])
def test_every_plan_decodes_the_whole_clip(weights, options):
    vae, seen = VideoVAE.from_tensors(weights, windows=WindowOptions(**options)), []
    pixels = vae.decode(torch.randn(1, 24, 7, 2, 3), on_chunk=lambda *at: seen.append(at))
    assert pixels.shape == (1, 3, 22, 32, 48) and bool(pixels.isfinite().all())
    assert seen[-1][0] == seen[-1][1] == (1 if options.get("context") else 2)


@pytest.mark.parametrize("context", ["none", "clips"])
def test_what_is_decoded_to_nan_is_an_error(weights, context):
    damaged = weights | {"decoder.norm_out.bias": torch.full_like(weights["decoder.norm_out.bias"], float("nan"))}
    vae = VideoVAE.from_tensors(damaged, windows=WindowOptions(context=context))
    with pytest.raises(FastH3Error, match=r"clips \[0.*\] of \d were decoded to NaN or infinity in torch.float32"):
        vae.decode(torch.randn(1, 24, 7, 2, 3))


def test_released_clips_fade_into_each_other(weights):
    """Seven latents each, two of them common: the five frames of these come from both."""
    vae = VideoVAE.from_tensors(weights, windows=WindowOptions(context="clips"))
    latent = torch.randn(1, 24, 12, 2, 3)
    whole, first, second = (vae.decode(latent[:, :, part])[0] for part in (slice(12), slice(7), slice(5, 12)))
    expected = second[:, :17].clone()
    blend_tail(expected, first[:, 17:])
    inside = ((first[:, 17:] - 0.5).abs() < 0.5) & ((second[:, :5] - 0.5).abs() < 0.5)  # neither is clamped
    assert inside.float().mean() > 0.5
    torch.testing.assert_close(whole[:, 17:22][inside], expected[:, :5][inside], rtol=0, atol=1e-5)
    torch.testing.assert_close(whole[:, 22:34], expected[:, 5:], rtol=0, atol=1e-5)
    assert (whole[:, 17:22] - second[:, :5]).abs().max() > 0.01


def test_many_rows_are_fed_forward_in_parts(weights, monkeypatch):
    vae = VideoVAE.from_tensors(weights, windows=WindowOptions())
    latent = torch.randn(1, 24, 2, 4, 4)
    expected = vae.decode(latent)
    monkeypatch.setattr("comfyui_fasth3.fasth3_core.vae.block_ops.FF_ROWS", 10)
    torch.testing.assert_close(vae.decode(latent), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "truth",
    [
        {"time": "seven", "last": "before", "shift": "even"},
        {"time": "absolute", "shift": "off"},
        {"context": "clips", "suffix": "first"},
        {"last": "repeat"},
    ],
)
def test_the_probe_finds_what_the_teacher_does(weights, truth):
    truth = WindowOptions(**truth)
    student = VideoVAE.from_tensors(weights, windows=WindowOptions())
    found = probe(student, replace(student, windows=truth), torch.randn(1, 24, 7, 2, 18))
    assert found[0].options == truth and found[0].psnr_db > 90
    assert len(found) <= 30 and sum(each.psnr_db > 90 for each in found) < len(found) / 2


def test_an_option_that_is_none():
    with pytest.raises(ConfigError, match="shift='up'"):
        WindowOptions(shift="up")


@pytest.fixture
def files(weights, tmp_path, monkeypatch):
    """A teacher of two blocks, and a student of three that is it: its last block adds nothing. Three stand for 24."""
    monkeypatch.setattr("comfyui_fasth3.fasth3_core.vae.video_decoder.AMBIGUOUS_BLOCKS", 3)
    deep = dict(weights)
    for name, value in weights.items():
        if name.startswith("decoder.transformer_blocks.1."):
            scaled = value * 0 if name.endswith(("scale1", "scale2")) else value.clone()
            deep[name.replace("blocks.1.", "blocks.2.")] = scaled
    save_file(weights, tmp_path / "teacher.safetensors")
    save_file(deep, tmp_path / "student.safetensors")
    save(tmp_path / "latent.safetensors", torch.randn(1, 24, 7, 16, 16), torch.randn(1, 32, 2, 37))
    return tmp_path


def run_probe(files, teacher="teacher.safetensors"):
    return main(["probe-decoder", str(files / "student.safetensors"), "--teacher", str(files / teacher),
                 "--latent", str(files / "latent.safetensors"), "--device", "cpu"])  # fmt: skip


def test_the_command_remembers_and_the_loader_takes_it(files, capsys):
    student = files / "student.safetensors"
    with pytest.raises(CheckpointError, match="probe-decoder finds out"):
        load_video_vae(student)
    assert run_probe(files) == 0
    assert "remembered in student.safetensors.windows.json" in capsys.readouterr().out
    vae, teacher = load_video_vae(student), load_video_vae(files / "teacher.safetensors")
    assert vae.windows == recall(student) and (vae.windows.context, vae.windows.shift) == ("clips", "off")
    latent = torch.randn(1, 24, 7, 16, 16)
    torch.testing.assert_close(vae.decode(latent), teacher.decode(latent), rtol=0, atol=1e-4)


def test_another_decoder_is_not_remembered(files, weights, capsys):
    other = {name: torch.randn_like(value) if "blocks" in name else value for name, value in weights.items()}
    save_file(other, files / "other.safetensors")
    assert run_probe(files, "other.safetensors") == 1
    assert "none is above 35 dB" in capsys.readouterr().out
    assert not choice_file(files / "student.safetensors").exists()


def test_a_choice_is_of_one_file(files):
    student = files / "student.safetensors"
    remember(student, WindowOptions(time="seven"), 40.0, files / "teacher.safetensors")
    assert recall(student) == WindowOptions(time="seven")
    student.write_bytes(student.read_bytes() + b" ")
    assert recall(student) is None
    choice_file(student).write_text("{}")
    with pytest.raises(CheckpointError, match="delete it and run probe-decoder again"):
        recall(student)
