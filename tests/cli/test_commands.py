"""Mirrors cli/__init__.py, run.py and file_nodes.py: the commands as they are typed."""

import json
import os
import subprocess
import sys
import wave

import av
import pytest
import torch
from comfyui_fasth3 import cli
from comfyui_fasth3.cli import demo, demo_bundle, quantize
from comfyui_fasth3.cli.demo_bundle import write_bundle
from comfyui_fasth3.cli.graph import read_graph
from comfyui_fasth3.fasth3_core.checkpoint import save
from comfyui_fasth3.fasth3_core.media import mux
from PIL import Image
from safetensors import SafetensorError


def command(*argv):
    return cli.main([str(part) for part in argv])


def test_list_of_commands(capsys):
    assert command("--help") == 0
    shown = capsys.readouterr().out
    assert all(f"  {name} " in shown for name in cli.COMMANDS)
    assert command() == 2


def test_unknown_command(capsys):
    assert command("frobnicate") == 2
    assert "no command 'frobnicate'" in capsys.readouterr().err


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_has_help(name, capsys):
    with pytest.raises(SystemExit) as stop:
        command(name, "--help")
    assert stop.value.code == 0
    assert f"comfyui-fasth3 {name}" in capsys.readouterr().out


def test_as_a_module():
    done = subprocess.run(
        [sys.executable, "-m", "comfyui_fasth3", "--help"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0 and "submit" in done.stdout


def test_names_that_the_terminal_cannot_show(bundle, tmp_path):
    root, names = bundle
    link = tmp_path / "модель.safetensors"
    link.symlink_to(root / "models" / "vae" / names.audio_vae)
    done = subprocess.run(
        [sys.executable, "-m", "comfyui_fasth3", "inspect", str(link)], capture_output=True, text=True, timeout=60,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )
    assert done.returncode == 0 and r"\u043c\u043e\u0434" in done.stdout


def test_what_users_can_mend_is_one_line_and_status_1(capsys, tmp_path):
    assert command("run", tmp_path / "gone.json") == 1
    error = capsys.readouterr().err
    assert "comfyui-fasth3 run: " in error and "Traceback" not in error


@pytest.mark.parametrize("argv", [["--help"], ["plan", "--help"], ["plan"]])
def test_a_reader_that_has_seen_enough(argv):
    reading, writing = os.pipe()
    os.close(reading)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(
        [sys.executable, "-m", "comfyui_fasth3", *argv], stdout=writing, stderr=subprocess.PIPE, text=True, timeout=60,
        env=environment,
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")


def test_without_standard_output(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    assert command("plan") == 0


def stop(*_):
    raise KeyboardInterrupt


def test_ctrl_c_leaves_no_half_model(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(save, "save_file", lambda tensors, path, **_: (path.write_bytes(b"half"), stop()))
    assert command("demo", "--out", tmp_path) == 130
    assert capsys.readouterr().err == "comfyui-fasth3 demo: stopped\n"
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["config.json"]


def test_ctrl_c_leaves_no_half_video(bundle, tmp_path, capsys, monkeypatch):
    written = []
    monkeypatch.setattr(mux.Movie, "write", lambda movie, frames: (written.append(len(frames)), stop()))
    assert run_shipped(bundle, tmp_path) == 130
    assert written and capsys.readouterr().err.endswith("comfyui-fasth3 run: stopped\n")
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_ctrl_c_leaves_no_half_quantised_file(bundle, tmp_path, capsys, monkeypatch):
    root, names = bundle
    monkeypatch.setattr(quantize, "_say", stop)
    model = root / "models" / "diffusion_models" / names.model
    assert command("quantize", model, tmp_path / "a.safetensors") == 130
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    root = tmp_path_factory.mktemp("bundle")
    return root, write_bundle(root)


def run_shipped(bundle, tmp_path, *settings):
    root, names = bundle
    chosen = [
        f"FastH3LoadModel.model_name={names.model}", "FastH3LoadModel.contract=auto",
        f"FastH3LoadVAE.video_vae={names.video_vae}", f"FastH3LoadVAE.audio_vae={names.audio_vae}",
        "FastH3EmptyLatent.aspect=custom", "FastH3EmptyLatent.width=64", "FastH3EmptyLatent.height=64",
        "FastH3EmptyLatent.seconds=0.2", *settings,
    ]  # fmt: skip
    flags = [part for setting in chosen for part in ("--set", setting)]
    return command("run", demo.GRAPH, "--models", root / "models", "--input", root / "input",
                   "--output", tmp_path / "out", "--device", "cpu", *flags)


def test_run_the_shipped_graph(bundle, tmp_path, capsys):
    assert run_shipped(bundle, tmp_path) == 0
    path = tmp_path / "out" / "video" / "FastH3_00001_.mp4"
    assert capsys.readouterr().out == f"saved {path}\n"
    with av.open(str(path)) as container:
        assert sum(1 for _ in container.decode(video=0)) == 5
        assert json.loads(container.metadata["prompt"])["1"]["class_type"] == "FastH3LoadModel"


@pytest.mark.parametrize("setting, message", [
    ("FastH3LoadModel.model_name=gone", "model_name='gone' is not one of 'fasth3_demo/transformer'"),
    ("FastH3Sampler.grid=other", "grid='other' is not one of"),
    ("FastH3Sampler.sede=1", "no input 'sede'"),
    ("FastH3LoadModel.contract=base", "trained VSA gates"),
    ("FastH3DecodeToVideo.filename_prefix=../a", "filename_prefix='../a': expected a name inside the output folder"),
    ("FastH3DecodeToVideo.crf=60", "crf=60: expected 0 to 51 for mp4 h264"),
    ('FastH3DecodeToVideo.audio_codec="mp3"', "audio_codec='mp3' is not one of 'auto'"),
])  # fmt: skip
def test_run_refuses(bundle, tmp_path, capsys, setting, message):
    assert run_shipped(bundle, tmp_path, setting) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_run_says_why_a_named_backend_cannot_run(bundle, tmp_path, capsys):
    graph = read_graph(demo.GRAPH)
    sampler = next(node for node in graph.values() if node["class_type"] == "FastH3Sampler")
    sampler["inputs"]["vsa"] = ["vsa", 0]
    graph["vsa"] = {"class_type": "FastH3VSAConfig", "inputs": {
        "keep_rule": "contract", "sparsity": 0.9, "top_k": 1, "tile_size": "contract", "mode": "exempt",
        "dense_first_steps": 0, "dense_layers": "", "backend": "triton"}}  # fmt: skip
    (tmp_path / "g.json").write_text(json.dumps(graph))
    root, names = bundle
    given = {"FastH3LoadModel.model_name": names.model, "FastH3LoadModel.contract": "auto",
             "FastH3LoadVAE.video_vae": names.video_vae, "FastH3LoadVAE.audio_vae": names.audio_vae}
    flags = [part for name, value in given.items() for part in ("--set", f"{name}={value}")]
    assert command("run", tmp_path / "g.json", "--models", root / "models", "--input", root / "input",
                   "--output", tmp_path / "out", "--device", "cpu", *flags) == 1
    assert "backend 'triton' cannot run here" in capsys.readouterr().err


@pytest.mark.parametrize("device", ["toaster", "meta", "cuda:x", "cpu:7"])
@pytest.mark.parametrize("argv", [("run", demo.GRAPH), ("verify", "tests")])
def test_a_wrong_device_is_named(capsys, argv, device):
    assert command(*argv, "--device", device) == 1
    assert f"device='{device}': expected one of this machine's, " in capsys.readouterr().err


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator here")
def test_a_device_that_this_machine_lacks(capsys):
    assert command("verify", "tests", "--device", "cuda") == 1
    assert "device='cuda': expected one of this machine's, cpu." in capsys.readouterr().err


def test_an_output_folder_that_cannot_be_written_is_said_before_the_work(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert command("run", demo.GRAPH, "--output", tmp_path / "file" / "out") == 1
    error = capsys.readouterr().err
    assert "expected a folder that can be written" in error and f"See what {tmp_path / 'file'} is" in error


def test_trouble_with_files_is_one_line(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert command("demo", "--out", tmp_path / "file") == 1
    error = capsys.readouterr().err
    assert "comfyui-fasth3 demo: " in error and "Not a directory" in error and "Traceback" not in error


def test_a_disk_that_fills_while_weights_are_written_is_one_line(tmp_path, capsys, monkeypatch):
    def full(*_):
        raise SafetensorError("No space left on device")

    monkeypatch.setattr(demo_bundle, "write_bundle", full)
    assert command("demo", "--out", tmp_path / "demo") == 1
    assert capsys.readouterr().err == "comfyui-fasth3 demo: No space left on device\n"


def test_run_sends_stock_graphs_to_a_server(capsys):
    assert command("run", demo.GRAPH.with_name("fasth3_t2v_preview.json")) == 1
    assert "there is no CLIPLoader here" in capsys.readouterr().err


def test_file_nodes(tmp_path, capsys):
    (tmp_path / "in").mkdir()
    Image.new("RGB", (64, 32), (255, 0, 0)).save(tmp_path / "in" / "red.png")
    with wave.open(str(tmp_path / "in" / "tone.wav"), "wb") as file:
        file.setnchannels(2)
        file.setsampwidth(2)
        file.setframerate(32000)
        file.writeframes(b"\0\1" * 32000)
    graph = {
        "1": {"class_type": "LoadImage", "inputs": {"image": "red.png"}},
        "2": {"class_type": "LoadAudio", "inputs": {"audio": "tone.wav"}},
        "3": {"class_type": "SaveImage", "inputs": {"images": ["1", 0], "filename_prefix": "copy"}},
        "4": {"class_type": "FastH3SavePreview", "inputs": {
            "images": ["1", 0], "audio": ["2", 0], "filename_prefix": "film"}},
    }  # fmt: skip
    (tmp_path / "g.json").write_text(json.dumps(graph))
    assert command("run", tmp_path / "g.json", "--input", tmp_path / "in", "--output", tmp_path / "out") == 0
    assert Image.open(tmp_path / "out" / "copy_00001_.png").getpixel((5, 5)) == (255, 0, 0)
    assert (tmp_path / "out" / "film_00001_.mp4").is_file()


@pytest.mark.parametrize("written", [b"no sound", b"RIFF"])
def test_a_file_that_is_no_sound_is_one_line(tmp_path, capsys, written):
    (tmp_path / "tone.wav").write_bytes(written)
    Image.new("RGB", (64, 32)).save(tmp_path / "a.png")
    graph = {
        "1": {"class_type": "LoadImage", "inputs": {"image": "a.png"}},
        "2": {"class_type": "LoadAudio", "inputs": {"audio": "tone.wav"}},
        "3": {"class_type": "FastH3SavePreview", "inputs": {
            "images": ["1", 0], "audio": ["2", 0], "filename_prefix": "film"}},
    }  # fmt: skip
    (tmp_path / "g.json").write_text(json.dumps(graph))
    assert command("run", tmp_path / "g.json", "--input", tmp_path, "--output", tmp_path / "out") == 1
    assert "tone.wav cannot be read as a sound" in capsys.readouterr().err
