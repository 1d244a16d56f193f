"""Mirrors fasth3_core/media/latent_file.py: both streams bit for bit, and a plain error for anything else."""

import pytest
import torch
from comfyui_fasth3.fasth3_core.errors import CheckpointError
from comfyui_fasth3.fasth3_core.media import latent_file
from comfyui_fasth3.fasth3_core.report.run_report import RunReport, StepReport
from safetensors.torch import save_file

REPORT = RunReport(contract={"name": "preview-4"}, warnings=["ü"], steps=[StepReport(0, 1.0, 1.0, 4, 0, 2, 0.1)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_round_trip(tmp_path, dtype):
    path = tmp_path / "Füchsin 狐.latent.safetensors"
    video, audio = torch.randn(1, 24, 7, 4, 6).to(dtype), torch.randn(1, 32, 2, 37).to(dtype)
    video[0, 0, 0, 0, 0] = float("nan")
    latent_file.save(path, video.transpose(3, 4), audio, REPORT)
    again = latent_file.load(path)
    assert again[0].dtype == dtype
    torch.testing.assert_close(again[0], video.transpose(3, 4), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(again[1], audio)
    assert again[2] == REPORT


def test_without_report(tmp_path):
    latent_file.save(tmp_path / "a", torch.zeros(1), torch.zeros(1))
    assert latent_file.load(tmp_path / "a")[2] is None


def test_a_report_of_another_version(tmp_path):
    metadata = {"format": latent_file.FORMAT, "report": '{"schema": "fasth3-run-1", "steps": [{"index": 0}]}'}
    save_file({"video": torch.zeros(1), "audio": torch.zeros(1)}, tmp_path / "a", metadata=metadata)
    with pytest.raises(CheckpointError, match="its report cannot be read"):
        latent_file.load(tmp_path / "a")
    metadata["report"] = '{"schema": "fasth3-run-1", "novelty": 1}'
    save_file({"video": torch.zeros(1), "audio": torch.zeros(1)}, tmp_path / "a", metadata=metadata)
    assert latent_file.load(tmp_path / "a")[2].schema == "fasth3-run-1"


@pytest.mark.parametrize("report", ['{"steps": [1]}', "[1]", "[" * 100_000, '{"warnings": 5}',
                                    '{"token_ops": [{}]}', '{"attention": 1}'])
def test_a_report_that_is_none(tmp_path, report):
    save_file({"video": torch.zeros(1), "audio": torch.zeros(1)}, tmp_path / "a",
              metadata={"format": latent_file.FORMAT, "report": report})  # fmt: skip
    with pytest.raises(CheckpointError, match="its report cannot be read"):
        latent_file.load(tmp_path / "a")


def test_not_a_latent(tmp_path):
    path = tmp_path / "a"
    latent_file.save(path, torch.zeros(99), torch.zeros(9))
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(CheckpointError, match="cut short"):
        latent_file.load(path)
    path.write_text("no")
    with pytest.raises(CheckpointError, match="cannot be read"):
        latent_file.load(path)
    save_file({"video": torch.zeros(1)}, path, metadata={"format": "fasth3-prompt-1"})
    with pytest.raises(CheckpointError, match="fasth3-prompt-1 instead of fasth3-latent-1"):
        latent_file.load(path)
