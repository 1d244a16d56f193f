"""Mirrors cli/doctor.py."""

import json

import torch
from comfyui_fasth3 import cli
from comfyui_fasth3.fasth3_core.media.formats import FORMATS


def command(*argv):
    return cli.main([str(part) for part in argv])


def test_doctor(capsys):
    assert command("doctor") == 0
    shown = capsys.readouterr().out
    assert "comfyui-fasth3 " in shown and "block_sparse_attention" in shown and "libx264 ok" in shown
    assert all(form.encoder in shown for form in FORMATS.values())


def test_doctor_json(capsys):
    assert command("doctor", "--json", "--dtype", "fp32") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["packages"]["torch"] == torch.__version__
    assert facts["kernels"]["dtype"] == "fp32"
    ops = {row["op"] for row in facts["kernels"]["rows"] if row["why_not"] is None}
    assert {"block_sparse_attention", "tile_mean"} <= ops


def test_doctor_asks_each_op_for_the_heads_that_it_gets(capsys):
    assert command("doctor", "--json") == 0
    rows = json.loads(capsys.readouterr().out)["kernels"]["rows"]
    assert len(rows) == len({(row["op"], row["backend"]) for row in rows})
    assert not [row for row in rows if "head dim" in str(row["why_not"])]
