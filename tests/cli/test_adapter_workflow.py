"""The shipped graph with an adapter, through `run`, on the demo's base model and adapter."""

import json
from pathlib import Path

import pytest
from comfyui_fasth3.cli import main
from comfyui_fasth3.cli.demo_bundle import write_bundle

GRAPH = Path(__file__).resolve().parents[2] / "workflows" / "api" / "fasth3_t2v_adapter.json"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    root = tmp_path_factory.mktemp("bundle")
    return root, write_bundle(root)


def arguments(bundle, *more: str) -> list[str]:
    root, names = bundle
    settings = [
        f"FastH3LoadModel.model_name={names.base_model}", f"FastH3ApplyAdapter.adapter_name={names.adapter}",
        f"FastH3LoadVAE.video_vae={names.video_vae}", f"FastH3LoadVAE.audio_vae={names.audio_vae}",
        "FastH3EmptyLatent.aspect=custom", "FastH3EmptyLatent.width=64", "FastH3EmptyLatent.height=64",
        "FastH3EmptyLatent.seconds=0.2", *more,
    ]
    folders = ("--models", str(root / "models"), "--input", str(root / "input"), "--output", str(root / "output"))
    return ["run", str(GRAPH), *folders, "--device", "cpu", *(word for s in settings for word in ("--set", s))]


def test_base_and_adapter_make_a_movie_of_the_student(bundle, capsys, caplog):
    import av

    with caplog.at_level("INFO", "fasth3"):
        assert main(arguments(bundle)) == 0
    path = Path(capsys.readouterr().out.strip().removeprefix("saved "))
    with av.open(str(path)) as movie:
        report = json.loads(movie.metadata["fasth3_report"])
        assert len(movie.streams.video) == len(movie.streams.audio) == 1
    assert report["model"]["adapters"][0]["created"] == 4
    assert "contract preview-4" in caplog.text and "tensors used" in caplog.text


def test_an_adapter_that_is_not_there_and_a_dense_contract(bundle, capsys):
    assert main(arguments(bundle, "FastH3ApplyAdapter.adapter_name=gone.safetensors")) == 1
    assert "adapter_name='gone.safetensors' is not one of" in capsys.readouterr().err
    assert main(arguments(bundle, "FastH3LoadModel.contract=preview-4-dense")) == 1
    assert "does not go with contract 'preview-4-dense'" in capsys.readouterr().err
