"""Mirrors nodes/offload.py, planning.py and _placing.py: weights kept where a setting and the machine say."""

from dataclasses import replace

import pytest
import torch
from comfyui_fasth3.fasth3_core import planning_fit
from comfyui_fasth3.fasth3_core.errors import ConfigError
from comfyui_fasth3.fasth3_core.weights import masters
from comfyui_fasth3.fasth3_core.weights.placement import GIB, Offload, Room
from comfyui_fasth3.nodes import _latents, _placing

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _tiny_weights_travel(monkeypatch):
    monkeypatch.setattr(masters, "SMALL", 512)


@pytest.fixture
def offload(run):
    def make(**changes):
        given = dict(policy="auto", device_gib=0.0, slots=2, resident_blocks=-1, pinned_gib=-1.0, after_run="keep")
        return run("FastH3Offload", **(given | changes)).args[0]

    return make


@pytest.fixture
def sampled(run, model, positive, latent):
    def sampled(offload=None, **changes):
        inputs = {"model": model, "positive": positive, "latent": latent, "seed": 3, "offload": offload}
        return run("FastH3Sampler", **(inputs | changes))

    return sampled


def video(output):
    return _latents.split(output.args[0])[0]


def test_widgets_are_the_settings(offload):
    assert offload() == Offload()
    given = dict(policy="mmap", device_gib=11.5, slots=3, resident_blocks=4, pinned_gib=0.0, after_run="free_all")
    assert offload(**given) == Offload(**given)


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"device_gib": -1.0}, "device_gib"), ({"pinned_gib": float("nan")}, "pinned_gib"), ({"slots": 1}, "slots"),
     ({"policy": "disk"}, "policy"), ({"after_run": "never"}, "after_run"), ({"resident_blocks": -2}, "resident")],
)  # fmt: skip
def test_settings_that_are_none(changes, message):
    with pytest.raises(ConfigError, match=message):
        Offload(**changes)


@pytest.mark.parametrize("policy", ["stream", "mmap"])
def test_graphs_with_and_without_in_turn(sampled, offload, model, policy):
    plain = sampled()
    for _ in range(2):
        output = sampled(offload(policy=policy))
        assert torch.equal(video(output), video(plain))
        assert output.args[1].weights["policy"] == policy
        assert policy != "mmap" or model.store.host_bytes() == 0
        assert torch.equal(video(sampled()), video(plain))
        assert model.store.placement.streamed == ()


def test_auto_on_a_cpu_is_resident_and_a_budget_streams(sampled, offload, model):
    sampled(offload())
    assert model.store.placement.streamed == ()
    sizes, wanted = model.store.sizes(CPU), 2 * max(model.store.sizes(CPU).blocks)
    budget = (sizes.top + wanted + GIB) / GIB
    report = sampled(offload(device_gib=budget)).args[1]
    assert report.memory["planned_bytes"] > 0
    assert model.store.sizes(CPU).device(model.store.placement) <= budget * GIB


@pytest.mark.parametrize("after_run", ["keep", "free_device", "free_all"])
def test_memory_after_the_run(sampled, offload, model, after_run):
    sampled(offload(policy="stream", after_run=after_run))
    assert (model.store.location is None) == (after_run != "keep")
    assert (model.store.host_bytes() == 0) == (after_run == "free_all")
    assert torch.equal(video(sampled(offload(policy="stream"))), video(sampled()))


def test_memory_is_given_back_when_a_run_fails(sampled, offload, model, host, monkeypatch):
    def stop():
        raise KeyboardInterrupt

    monkeypatch.setattr(host, "check_interrupt", stop)
    with pytest.raises(KeyboardInterrupt):
        sampled(offload(policy="stream", after_run="free_all"))
    assert model.store.location is None and model.store.host_bytes() == 0


