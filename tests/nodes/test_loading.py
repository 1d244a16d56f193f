"""Mirrors nodes/loading.py, _paths.py and _vae_pair.py."""

import shutil

import pytest
import torch
from comfyui_fasth3.fasth3_core.errors import CheckpointError, ContractError
from comfyui_fasth3.nodes import _paths


def test_model_handle(run, bundle):
    output = run("FastH3LoadModel", model_name=bundle.names.model, contract="auto", dtype="auto")
    model = output.args[0]
    assert model.contract.name == "preview-4"
    assert model.config.has_gates
    assert model.store.location is None, "loading reads headers only"
    assert "preview-4" in output.ui["text"][0]


def test_sharded_folder_is_offered_by_its_name_without_its_shards(folders):
    names = _paths.weight_names([folders / "models" / "diffusion_models"])
    assert names == ["fasth3_demo/transformer", "h3_demo/transformer"]


def test_names_in_subfolders_and_of_single_files(tmp_path):
    for name in ("b.safetensors", "sub/a.SAFETENSORS", "sub/c.sft", "sub/notes.txt", "d.ckpt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert _paths.weight_names([tmp_path, tmp_path / "missing"]) == ["b.safetensors", "sub/a.SAFETENSORS", "sub/c.sft"]


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "a/../../secret.safetensors", ""])
def test_names_stay_inside_the_folders(tmp_path, name):
    root = tmp_path / "models"
    root.mkdir()
    (tmp_path / "secret.safetensors").touch()
    with pytest.raises(CheckpointError, match="not a name inside the model folders"):
        _paths.resolve([root], name)


def test_missing_file_names_the_folders(tmp_path):
    with pytest.raises(CheckpointError, match=f"'gone.safetensors' is in none of .*{tmp_path.name}"):
        _paths.resolve([tmp_path], "gone.safetensors")


def test_a_link_inside_the_folder_may_lead_outside(tmp_path):
    (tmp_path / "elsewhere.safetensors").touch()
    root = tmp_path / "models"
    root.mkdir()
    (root / "linked.safetensors").symlink_to(tmp_path / "elsewhere.safetensors")
    assert _paths.resolve([root], "linked.safetensors").exists()


def test_first_root_wins(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.safetensors").touch()
    assert _paths.resolve([tmp_path / "b", tmp_path / "a"], "x.safetensors") == tmp_path / "b" / "x.safetensors"


def test_fingerprint_changes_with_the_file(run, bundle, folders):
    from comfyui_fasth3.nodes.loading import FastH3LoadModel

    given = dict(model_name="fasth3_copy", contract="auto", dtype="auto")
    target = folders / "models" / "diffusion_models" / "fasth3_copy"
    shutil.copytree(folders / "models" / "diffusion_models" / bundle.names.model, target)
    try:
        before = FastH3LoadModel.fingerprint_inputs(**given)
        assert FastH3LoadModel.fingerprint_inputs(**given) == before
        (target / "config.json").write_text("{}")
        assert FastH3LoadModel.fingerprint_inputs(**given) != before
    finally:
        shutil.rmtree(target)


# the core's errors must come through as they are
def test_vae_file_as_a_model(run, folders, bundle):
    copied = folders / "models" / "diffusion_models" / "wrong.safetensors"
    shutil.copy(folders / "models" / "vae" / bundle.names.video_vae, copied)
    try:
        with pytest.raises(CheckpointError, match=r"this is the MiniMax-H3 video VAE.*belongs in FastH3 Load VAE"):
            run("FastH3LoadModel", model_name="wrong.safetensors", contract="auto", dtype="auto")
    finally:
        copied.unlink()


def test_vaes_the_wrong_way_round(run, bundle):
    with pytest.raises(CheckpointError, match="this is the MiniMax-H3 audio VAE"):
        run("FastH3LoadVAE", video_vae=bundle.names.audio_vae, audio_vae=bundle.names.video_vae, dtype="auto")


def test_truncated_vae(run, folders, bundle):
    cut = folders / "models" / "vae" / "cut.safetensors"
    cut.write_bytes((folders / "models" / "vae" / bundle.names.audio_vae).read_bytes()[:-100])
    try:
        with pytest.raises(CheckpointError, match="cut"):
            run("FastH3LoadVAE", video_vae=bundle.names.video_vae, audio_vae="cut.safetensors", dtype="auto")
    finally:
        cut.unlink()


def test_contract_that_does_not_fit(run, bundle):
    with pytest.raises(ContractError, match="trained VSA gates"):
        run("FastH3LoadModel", model_name=bundle.names.model, contract="base", dtype="auto")


def test_vae_pair_loads_and_lets_go(vae):
    cpu = torch.device("cpu")
    assert vae.location is None
    expected = vae.nbytes(cpu)
    vae.materialise(cpu)
    assert vae.location == cpu
    held = vae.video.nbytes + vae.audio.nbytes
    assert held == pytest.approx(expected, rel=0.05)
    first = vae.video
    vae.materialise(cpu)
    assert vae.video is first, "nothing is read twice"
    vae.release()
    assert vae.location is None


def test_vae_working_memory_grows_with_canvas_and_batch(vae):
    small, large = vae.working_bytes(0, 256, 256), vae.working_bytes(0, 768, 1344)
    assert small < large < vae.working_bytes(16, 768, 1344)


def test_a_contract_by_default_is_said(run, bundle):
    output = run("FastH3LoadModel", model_name=bundle.names.base_model, contract="auto", dtype="auto")
    assert output.args[0].contract.name == "base"
    assert "chosen by default: without gates and a record" in output.ui["text"][0]
    named = run("FastH3LoadModel", model_name=bundle.names.base_model, contract="base", dtype="auto")
    assert "default" not in named.ui["text"][0]
