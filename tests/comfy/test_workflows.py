"""Every shipped workflow in a real ComfyUI: through /prompt, and opened and run in the real editor."""

import pytest

from . import graphs, shipped
from .browser import problems
from .media import probe

pytestmark = pytest.mark.comfy

UI = shipped.ui_files()
API = shipped.api_files()


def movie_of(server, outputs: dict):
    return probe(next(path for path in server.files(outputs) if path.suffix == ".mp4"))


def assert_small_movie(movie) -> None:
    assert movie.frames == graphs.FRAMES and movie.size == (graphs.WIDTH, graphs.HEIGHT) and movie.fps == 24
    assert (movie.video_codec, movie.audio_codec, movie.audio_channels) == ("h264", "aac", 2)
    assert movie.audio_seconds == pytest.approx(graphs.FRAMES / 24, abs=0.08)


def test_each_workflow_has_both_forms():
    assert UI and [path.name for path in UI] == [path.name for path in API]


@pytest.mark.parametrize("path", API, ids=lambda path: path.stem)
def test_runs_through_the_queue(stocked, path):
    """`run` refuses a prompt of which any node fails validation, reached or not."""
    movie = movie_of(stocked, stocked.run(shipped.small(shipped.prompt_of(path))))
    assert_small_movie(movie)
    stored = " ".join(movie.metadata.values())
    assert "fasth3-run-1" in stored, "the movie carries the report of its run"
    assert str(stocked.base) not in stored, "and no path of this machine"


@pytest.mark.parametrize("path", UI, ids=lambda path: path.stem)
def test_opens_and_runs_in_the_editor(stocked, browser, path, tmp_path):
    # a name of its own: a cached result of the test above would be a movie without the editor's form of the graph
    widgets = {**shipped.WIDGETS, "FastH3DecodeToVideo.filename_prefix": f"editor/{path.stem}"}
    report = browser(stocked.url, workflow=path, queue=True, widgets=widgets, reopen=True,
                     shot=tmp_path / f"{path.stem}.png", shot_after=tmp_path / f"{path.stem}.after.png",
                     shot_reopened=tmp_path / f"{path.stem}.reopened.png")
    assert problems(report) == {}
    assert report["run"]["status"] == "execution_success", report["run"]
    assert [answer["answer"]["node_errors"] for answer in report["prompts"]] == [{}]
    assert_small_movie(movie_of(stocked, report["outputs"]))
    assert overlaps(report["graph_after"]["nodes"]) == [], "nodes grow by the text that they show after a run"
    # the movie carries its workflow: dropped onto the editor, it opens what was run, notes included
    assert restored(report["reopened"]) == restored(report["graph"])


def restored(graph: dict) -> list[tuple]:
    """What a dropped movie has to bring back of every node: what it is, is set to, and is connected to."""
    return sorted(
        (node["id"], node["type"], sorted(node["inputs"]), sorted((k, str(v)) for k, v in node["widgets"].items()))
        for node in graph["nodes"]
    )


@pytest.mark.parametrize("path", UI, ids=lambda path: path.stem)
def test_reads_well_in_the_editor(stocked, browser, path):
    """No node covers another, no note has to be scrolled, every node lies in a group, and the two forms agree."""
    report = browser(stocked.url, workflow=path)
    nodes = report["graph"]["nodes"]
    assert [node["title"] for node in nodes if node["hidden_text"] > 4] == []
    assert overlaps(nodes) == []
    assert plain_api(report["api"]) == plain_api(shipped.prompt_of(shipped.FOLDER / "api" / path.name))


@pytest.mark.parametrize("path", UI, ids=lambda path: path.stem)
def test_opens_in_nodes_2(stocked, browser, path, tmp_path):
    """The editor's other way of drawing."""
    report = browser(stocked.url, workflow=path, settings={"Comfy.VueNodes.Enabled": True},
                     shot=tmp_path / f"{path.stem}.png")
    assert problems(report) == {}
    assert overlaps(report["graph"]["nodes"]) == []


def overlaps(nodes: list[dict]) -> list[tuple[str, str]]:
    """Titles of the pairs whose drawn boxes, title bars included, intersect."""
    found = []
    for i, a in enumerate(nodes):
        for b in nodes[i + 1:]:
            (ax, ay, aw, ah), (bx, by, bw, bh) = a["box"], b["box"]
            if ax < bx + bw and bx < ax + aw and ay < by + bh and by < ay + ah:
                found.append((a["title"], b["title"]))
    return found


def plain_api(prompt: dict) -> dict:
    """Without titles, and without widgets that only the editor has."""
    return {
        key: (node["class_type"], {name: value for name, value in node["inputs"].items() if name != "upload"})
        for key, node in prompt.items()
    }
