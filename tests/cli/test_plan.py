"""Mirrors cli/plan.py."""

import json

from comfyui_fasth3.cli import main


def test_released_sizes(capsys):
    assert main(["plan", "--seconds", "5", "--text-tokens", "300"]) == 0
    out = capsys.readouterr().out
    assert "released sizes, contract preview-4, bfloat16" in out and "38,010 tokens" in out and "41.05 GiB" in out


def test_dtype_counts(capsys):
    for dtype, gigabytes in (("bf16", "41.05 GiB"), ("fp32", "82.10 GiB")):
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
        (["--contract", "quick"], "contract='quick'"),
        (["nowhere.safetensors"], "does not exist"),
    ):
        assert main(["plan", *arguments]) == 1
        assert message in capsys.readouterr().err
