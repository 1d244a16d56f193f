"""Mirrors cli/demo.py: what it makes, and what it finds wrong."""

import shlex

import av
import pytest
import torch
from comfyui_fasth3 import cli
from comfyui_fasth3.cli import demo
from comfyui_fasth3.cli.graph import read_graph
from comfyui_fasth3.fasth3_core.media.delivery import delivering
from comfyui_fasth3.fasth3_core.media.formats import Output
from comfyui_fasth3.fasth3_core.media.sound import fit


def command(*argv):
    return cli.main([str(part) for part in argv])


def test_demo(tmp_path, capsys):
    assert command("demo", "--out", tmp_path, "--seconds", 0.2, "--device", "cpu") == 0
    shown = capsys.readouterr().out
    assert "all as it should be" in shown
    again = shlex.split(shown.splitlines()[-1])[3:]
    assert cli.main([*again, "--device", "cpu", "--set", "FastH3EmptyLatent.width=64"]) == 0
    assert read_graph(tmp_path / "graph.json")["1"]["inputs"]["model_name"] == "fasth3_demo/transformer"
    assert "frames 5" in shown and "audio codec aac" in shown
    frames = av.open(str(next((tmp_path / "output").rglob("*.mp4")))).decode(video=0)
    picture = torch.from_numpy(next(iter(frames)).to_ndarray(format="rgb24")).float() / 255
    # something to look at: neither flat nor noise, neither burnt nor black
    assert 0.08 < picture.std() < 0.35
    assert (picture[:, 1:] - picture[:, :-1]).abs().mean() < 0.03
    assert ((picture < 0.004) | (picture > 0.996)).float().mean() < 0.2


@pytest.mark.parametrize("change, message", [
    ({"frames": 22}, "frames is 5, expected 22"),
    ({"audio": None}, "0 audio streams"),
    ({"size": 128}, "size is 128x128, expected 448x256"),
])  # fmt: skip
def test_demo_sees_what_is_wrong(tmp_path, change, message):
    size = change.get("size")
    frames = torch.rand(5, size or demo.HEIGHT, size or demo.WIDTH, 3)
    audio = change.get("audio", torch.zeros(2, 32000))
    sound = None if audio is None else fit(audio, 32000, 5)
    with delivering(tmp_path / "a.mp4", Output(), *reversed(frames.shape[1:3]), sound=sound) as put:
        put(frames)
    assert any(message in problem for problem in demo.look_at(tmp_path / "a.mp4", change.get("frames", 5)))


def test_demo_fails_when_the_file_is_wrong(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(demo, "look_at", lambda path, frames: ["too dark"])
    assert command("demo", "--out", tmp_path, "--seconds", 0.2, "--device", "cpu") == 1
    assert "WRONG: too dark" in capsys.readouterr().out


def test_the_demo_graph_is_the_shipped_one():
    assert {node["class_type"] for node in read_graph(demo.GRAPH).values()} == {
        "FastH3LoadModel", "FastH3Offload", "FastH3LoadVAE", "FastH3LoadPromptEmbeds", "FastH3EmptyLatent",
        "FastH3Sampler", "FastH3DecodeToVideo",
    }  # fmt: skip
