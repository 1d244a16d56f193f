"""Mirrors cli/verify.py and fasth3_core/selftest/: recorded truth passes, and altered truth does not."""

import json

import pytest
import torch
from comfyui_fasth3.cli import main
from comfyui_fasth3.fasth3_core.selftest.golden import Golden, Target
from comfyui_fasth3.fasth3_core.selftest.run import verify_file
from safetensors import safe_open
from safetensors.torch import save_file

FAST = ["dit_dense", "dit_keyframes", "dit_vsa", "dit_bf16", "dit_rank", "comfy_curve_adaln", "comfy_references",
        "int8_linear", "video_vae", "vsa_op"]


def copy(golden_dir, folder, name, alter=None, **metadata):
    """The recorded file under the same name. `alter` maps (tensor name, tensor) to another tensor, or to None, which
    leaves it out; so does None for an entry of the metadata."""
    with safe_open(golden_dir / f"{name}.safetensors", "pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  (not a dict)
        metadata = file.metadata() | metadata
    if alter is not None:
        tensors = {key: alter(key, tensor) for key, tensor in tensors.items()}
    tensors, metadata = ({k: v for k, v in held.items() if v is not None} for held in (tensors, metadata))
    save_file(tensors, folder / f"{name}.safetensors", metadata)


CASES = [(name, "fp32") for name in FAST] + [(name, "bf16") for name in FAST if name != "video_vae"]
"""Without the video VAE in bf16, whose products take half a minute on a CPU."""


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_recorded_truth_passes(golden_dir, tmp_path, capsys, name, dtype):
    copy(golden_dir, tmp_path, name)
    if name == "comfy_references":
        copy(golden_dir, tmp_path, "comfy_keyframes")
    assert main(["verify", str(tmp_path), "--device", "cpu", "--dtype", dtype]) == 0
    out = capsys.readouterr().out
    assert " 0 failed, " in out and "ok " in out


def test_the_sampler_and_the_grids_pass(golden_dir, tmp_path, capsys):
    for name in ("sampler_4_forward", "dit_vsa"):
        copy(golden_dir, tmp_path, name)
    (tmp_path / "sigmas.json").write_text((golden_dir / "sigmas.json").read_text())
    assert main(["verify", str(tmp_path), "--device", "cpu"]) == 0
    assert "step 3 audio" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "tensor"),
    [("dit_dense", "out2.video"), ("dit_vsa", "out1.audio"), ("comfy_curve_adaln", "out3.video"),
     ("int8_linear", "1.y"), ("video_vae", "decode1.pixels"), ("vsa_op", "5.out"), ("dit_keyframes", "position_ids")],
)
def test_one_percent_is_noticed(golden_dir, tmp_path, capsys, name, tensor):
    copy(golden_dir, tmp_path, name, lambda key, t: (t * 1.01).to(t.dtype) if key == tensor else t)
    assert main(["verify", str(tmp_path), "--device", "cpu", "--quiet"]) == 1
    assert "FAIL" in capsys.readouterr().out


def test_low_precision_is_held_to_twice_what_plain_torch_loses(golden_dir):
    golden = Golden(golden_dir / "vsa_op.safetensors")
    target = Target(torch.device("cpu"), torch.bfloat16)
    truth = golden.tensor("5.out")
    plain = truth.bfloat16()
    row = target.row(golden, "case", "max abs", plain, truth, 3e-6, plain=plain)
    assert row.status == "ok" and row.metric == "rel L2"
    assert target.row(golden, "case", "max abs", plain * 1.01, truth, 3e-6, plain=plain).status == "FAIL"
    assert target.row(golden, "case", "max abs", plain * float("nan"), truth, 3e-6, plain=plain).status == "FAIL"


def test_a_moved_tile_is_noticed(golden_dir, tmp_path, capsys):
    copy(golden_dir, tmp_path, "vsa_op", lambda key, t: t.flip(0) if key == "0.untile_index" else t)
    assert main(["verify", str(tmp_path), "--device", "cpu", "--quiet"]) == 1
    assert "untile" in capsys.readouterr().out


def test_what_nothing_ran_is_not_a_pass(golden_dir, tmp_path, capsys):
    copy(golden_dir, tmp_path, "vsa_op")
    assert main(["verify", str(tmp_path), "--device", "cpu", "--backend", "sage"]) == 1
    out = capsys.readouterr().out
    assert "nothing ran" in out and "backend 'sage' cannot run here" in out


@pytest.mark.parametrize(
    ("name", "alter", "metadata", "message"),
    [
        ("dit_dense", lambda key, t: None if key == "out1.audio" else t, {}, "lacks the tensor 'out1.audio'"),
        ("dit_dense", None, {"sigmas": None}, "lacks the metadata 'sigmas'"),
        ("dit_dense", lambda key, t: t[..., :1].clone() if key == "out0.video" else t, {},
         "[1, 24, 12, 8, 12] where [1, 24, 12, 8, 1] was recorded"),
        ("sampler_4_forward", None, {}, "dit_vsa.safetensors cannot be read"),
    ],
)  # fmt: skip
def test_an_incomplete_file_is_said_and_does_not_hide_the_next(
    golden_dir, tmp_path, capsys, name, alter, metadata, message
):
    copy(golden_dir, tmp_path, name, alter, **metadata)
    copy(golden_dir, tmp_path, "vsa_op")
    assert main(["verify", str(tmp_path), "--device", "cpu"]) == 1
    out = capsys.readouterr().out
    assert message in out and "ok   vsa_op" in out


@pytest.mark.parametrize("grid", ["shift12_n", "shift12_rungs_other", "n5"])
def test_unknown_grids_are_named(tmp_path, capsys, grid):
    (tmp_path / "sigmas.json").write_text(json.dumps({grid: [1.0, 0.0]}))
    assert main(["verify", str(tmp_path), "--device", "cpu"]) == 1
    assert f"{grid!r} is no grid" in capsys.readouterr().out


def test_metadata_of_other_writers_and_a_kind_in_the_name_alone(golden_dir, tmp_path):
    copy(golden_dir, tmp_path, "comfy_dense", kind=None, format="pt")
    assert main(["verify", str(tmp_path), "--device", "cpu"]) == 0


def test_sparse_attention_without_gates_is_the_fine_branch_alone(golden_dir, tmp_path):
    """Which is what gates of zeros make it."""
    def silence(key, t):
        return torch.zeros_like(t) if "to_gate_compress" in key else t

    copy(golden_dir, tmp_path, "dit_vsa", silence)
    target = Target(torch.device("cpu"), torch.float32, ("reference",))
    silent = [row.error for row in verify_file(tmp_path / "dit_vsa.safetensors", target)]
    copy(golden_dir, tmp_path, "dit_vsa", lambda key, t: None if "to_gate_compress" in key else t)
    errors = [row.error for row in verify_file(tmp_path / "dit_vsa.safetensors", target)]
    assert errors == pytest.approx(silent, rel=1e-5)  # a sum taken in another order on another machine


def test_bad_folders_and_files(tmp_path, capsys):
    assert main(["verify", str(tmp_path)]) == 1
    assert "holds no recorded files" in capsys.readouterr().err
    save_file({"a": torch.zeros(1)}, tmp_path / "odd.safetensors", {"kind": '"odd"'})
    assert main(["verify", str(tmp_path), "--device", "cpu"]) == 1
    assert "is of kind 'odd'" in capsys.readouterr().out
    (tmp_path / "odd.safetensors").write_bytes(b"")
    assert main(["verify", str(tmp_path), "--device", "cpu"]) == 1
    assert "cannot be read" in capsys.readouterr().out
