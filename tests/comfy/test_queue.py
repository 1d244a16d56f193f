"""What a server must survive: an interrupt, a failure, prompts in turn, and being told to free its memory."""

import io

import pytest
from PIL import Image, ImageStat

from . import graphs
from .events import Events
from .server import message

pytestmark = pytest.mark.comfy


def up_to_latents(name: str, seed: int) -> dict:
    """The text-to-video graph without its decoding; its sampler always runs, cached or not."""
    graph = {key: node for key, node in graphs.t2v("-", seed).items() if key not in ("vae", "decode", "save")}
    graph["fresh"] = {"class_type": "FixtureFresh", "inputs": {"latent": ["positive", 1]}}
    graph["sampler"]["inputs"]["latent"] = ["fresh", 0]
    return {**graph, **graphs.keep(name, latent=("sampler", 0))}


def latents_of(server, name: str, seed: int) -> dict:
    server.run(up_to_latents(name, seed))
    return server.kept(name)


def same(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all((a[key] == b[key]).all() for key in a)


def long_run(seed: int, frames: int = 39) -> dict:
    """49 forwards of 256 x 256 pixels: some seconds of sampling."""
    graph = {**graphs.text_encoder(), **graphs.stock_vaes(), **graphs.conditioning(),
             **graphs.our_sampler("tiny_dense.safetensors", "base", seed), **graphs.keep("long", latent=("sampler", 0))}
    graph["positive"]["inputs"] |= {"width": 256, "height": 256, "length": frames}
    return graph


def test_interrupt_in_the_middle_leaves_the_server_usable(server):
    before = latents_of(server, "before_interrupt", 11)
    with Events(server.url) as events:
        prompt_id = server.submit(long_run(seed=12))
        events.wait(lambda kind, data: kind == "progress" and str(data["node"]) == "sampler" and data["max"] == 49
                    and data["value"] >= 2)
        server.post("/interrupt", {})
        entry = server.wait(prompt_id)
        done = events.steps("sampler")
    assert message(entry, "execution_interrupted")["node_id"] == "sampler", entry["status"]
    assert done[-1][0] < done[-1][1] == 49, "the run was to stop before its end"
    assert same(before, latents_of(server, "after_interrupt", 11))


def test_progress_counts_the_forwards(server):
    with Events(server.url) as events:
        prompt = {**graphs.t2v("progress", seed=21)}
        server.run(prompt)
        events.finished()
        assert events.steps("sampler")[-1] == (4, 4)


@pytest.mark.parametrize("method", ["none", "latent2rgb"])
def test_previews_when_the_user_has_them_on(server, method):
    with Events(server.url) as events:
        prompt_id = server.submit(up_to_latents(f"preview_{method}", 25), extra_data={"preview_method": method})
        assert server.wait(prompt_id)["status"]["status_str"] == "success"
        events.finished()
        assert events.steps("sampler")[-1] == (4, 4)
        # at most one a step, and none that would take more than 2 % of the time: steps here last milliseconds
        assert len(events.previews) <= (4 if method == "latent2rgb" else 0)


def test_previews_of_a_run_that_takes_its_time(server, tmp_path):
    """Strips of four moments, 2 x 2 for a square video, that are no flat colour and differ from step to step."""
    with Events(server.url) as events:
        prompt_id = server.submit(long_run(seed=26, frames=73), extra_data={"preview_method": "latent2rgb"})
        assert server.wait(prompt_id)["status"]["status_str"] == "success"
        events.finished()
        assert 1 <= len(events.previews) <= 49
    for i, data in enumerate(events.previews):
        (tmp_path / f"{i:02}.jpg").write_bytes(data)
        picture = Image.open(io.BytesIO(data))
        assert (picture.format, picture.size) == ("JPEG", (512, 512))
        assert max(ImageStat.Stat(picture).stddev) > 0.5  # faint where an earlier decode taught the tiny VAE's colours
    assert len(set(events.previews)) == len(events.previews)


def test_prompts_in_turn(server):
    """Queued together: each finishes, and a seed decides the result whatever ran before it."""
    seeds = {"turn_a": 31, "turn_b": 32, "turn_c": 31}
    ids = [server.submit(up_to_latents(name, seed)) for name, seed in seeds.items()]
    assert [server.wait(prompt_id)["status"]["status_str"] for prompt_id in ids] == ["success"] * 3
    a, b, c = map(server.kept, seeds)
    assert same(a, c)
    assert not (a["video"] == b["video"]).any() and not (a["audio"] == b["audio"]).any()


def test_failed_then_good(server):
    """A failure behind our sampler, one inside it, then a good run that equals one before both."""
    before = latents_of(server, "before_failure", 41)
    failing = graphs.t2v("failing", seed=42)
    failing["fail"] = {"class_type": "FixtureFail", "inputs": {"latent": ["sampler", 0], "message": "on purpose"}}
    failing["decode"]["inputs"]["latent"] = ["fail", 0]
    entry = server.wait(server.submit(failing))
    assert message(entry, "execution_error")["exception_message"].strip() == "on purpose"

    wrong = graphs.t2v("wrong", seed=43)
    wrong["model"]["inputs"]["contract"] = "base"  # the file has trained gates
    error = message(server.wait(server.submit(wrong)), "execution_error")
    assert error["node_id"] in ("model", "sampler")
    assert "preview-4" in error["exception_message"], "the message names what to choose instead"

    assert same(before, latents_of(server, "after_failure", 41))


def test_free_memory_then_run(server):
    before = latents_of(server, "before_free", 51)
    status, _ = server.post("/free", {"unload_models": True, "free_memory": True})
    assert status == 200
    assert same(before, latents_of(server, "after_free", 51))
