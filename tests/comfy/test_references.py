"""FastH3References in the real ComfyUI: the references of the stock node, added to them, and both samplers run."""

import av
import numpy as np
import pytest

from . import graphs

pytestmark = pytest.mark.comfy

# what the stock node takes as frames and a soundtrack, as one VIDEO
CLIP = {"clip_video": {"class_type": "CreateVideo", "inputs": {
    "images": ["film", 0], "audio": ["tone", 0], "fps": 24.0}}}
ALL = {"images.image_0": ["picture_a", 0], "videos.video_0": ["clip_video", 0], "audios.audio_0": ["tone", 0]}


def stock(**changes) -> dict:
    """The stock reference node under `positive`; None takes an input away."""
    graph = {**graphs.text_encoder(), **graphs.stock_vaes(), **graphs.references()}
    inputs = {**graph["positive"]["inputs"], **changes}
    graph["positive"]["inputs"] = {name: value for name, value in inputs.items() if value is not None}
    return graph


def without(*names: str) -> dict:
    return stock(**dict.fromkeys(names))


def ours(source: str, references: dict, **options) -> dict:
    """FastH3References behind the conditioning `source`, as the stock node sizes and encodes."""
    inputs = {"positive": [source, 0], "vae": ["vae", 0], "latent": ["positive", 1], "size": "as the video",
              "alpha": "drop", "posterior": "mean", "video_sound": "use", **references, **options}
    return {"vae": graphs.our_decode()["vae"], "ours": {"class_type": "FastH3References", "inputs": inputs}}


def references_of(server, name: str, graph: dict, source: str) -> dict:
    server.run({**graph, **graphs.keep(name, positive=(source, 0))})
    return {key: value for key, value in server.kept(name).items() if key.startswith("reference")}


def assert_same(made: dict, stock: dict) -> None:
    assert list(made) == list(stock)
    for key, expected in stock.items():
        assert made[key].shape == expected.shape and expected.std() > 0.05, key
        # two implementations of the encoders, and of LANCZOS on the same 8-bit picture
        bound = 1e-3 * expected.abs().max()
        assert (made[key] - expected).abs().max() <= bound, key
        assert (made[key] * 1.01 - expected).abs().max() > bound, key


def plain(**more) -> dict:
    """A prompt of the stock node that has no references, with everything loaded that references come from."""
    graph = {**stock(), **CLIP}
    return {**graph, **graphs.conditioning(), **more}


def test_the_means_are_the_stock_nodes_latents(server):
    expected = references_of(server, "references_stock", stock(), "positive")
    assert set(expected) == {"reference0.image", "reference1.video_audio", "reference1.video_audio.sound",
                             "reference2.audio.sound"}
    assert_same(references_of(server, "references_ours", plain(**ours("positive", ALL)), "ours"), expected)


def test_they_add_up_with_the_stock_nodes(server):
    """Its picture and our video and sound, in its order: what it makes of all three."""
    half = {**without("ref_videos.ref_video_0", "ref_video_audios.ref_video_audio_0", "ref_audios.ref_audio_0"), **CLIP}
    rest = {name: link for name, link in ALL.items() if name != "images.image_0"}
    mixed = references_of(server, "references_mixed", {**half, **ours("positive", rest)}, "ours")
    assert_same(mixed, references_of(server, "references_stock_again", stock(), "positive"))


def test_the_text_encoder_sees_what_the_stock_node_shows_it(server):
    """With clip in place of positive: the same tokens, states but for rounding of pictures, and references."""
    inputs = {"clip": ["clip", 0], "prompt": graphs.PROMPT}
    graph = plain(**ours("positive", {**ALL, **inputs}))
    del graph["ours"]["inputs"]["positive"]
    server.run({**graph, **graphs.keep("presented_ours", positive=("ours", 0))})
    server.run({**stock(), **graphs.keep("presented_stock", positive=("positive", 0))})
    made, expected = server.kept("presented_ours"), server.kept("presented_stock")
    assert list(made) == list(expected)
    assert (made["token_tags"] == expected["token_tags"]).all() and not expected["token_tags"].all()
    states, other = made["text_states"], server.kept("references_ours")["text_states"]
    assert states.shape == expected["text_states"].shape != other.shape
    # 50 layers in bf16
    assert (states - expected["text_states"]).square().mean().sqrt() < 0.02 * expected["text_states"].std()
    assert_same(*({key: value for key, value in kept.items() if key.startswith("reference")}
                  for kept in (made, expected)))


