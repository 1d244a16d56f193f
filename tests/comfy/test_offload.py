"""Streamed weights in a real server: graphs with and without in turn, freed memory, an interrupt, and the plan."""

import pytest

from . import graphs
from .events import Events
from .server import message
from .test_queue import latents_of, same

pytestmark = pytest.mark.comfy


def offload(**changes) -> dict:
    inputs = {"policy": "stream", "device_gib": 0.0, "slots": 2, "resident_blocks": 0, "pinned_gib": -1.0,
              "after_run": "keep"}  # fmt: skip
    return {"offload": {"class_type": "FastH3Offload", "inputs": inputs | changes}}


def streamed(name: str, seed: int, **changes) -> dict:
    """The text-to-video graph up to its latents, with streamed weights."""
    graph = {key: node for key, node in graphs.t2v("-", seed).items() if key not in ("vae", "decode", "save")}
    graph |= {
        "fresh": {"class_type": "FixtureFresh", "inputs": {"latent": ["positive", 1]}},
        "travel": {"class_type": "FixtureTravel", "inputs": {"latent": ["fresh", 0]}},
        **offload(**changes),
    }
    graph["sampler"]["inputs"] |= {"latent": ["travel", 0], "offload": ["offload", 0]}
    return {**graph, **graphs.keep(name, latent=("sampler", 0))}


def run(server, name: str, seed: int, **changes) -> tuple[dict, str]:
    """(latents, report)."""
    outputs = server.run(streamed(name, seed, **changes))
    return server.kept(name), outputs["sampler"]["text"][0]


def test_graphs_with_and_without_in_turn(server):
    plain = latents_of(server, "resident_1", 61)
    for i, policy in enumerate(("stream", "mmap", "stream")):
        latents, report = run(server, f"streamed_{i}", 61, policy=policy)
        assert same(latents, plain)
        place = "a mapped file" if policy == "mmap" else "host memory"
        assert f"blocks streamed from {place} through 2 slots" in report and " 0.0 GiB streamed in" in report
        assert same(latents_of(server, f"resident_again_{i}", 61), plain)
    assert not list((server.base / "temp").glob("fasth3-*")), "mapped files have no name"


def test_two_models_in_turn(server):
    """A dense model between two streamed runs of another."""
    first, _ = run(server, "turn_1", 62)
    server.run(graphs.first_last_frame("offload/between"))
    second, _ = run(server, "turn_2", 62)
    assert same(first, second)


@pytest.mark.parametrize("free_memory", [False, True])
def test_memory_is_given_back_on_request(server, free_memory):
    before, _ = run(server, f"before_free_{free_memory}", 63)
    status, _ = server.post("/free", {"unload_models": True, "free_memory": free_memory})
    assert status == 200
    after, _ = run(server, f"after_free_{free_memory}", 63)
    assert same(before, after)


@pytest.mark.parametrize("after_run", ["free_device", "free_all"])
def test_memory_is_given_back_after_a_run(server, after_run):
    before, _ = run(server, f"keep_{after_run}", 64)
    for i in range(2):
        latents, _ = run(server, f"{after_run}_{i}", 64, after_run=after_run)
        assert same(before, latents)


def test_an_interrupt_and_a_good_run(server):
    before, _ = run(server, "offload_before_interrupt", 65)
    long = streamed("long_streamed", 66)
    long["model"]["inputs"] |= {"model_name": "tiny_dense.safetensors", "contract": "base"}
    long["positive"]["inputs"] |= {"width": 256, "height": 256, "length": 39}
    with Events(server.url) as events:
        prompt_id = server.submit(long)
        events.wait(lambda kind, data: kind == "progress" and str(data["node"]) == "sampler" and data["max"] == 49
                    and data["value"] >= 2)  # fmt: skip
        server.post("/interrupt", {})
        entry = server.wait(prompt_id)
    assert message(entry, "execution_interrupted")["node_id"] == "sampler", entry["status"]
    after, _ = run(server, "offload_after_interrupt", 65)
    assert same(before, after)


def test_what_cannot_fit_is_refused(server):
    entry = server.wait(server.submit(streamed("refused", 67, device_gib=0.001)))
    error = message(entry, "execution_error")
    assert error["node_id"] == "sampler" and "What would fit" in error["exception_message"]


def test_plan_feeds_the_latent(server):
    graph = {
        "model": {"class_type": "FastH3LoadModel", "inputs": {
            "model_name": "tiny_vsa.safetensors", "contract": "preview-4", "dtype": "auto"}},
        **offload(),
        "plan": {"class_type": "FastH3Plan", "inputs": {
            "model": ["model", 0], "width": 96, "height": 64, "seconds": graphs.SECONDS, "aspect": "custom",
            "megapixels": 0.0, "text_tokens": 20, "offload": ["offload", 0]}},
        "empty": {"class_type": "FastH3EmptyLatent", "inputs": {
            "width": ["plan", 0], "height": ["plan", 1], "seconds": ["plan", 2]}},
        **graphs.keep("planned", latent=("empty", 0)),
    }  # fmt: skip
    text = server.run(graph)["plan"]["text"][0]
    assert "96x64, 22 frames" in text and "streamed from host memory" in text
    assert server.kept("planned")["video"].shape == (1, 24, 7, 4, 6)
