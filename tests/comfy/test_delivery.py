"""Decode to Video on a real server: what arrives while it runs, what it refuses at once, what survives a failure."""

import json

import pytest
from safetensors.torch import load_file, save_file

from . import graphs
from .events import Events
from .media import probe
from .server import message

pytestmark = pytest.mark.comfy


def decode_to_video(prefix: str, **inputs) -> dict:
    return {"film": {"class_type": "FastH3DecodeToVideo", "inputs": {
        "vae": ["vae", 0], "latent": ["sampler", 0], "filename_prefix": prefix, "format": "mp4 h264", "crf": 18,
        "bit_depth": "8", "audio_codec": "auto", "keep_latent": "on failure", "tile_batch": 0,
        "report": ["sampler", 1], **inputs}}}


def t2v(prefix: str, seed: int = 7, **inputs) -> dict:
    graph = graphs.t2v("-", seed)
    del graph["decode"], graph["save"]
    return graph | decode_to_video(prefix, **inputs)


def sized(graph: dict, width: int, height: int, length: int) -> dict:
    graph["positive"]["inputs"] |= {"width": width, "height": height, "length": length}
    return graph


@pytest.mark.parametrize("form, suffix, codec", [
    ("mp4 h264", ".mp4", "h264"), ("mp4 h265", ".mp4", "hevc"), ("mp4 av1", ".mp4", "av1"),
    ("mkv lossless", ".mkv", "ffv1"),
])  # fmt: skip
def test_every_format(server, form, suffix, codec):
    outputs = server.run(t2v("delivery/format", format=form))
    movie = probe(next(path for path in server.files(outputs) if path.suffix == suffix))
    assert movie.frames == graphs.FRAMES and movie.size == (graphs.WIDTH, graphs.HEIGHT)
    assert codec in movie.video_codec or movie.video_codec == "libdav1d"
    assert movie.audio_channels == 2
    assert "fasth3-run-1" in " ".join(movie.metadata.values())


def test_finished_frames_are_shown_while_the_rest_decodes(server):
    """Seven clips of four tiles: pictures of the first arrive before the last tile is done."""
    graph = sized(t2v("delivery/shown", seed=61), 384, 384, 124)
    with Events(server.url) as events:
        server.run(graph)
        events.finished()
        steps = events.steps("film")
        pictures = len(events.previews)
    assert steps[-1] == (28, 28)
    assert pictures >= 2
    assert [value for value, _ in steps] == sorted(value for value, _ in steps)


@pytest.mark.parametrize("change, words", [
    ({"filename_prefix": "../a"}, "inside the output folder"), ({"filename_prefix": "video/"}, "add a name"),
    ({"crf": 60}, "0 to 51 for mp4 h264"), ({"format": "png frames", "bit_depth": "10"}, "8 for png frames"),
])  # fmt: skip
def test_settings_are_refused_before_anything_runs(server, change, words):
    status, answer = server.post("/prompt", {"prompt": t2v("delivery/x") | decode_to_video("x", **change)})
    assert status == 400
    errors = answer["node_errors"]["film"]["errors"]
    assert any(words in error["details"] for error in errors), errors


def test_bad_prefix_of_save_preview(server):
    graph = graphs.t2v("../a")
    status, answer = server.post("/prompt", {"prompt": graph})
    assert status == 400 and "inside the output folder" in json.dumps(answer["node_errors"])


def test_a_failed_decode_keeps_the_latent_and_load_latent_delivers_it(server, models):
    weights = load_file(models / "vae" / "tiny_video_vae.safetensors")
    name = next(n for n in weights if n.endswith("proj_out.weight") or "decoder.proj_out" in n or "final" in n)
    save_file({**weights, name: weights[name] * float("nan")}, models / "vae" / "broken_video_vae.safetensors")
    graph = t2v("delivery/broken", seed=71)
    graph["vae"]["inputs"]["video_vae"] = "broken_video_vae.safetensors"
    error = message(server.wait(server.submit(graph)), "execution_error")
    text = error["exception_message"]
    assert "NaN or infinity" in text and "FastH3 Load Latent" in text, text
    output = server.base / "output"
    assert list((output / "delivery").glob("*broken*")) == []
    choice = text.split("loads it as '")[1].split("'")[0]
    assert (output / choice.removesuffix(" [output]")).is_file()

    later = {
        "vae": t2v("-")["vae"],
        "sampler": {"class_type": "FastH3LoadLatent", "inputs": {"file": choice}},
        **decode_to_video("delivery/rescued"),
    }
    whole = server.run(t2v("delivery/whole", seed=71))
    rescued = server.run(later)
    assert probe(server.files(rescued)[0]).frames == graphs.FRAMES
    pixels = [probe_pixels(server.files(outputs)[0]) for outputs in (whole, rescued)]
    assert pixels[0] == pixels[1]


def probe_pixels(path) -> list[bytes]:
    import av

    with av.open(str(path)) as container:
        return [frame.to_ndarray(format="rgb24").tobytes() for frame in container.decode(video=0)]


def test_interrupt_while_decoding_leaves_nothing_and_the_next_decode_works(server):
    graph = sized(t2v("delivery/interrupted", seed=81), 384, 384, 124)
    with Events(server.url) as events:
        prompt_id = server.submit(graph)
        events.wait(lambda kind, data: kind == "progress" and str(data["node"]) == "film" and data["value"] >= 4)
        server.post("/interrupt", {})
        entry = server.wait(prompt_id)
    assert message(entry, "execution_interrupted")["node_id"] == "film", entry["status"]
    folder = server.base / "output" / "delivery"
    assert [path.name for path in folder.iterdir() if "interrupted" in path.name] == []
    outputs = server.run(graph)
    assert probe(server.files(outputs)[0]).frames == 124


def test_save_latent_and_report(server):
    graph = graphs.t2v("-", 91)
    del graph["decode"], graph["save"], graph["vae"]
    graph["keep"] = {"class_type": "FastH3SaveLatent", "inputs": {
        "latent": ["sampler", 0], "filename_prefix": "delivery/kept", "report": ["sampler", 1]}}
    server.run({**graph, **graphs.keep("sampled", latent=("sampler", 0))})
    options = server.get("/object_info/FastH3LoadLatent")["FastH3LoadLatent"]["input"]["required"]["file"]
    choice = next(option for option in options[1]["options"] if "delivery/kept" in option)
    server.run({"load": {"class_type": "FastH3LoadLatent", "inputs": {"file": choice}},
                **graphs.keep("loaded", latent=("load", 0))})
    sampled, loaded = server.kept("sampled"), server.kept("loaded")
    assert all((sampled[name] == loaded[name]).all() for name in ("video", "audio"))