@pytest.mark.parametrize("name", ["stock", "ours"])
def test_both_samplers_take_them(server, name):
    """With references and without, the same sampler gives different videos."""
    sampler = graphs.our_sampler("tiny_dense.safetensors", "base") if name == "ours" else graphs.stock_sampler(
        "tiny_dense.safetensors", 4, graphs.seed_noise(), 12, 3)
    reads = "sampler" if name == "ours" else "guider"
    key = "positive" if name == "ours" else "conditioning"
    videos = []
    for source in ("positive", "ours"):
        sampler[reads]["inputs"][key] = [source, 0]
        graph = plain(**ours("positive", ALL, posterior="sample"), **sampler)
        server.run({**graph, **graphs.keep(f"references_{name}_{source}", latent=("sampler", 0))})
        videos.append(server.kept(f"references_{name}_{source}")["video"])
    assert all(video.isfinite().all() for video in videos)
    assert (videos[0] - videos[1]).abs().max() > 0.01


@pytest.fixture(scope="module")
def film_file(server) -> str:
    """Two seconds at 30 frames a second: a square that moves over a gradient. In RGB: ComfyUI and FastVideo, whom we
    follow, differ in how they spread the colours of subsampled video."""
    with av.open(str(server.base / "input" / "film.mp4"), "w") as container:
        stream = container.add_stream("libx264rgb", rate=30, options={"crf": "12"})
        stream.width, stream.height, stream.pix_fmt = 128, 96, "rgb24"
        for i in range(60):
            pixels = np.zeros((96, 128, 3), np.uint8)
            pixels[..., 0] = np.linspace(20, 220, 128)[None]
            pixels[..., 2] = np.linspace(200, 40, 96)[:, None]
            pixels[20:60, i : i + 40, 1] = 180
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode(None))
    return "film.mp4"


@pytest.mark.parametrize("trimmed", [False, True])
def test_a_file_is_what_comfyui_reads_of_it(server, film_file, trimmed):
    """Streamed by us, and as the frames that ComfyUI decodes."""
    film = {"file": {"class_type": "LoadVideo", "inputs": {"file": film_file}}}
    source = "file"
    if trimmed:
        source = "part"
        film["part"] = {"class_type": "Video Slice", "inputs": {
            "video": ["file", 0], "start_time": 0.5, "duration": 1.2, "strict_duration": False}}
    film["parts"] = {"class_type": "GetVideoComponents", "inputs": {"video": [source, 0]}}
    for rate in (30, 24):
        film[f"at_{rate}"] = {"class_type": "CreateVideo", "inputs": {"images": ["parts", 0], "fps": float(rate)}}
    made = []
    for link in (source, "at_30", "at_24"):
        graph = plain(**film, **ours("positive", {"videos.video_0": [link, 0]}))
        made += references_of(server, f"references_{link}_{trimmed}", graph, "ours").values()
    streamed, frames, others = made
    assert streamed.shape == frames.shape == (1, 24, 7, 6, 8)

    def apart(a, b):
        return (a - b).square().mean().sqrt() / b.std()

    # ComfyUI's floats are off by up to half a level, which the encoder of random weights makes more of
    assert apart(streamed, frames) < 0.03 < apart(others, frames)


def test_one_clear_error(server):
    """Sound alone is refused before anything is encoded."""
    from .server import message

    graph = plain(**ours("positive", {"audios.audio_0": ["tone", 0]}), **graphs.keep("refused", positive=("ours", 0)))
    error = message(server.wait(server.submit(graph)), "execution_error")
    assert error["node_id"] == "ours" and "sound is the only reference" in error["exception_message"]
