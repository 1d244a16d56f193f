"""Mirrors cli/plan.py."""

import json

from comfyui_fasth3.cli import main


def test_released_sizes(capsys):
    assert main(["plan", "--seconds", "5", "--text-tokens", "300"]) == 0
    out = capsys.readouterr().out
    assert "released sizes, contract preview-4, bfloat16" in out and "38,010 tokens" in out and "weights 41.05" in out


def test_dtype_counts(capsys):
    for dtype, gigabytes in (("bf16", "weights 41.05"), ("fp32", "weights 82.10"), ("fp8", "weights 21.33")):
        assert main(["plan", "--dtype", dtype]) == 0
        assert gigabytes in capsys.readouterr().out


def test_json_and_another_contract(capsys):
    assert main(["plan", "--contract", "base", "--frames", "362", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["frames"], result["forwards"], result["tile_size"]) == (362, 49, None)


def test_bad_requests_are_one_line(capsys):
    for arguments, message in (
        (["--height", "720"], "Nearest: 704 or 736"),
        (["--frames", "120"], "Nearest: 107 or 124"),
        (["--width", "3200000000"], "at most 1,000,000"),
        (["--seconds", "1e300"], "more than 1,000,000 frames"),
        (["--text-tokens", "-4"], "expected at least 1"),
        (["--offload", "auto", "--device-gib", "4"], "What would fit: "),
        (["--device-gib", "nan"], "device_gib=nan"),
        (["--device-gib", "1e300"], "expected 0 to 1e9"),
        (["--contract", "quick"], "contract='quick'"),
        (["nowhere.safetensors"], "does not exist"),
    ):
        assert main(["plan", *arguments]) == 1
        assert message in capsys.readouterr().err


def test_offload_within_a_budget(capsys):
    assert main(["plan", "--offload", "mmap", "--device-gib", "12", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["weight_bytes"] + result["run"]["working"] <= 12 * 2**30 < result["peak_bytes"] * 1.2
    assert "streamed from a mapped file" in result["placement"]


def test_students_with_fewer_blocks(capsys):
    for contract, blocks in (("trim-8", 42), ("compact", 42), ("omniref-8", 50)):
        assert main(["plan", "--contract", contract]) == 0
        assert f"all {blocks} blocks resident" in capsys.readouterr().out
