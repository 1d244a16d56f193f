"""Mirrors nodes/latents.py: a latent saved and loaded is the latent, with its report; and what is refused."""

import os

import pytest
import torch
from comfyui_fasth3.fasth3_core.errors import CheckpointError, ConfigError, GeometryError
from comfyui_fasth3.fasth3_core.media import latent_file
from comfyui_fasth3.nodes import _latents
from comfyui_fasth3.nodes.latents import FastH3LoadLatent, FastH3SaveLatent


def test_round_trip_of_a_run(run, model, positive, latent, vae):
    sampled, report = run("FastH3Sampler", model=model, positive=positive, latent=latent, seed=3).args
    ui = run("FastH3SaveLatent", latent=sampled, filename_prefix="latents/狐", report=report).ui
    assert ui["text"][0] == "狐_00001_.latent.safetensors: 64x64, 5 frames"
    assert ui["latents"] == [
        {"filename": "狐_00001_.latent.safetensors", "subfolder": "latents", "type": "output"}
    ]  # what `run` and `submit` go by
    choice = "latents/狐_00001_.latent.safetensors [output]"
    options = FastH3LoadLatent.define_schema().inputs[0].options
    assert options == [choice]
    again, told = run("FastH3LoadLatent", file=choice).args
    assert told == report
    assert all(torch.equal(a, b) for a, b in zip(_latents.split(again), _latents.split(sampled), strict=True))
    images = [run("FastH3Decode", vae=vae, latent=which).args[0] for which in (sampled, again)]
    assert torch.equal(*images)


def test_from_the_input_folder(run, latent, folders):
    latent_file.save(folders / "input" / "a.latent.safetensors", *_latents.split(latent))
    again, report = run("FastH3LoadLatent", file="a.latent.safetensors").args
    assert report is None and _latents.split(again)[0].shape == (1, 24, 2, 4, 4)


def test_a_replaced_file_is_loaded_again(latent, host, folders):
    path = folders / "input" / "a.latent.safetensors"
    latent_file.save(path, *_latents.split(latent))
    before = FastH3LoadLatent.fingerprint_inputs("a.latent.safetensors")
    latent_file.save(path, *(stream + 1 for stream in _latents.split(latent)))
    os.utime(path, (1, 1))
    assert FastH3LoadLatent.fingerprint_inputs("a.latent.safetensors") != before


@pytest.mark.parametrize("name", ["../models/x.latent.safetensors", "/etc/passwd", "../../x [output]", "absent"])
def test_names_outside_and_of_nothing(run, name):
    with pytest.raises(CheckpointError, match=r"not a name inside|does not exist"):
        run("FastH3LoadLatent", file=name)


def test_streams_that_do_not_belong_together(run, folders):
    latent_file.save(folders / "input" / "a.latent.safetensors", torch.zeros(1, 24, 7, 4, 4), torch.zeros(1, 32, 2, 9))
    with pytest.raises(GeometryError, match="but there are 9"):
        run("FastH3LoadLatent", file="a.latent.safetensors")


def test_bad_prefix(run, latent, host):
    with pytest.raises(ConfigError, match="inside the output folder"):
        run("FastH3SaveLatent", latent=latent, filename_prefix="../a")
    assert "inside the output folder" in FastH3SaveLatent.validate_inputs(filename_prefix="../a")
    assert FastH3SaveLatent.validate_inputs(filename_prefix="a/b") is True
