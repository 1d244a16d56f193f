"""Mirrors nodes/decode_to_video.py: the file, what it carries, what is shown meanwhile, and what survives failure."""

import json

import av
import pytest
import torch
from comfyui_fasth3.fasth3_core.errors import FastH3Error
from comfyui_fasth3.fasth3_core.media import formats, mux, rgb_map
from comfyui_fasth3.fasth3_core.media.pixels import quantise
from comfyui_fasth3.fasth3_core.report.run_report import RunReport
from comfyui_fasth3.fasth3_core.vae.decoding import TileClips
from comfyui_fasth3.nodes import _decode, _latents, decode_to_video
from comfyui_fasth3.nodes._colours import newest_map
from comfyui_fasth3.nodes._host import io

NODE = "FastH3DecodeToVideo"
REPORT = RunReport(contract={"name": "preview-4", "shift_video": 12.0, "shift_audio": 3.0})
HIDDEN = {io.Hidden.prompt: {"1": {"class_type": "X"}}, io.Hidden.extra_pnginfo: {"workflow": {"nodes": []}}}


@pytest.fixture
def sampled():
    """39 frames of 64x96: three chunks."""
    generator = torch.Generator().manual_seed(0)
    return _latents.join(torch.randn(1, 24, 12, 4, 6, generator=generator),
                         torch.randn(1, 32, 2, 65, generator=generator))


def frames_of(path, pixels="rgb24"):
    with av.open(str(path)) as container:
        return torch.stack([torch.from_numpy(f.to_ndarray(format=pixels)) for f in container.decode(video=0)])


def names(folders):
    return sorted(p.relative_to(folders / "output").as_posix() for p in (folders / "output").rglob("*") if p.is_file())


def test_file_ui_and_outputs(run, vae, sampled, folders):
    output = run(NODE, HIDDEN, vae=vae, latent=sampled, filename_prefix="video/FastH3", report=REPORT)
    path = folders / "output" / "video" / "FastH3_00001_.mp4"
    assert output.args[0] == str(path)
    assert output.args[1]["waveform"].shape == (1, 2, 52000) and output.args[1]["sample_rate"] == 32000
    assert output.ui["images"] == [{"filename": "FastH3_00001_.mp4", "subfolder": "video", "type": "output"}]
    assert output.ui["animated"] == (True,)
    assert output.ui["text"][0].startswith("FastH3_00001_.mp4: 96x64, 39 frames (1.62 s), mp4 h264\nsound peak ")
    assert REPORT.to_text() in output.ui["text"][0]
    with av.open(str(path)) as container:
        metadata = dict(container.metadata)
        audio = container.streams.audio[0]
        assert audio.duration * audio.time_base == 52000 / 32000
    assert json.loads(metadata["prompt"]) == HIDDEN[io.Hidden.prompt]
    assert json.loads(metadata["workflow"]) == {"nodes": []}
    assert json.loads(metadata["fasth3_report"]) == REPORT.to_dict()
    assert json.loads(metadata["fasth3_output"])["sound"]["not_finite"] == 0
    assert len(frames_of(path)) == 39


def test_lossless_frames_are_those_of_decode(run, vae, sampled, folders):
    images = run("FastH3Decode", vae=vae, latent=sampled, tile_batch=0).args[0]
    path = run(NODE, vae=vae, latent=sampled, filename_prefix="a", format="mkv lossless").args[0]
    assert torch.equal(frames_of(path), quantise(images))


def test_pictures_and_their_sound(run, vae, sampled, folders):
    for _ in range(2):
        output = run(NODE, vae=vae, latent=sampled, filename_prefix="a.b", format="png frames")
    assert output.args[0] == str(folders / "output" / "a.b_00002_")
    assert output.ui["images"] == [{"filename": "00001.png", "subfolder": "a.b_00002_", "type": "output"}]
    assert output.ui["animated"] == (False,)
    pictures = [f"a.b_0000{run}_/{n:05}.png" for run in (1, 2) for n in range(1, 40)]
    assert names(folders) == sorted(["a.b_00001_.wav", "a.b_00002_.wav", *pictures])


def test_no_metadata_where_the_host_forbids_it(run, vae, sampled, host, monkeypatch):
    monkeypatch.setattr(host, "wants_metadata", lambda: False)
    path = run(NODE, HIDDEN, vae=vae, latent=sampled, filename_prefix="a", report=REPORT).args[0]
    with av.open(path) as container:
        assert not {"prompt", "workflow", "fasth3_report", "fasth3_output"} & set(container.metadata)


