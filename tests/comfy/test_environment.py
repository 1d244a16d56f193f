"""The lane itself: what the other tests stand on works without any node of ours."""

import json

import pytest

from . import graphs
from .browser import problems
from .events import Events
from .media import probe

pytestmark = pytest.mark.comfy


def test_stock_graph_runs_to_a_movie(server):
    """ComfyUI's own loaders take the tiny files and its own graph ends in an MP4 with sound."""
    graph = {**graphs.text_encoder(), **graphs.stock_vaes(), **graphs.conditioning(),
             **graphs.stock_sampler("tiny_vsa.safetensors", 3, graphs.seed_noise(), 12.0, 3.0),
             **graphs.stock_decode(), **graphs.stock_save("environment/stock"),
             **graphs.keep("environment", latent=("sampler", 0), positive=("positive", 0))}
    with Events(server.url) as events:
        outputs = server.run(graph)
        events.finished()
        assert events.steps("sampler")[-1] == (3, 3)
    movie = probe(server.files(outputs)[0])
    assert movie.frames == graphs.FRAMES and movie.audio_channels == 2
    assert server.kept("environment")["video"].shape == (1, 24, 7, graphs.HEIGHT // 16, graphs.WIDTH // 16)


def test_stock_template_loads_in_the_browser(server, browser):
    report = browser(server.url, template={"pack": "default", "name": "video_minimax_h3_t2v"})
    assert problems(report) == {}
    assert {"SaveVideo", "ResolutionSelector"} <= {node["type"] for node in report["graph"]["nodes"]}


def test_a_missing_node_is_seen(server, browser, tmp_path):
    """The check behind every workflow test bites."""
    path = tmp_path / "bad.json"
    node = {"id": 1, "type": "NoSuchNode", "pos": [0, 0], "size": [200, 80], "flags": {}, "order": 0, "mode": 0,
            "inputs": [], "outputs": [], "properties": {}, "widgets_values": []}
    path.write_text(json.dumps({"version": 0.4, "last_node_id": 1, "last_link_id": 0, "nodes": [node], "links": [],
                                "groups": [], "config": {}, "extra": {}}))
    report = browser(server.url, workflow=path)
    assert report["missing"] == ["NoSuchNode"] and problems(report)