def test_what_cannot_fit_is_refused_before_anything_is_read(sampled, offload, model):
    model.store.release()
    with pytest.raises(ConfigError, match=r"device memory=.*What would fit"):
        sampled(offload(policy="stream", device_gib=0.01))
    assert model.store.location is None


def room_of(given, monkeypatch, **changes):
    real = given.room
    monkeypatch.setattr(given, "room", lambda device: replace(real(device), **changes))


def test_auto_follows_what_is_free(sampled, offload, model, host, monkeypatch):
    sizes = model.store.sizes(CPU)
    everything = sizes.top + sum(sizes.blocks) + 2 * GIB
    room_of(host, monkeypatch, device=everything, host=64 * GIB)
    sampled(offload())
    assert model.store.placement.streamed == ()
    room_of(host, monkeypatch, device=everything, host=64 * GIB, spare_device=True)
    sampled(offload())
    assert len(model.store.placement.streamed) == len(sizes.blocks), "--lowvram"
    room_of(host, monkeypatch, device=everything, host=1, spare_device=True)
    model.store.forget()
    sampled(offload())
    assert model.store.placement.mapped, "no host memory for copies"
    with pytest.raises(ConfigError, match="Use policy 'mmap'"):
        sampled(offload(policy="stream"))


def test_fewer_tokens_a_pass_where_memory_is_short(sampled, offload, model, host, monkeypatch):
    monkeypatch.setattr(planning_fit, "PASSES", (40_960, 16, 8))
    monkeypatch.setattr(_placing, "PASSES", planning_fit.PASSES)
    plain = sampled()
    assert plain.args[1].memory["pass_rows"] == 40_960
    room_of(host, monkeypatch, device=1 << 20)  # without a setting it is the host that refuses
    short = sampled()
    assert short.args[1].memory["pass_rows"] == 8 and model.store.placement.streamed == ()
    torch.testing.assert_close(video(short), video(plain), rtol=0, atol=1e-5)
    room_of(host, monkeypatch, device=64 * GIB)
    assert sampled(offload()).args[1].memory["pass_rows"] == 40_960


def test_a_placement_stays_while_it_fits(sampled, offload, model, host, monkeypatch):
    room_of(host, monkeypatch, device=None, host=64 * GIB)
    sampled(offload(policy="stream", resident_blocks=1))
    first = model.store.placement
    sampled(offload(policy="stream", resident_blocks=1))
    assert model.store.placement is first


def planned(run, model, **changes):
    given = dict(width=64, height=64, seconds=0.2, aspect="custom", megapixels=0.0, text_tokens=20)
    return run("FastH3Plan", model=model, **(given | changes))


def test_plan_snaps_and_feeds_the_latent(run, model):
    model.store.forget()  # another test's run may have left it, for whoever loads the same files
    width, height, seconds, frames, text = planned(run, model, width=100, height=70, seconds=0.9).args
    assert (width, height, frames) == (96, 64, 22) and "96x64, 22 frames" in text
    latent, again = run("FastH3EmptyLatent", width=width, height=height, seconds=seconds).args
    assert again == frames and _latents.split(latent)[0].shape[-2:] == (4, 6)
    assert model.store.location is None, "nothing is read"


def test_plan_refuses_what_the_sampler_would(run, model, offload, host, monkeypatch):
    with pytest.raises(ConfigError, match="What would fit"):
        planned(run, model, offload=offload(policy="stream", device_gib=0.01))
    room_of(host, monkeypatch, device=1 << 20)
    with pytest.raises(ConfigError, match=r"FastH3 Offload|What would fit"):
        planned(run, model)


def test_plan_counts_what_the_sampler_reports(run, model, sampled, positive):
    report = sampled().args[1]
    text = planned(run, model, text_tokens=report.geometry["text_tokens"]).args[4]
    assert f"{report.geometry['tokens']:,} tokens" in text


def test_rooms_are_plain_numbers(host):
    room = host.room(CPU)
    assert isinstance(room, Room) and room.device is None and room.host > 0