def test_bar_counts_tiles_and_shows_finished_frames(run, vae, sampled, host, monkeypatch):
    shown = []
    monkeypatch.setattr(host, "progress", lambda total: lambda done, picture=None: shown.append((done, total, picture)))
    put = mux.Movie.write
    written = []
    monkeypatch.setattr(mux.Movie, "write", lambda movie, frames: (written.append(len(frames)), put(movie, frames)))
    run(NODE, vae=vae, latent=sampled, filename_prefix="a")
    assert [row[:2] for row in shown] == [(1, 2), (2, 2)]
    assert written[-3:] == [17, 17, 5]


def test_a_picture_that_fails_does_not_cost_the_video(run, vae, sampled, monkeypatch, caplog):
    monkeypatch.setattr(decode_to_video, "frames_preview", lambda frames: 1 / 0)
    path = run(NODE, vae=vae, latent=sampled, filename_prefix="a").args[0]
    assert len(frames_of(path)) == 39 and "no picture of the last clip" in caplog.text


def test_latent_is_kept_when_asked(run, vae, sampled, folders):
    run(NODE, vae=vae, latent=sampled, filename_prefix="a", keep_latent="always", report=REPORT)
    assert names(folders) == ["a_00001_.latent.safetensors", "a_00001_.mp4"]
    latent, report = run("FastH3LoadLatent", file="a_00001_.latent.safetensors [output]").args
    assert all(torch.equal(a, b) for a, b in zip(_latents.split(latent), _latents.split(sampled), strict=True))
    assert report == REPORT


def test_a_latent_that_is_kept_is_not_saved_twice(run, vae, sampled, folders, monkeypatch):
    break_at("chunk 1", monkeypatch)
    with pytest.raises(FastH3Error, match=r"loads it as 'b/a_00001_.latent.safetensors \[output\]'"):
        run(NODE, vae=vae, latent=sampled, filename_prefix="b/a", keep_latent="always")
    assert names(folders) == ["b/a_00001_.latent.safetensors"]


STAGES = ["sound", "settings", "tile 0", "tile 1", "chunk 0", "chunk 1", "chunk 2", "end"]


def break_at(stage, monkeypatch):
    """Make one stage of a decode fail as a bug would."""
    kind, _, number = stage.partition(" ")
    calls = []

    def wrap(owner, name, at=0):
        real = getattr(owner, name)

        def fail(*args, **kwargs):
            calls.append(1)
            if len(calls) == at + 1:
                raise OSError(28, "No space left on device")
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, fail)

    if kind == "tile":
        wrap(TileClips, "__call__", int(number))
    elif kind == "chunk":
        wrap(mux.Movie, "write", int(number) + 1)  # the first one tries the settings out
    elif kind == "end":
        wrap(mux.Movie, "close", 1)
    elif kind == "sound":
        wrap(_decode.Decoder, "waveform")
    else:
        wrap(mux.Movie, "_add_video")
        wrap(mux.Movie, "_add_audio", 1)


@pytest.mark.parametrize("stage", STAGES)
def test_a_failure_at_each_stage_leaves_the_latent_and_no_half_file(run, vae, sampled, folders, monkeypatch, stage):
    before = run(NODE, vae=vae, latent=sampled, filename_prefix="good").args[0]
    good = frames_of(before)
    break_at(stage, monkeypatch)
    if stage == "settings":
        monkeypatch.setattr(mux.Movie, "_add_video", lambda *args: 1 / 0)
    with pytest.raises(FastH3Error, match=r"The sampled latent is kept in .*FastH3 Load Latent") as caught:
        run(NODE, vae=vae, latent=sampled, filename_prefix="bad", report=REPORT)
    assert names(folders) == ["good_00001_.mp4", "latents/FastH3_undecoded_00001_.latent.safetensors"]
    monkeypatch.undo()
    choice = str(caught.value).split("loads it as '")[1].split("'")[0]
    latent, report = run("FastH3LoadLatent", file=choice).args
    assert report == REPORT
    after = run(NODE, vae=vae, latent=latent, filename_prefix="good").args[0]
    assert torch.equal(frames_of(after), good)


@pytest.mark.parametrize("at", range(4))
def test_an_interrupt_before_each_tile_leaves_nothing(run, vae, folders, host, monkeypatch, at):
    class Stop(BaseException):
        pass

    calls = []

    def interrupt():
        calls.append(1)
        if len(calls) == at + 1:
            raise Stop

    monkeypatch.setattr(host, "check_interrupt", interrupt)
    wide = _latents.join(torch.randn(1, 24, 12, 4, 20), torch.randn(1, 32, 2, 65))  # two clips of two tiles
    with pytest.raises(Stop):
        run(NODE, vae=vae, latent=wide, filename_prefix="a")
    assert names(folders) == []


@pytest.mark.parametrize("clip", range(2))
def test_memory_that_runs_out_in_the_middle(run, vae, sampled, folders, monkeypatch, clip):
    whole = run(NODE, vae=vae, latent=sampled, filename_prefix="a", format="mkv lossless").args[0]
    real, calls = TileClips.__call__, []

    def starve(*args):
        calls.append(1)
        if len(calls) == clip + 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(*args)

    monkeypatch.setattr(TileClips, "__call__", starve)
    output = run(NODE, vae=vae, latent=sampled, filename_prefix="a", format="mkv lossless")
    assert torch.equal(frames_of(output.args[0]), frames_of(whole))
    assert "warning: out of memory on cpu" in output.ui["text"][0]
    assert "decoding went on on cpu, tile by tile" in output.ui["text"][0]


def test_bad_sound_is_named_kept_and_does_not_cost_the_picture(run, vae, sampled, folders, monkeypatch):
    vae.materialise(torch.device("cpu"))
    broken = torch.full((1, 2, 52000), float("nan"))
    monkeypatch.setattr(type(vae.audio), "to_waveform", lambda self, latent, frames: broken)
    output = run(NODE, vae=vae, latent=sampled, filename_prefix="a")
    assert "warning: 104000 samples (100.0%) are not finite numbers" in output.ui["text"][0]
    assert [name for name in names(folders)] == ["a_00001_.mp4", "a_00001_.wav"]
    assert len(frames_of(output.args[0])) == 39


BAD = {
    "outside": dict(filename_prefix="../a"), "absolute": dict(filename_prefix="/tmp/a"),
    "empty": dict(filename_prefix=""), "folder": dict(filename_prefix="a/"), "newline": dict(filename_prefix="a\nb"),
    "long": dict(filename_prefix="x" * 300), "through-a-file": dict(filename_prefix="file/a"),
    "crf": dict(format="mp4 h264", crf=63, bit_depth="8", audio_codec="auto"),
    "depth": dict(format="png frames", crf=18, bit_depth="10", audio_codec="auto"),
}  # fmt: skip
SETTINGS = dict(filename_prefix="video/FastH3", format="mp4 h264", crf=18, bit_depth="8", audio_codec="auto")


@pytest.mark.parametrize("name", BAD)
def test_bad_settings_are_found_before_anything_runs(name, host, folders):
    from comfyui_fasth3.nodes.decode_to_video import FastH3DecodeToVideo

    (folders / "output" / "file").write_text("")
    found = FastH3DecodeToVideo.validate_inputs(**{**SETTINGS, **BAD[name]})
    assert isinstance(found, str) and ("filename_prefix" in found or "crf" in found or "bit_depth" in found)


@pytest.mark.parametrize("form", formats.FORMATS)
@pytest.mark.parametrize("prefix", ["FastH3", "video/FastH3", "%date:yyyy-MM-dd%/狐 %width%", "a.b/c.d"])
def test_good_settings_pass(host, prefix, form):
    from comfyui_fasth3.nodes.decode_to_video import FastH3DecodeToVideo

    assert FastH3DecodeToVideo.validate_inputs(**{**SETTINGS, "format": form, "filename_prefix": prefix}) is True
    assert FastH3DecodeToVideo.validate_inputs() is True, "values that other nodes give are checked when they come"


def test_colours_of_previews_are_fitted_once_and_kept_if_good(run, vae, sampled, monkeypatch):
    path = vae.video_path.with_name(vae.video_path.name + ".fasth3-preview.json")
    run(NODE, vae=vae, latent=sampled, filename_prefix="a")
    assert not path.exists(), "48 latent pixels are too few"
    monkeypatch.setattr(rgb_map, "ENOUGH", 0)
    run(NODE, vae=vae, latent=sampled, filename_prefix="a")
    first = path.read_text()
    run(NODE, vae=vae, latent=sampled, filename_prefix="a")
    assert path.read_text() == first
    assert torch.equal(newest_map([path.parent]).weights, rgb_map.load(path).weights)
    path.unlink()
    assert newest_map([path.parent]) is rgb_map.BUILT_IN


def test_memory_stays_flat_over_ten_decodes(run, vae, sampled, folders):
    """Tensors alive, not the process's size, which the allocator's habits hide."""
    import gc

    def alive():
        gc.collect()
        return sum(1 for thing in gc.get_objects() if type(thing) is torch.Tensor)

    run(NODE, vae=vae, latent=sampled, filename_prefix="a")
    before = alive()
    for _ in range(10):
        run(NODE, vae=vae, latent=sampled, filename_prefix="a")
    assert alive() <= before
    assert len(names(folders)) == 11
