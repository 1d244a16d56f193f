"""Mirrors nodes/sampling.py: the sampler node on a tiny model, and everything it refuses before it does any work."""

import pytest
import torch
from comfyui_fasth3.fasth3_core.config import VSAConfig
from comfyui_fasth3.fasth3_core.errors import ConfigError, ContractError, GeometryError
from comfyui_fasth3.fasth3_core.media import preview_budget
from comfyui_fasth3.fasth3_core.model.handle import H3Model
from comfyui_fasth3.fasth3_core.packing.layout import Keyframe
from comfyui_fasth3.fasth3_core.sampling.loop import sample
from comfyui_fasth3.fasth3_core.sampling.request import Request
from comfyui_fasth3.fasth3_core.vae.draft import DraftVAE
from comfyui_fasth3.nodes import _conditioning, _latents, _previews
from comfyui_fasth3.nodes._conditioning import Prompt
from comfyui_fasth3.nodes._host_standalone import StreamPair
from safetensors.torch import save_file


@pytest.fixture
def request_of(model, positive, latent):
    def make(**changes):
        return {"model": model, "positive": positive, "latent": latent, "seed": 3, **changes}

    return make


def tensors(output):
    return _latents.split(output.args[0])


def test_is_the_core_sampler_bit_for_bit(run, request_of, model, positive):
    output = run("FastH3Sampler", **request_of())
    prompt = _conditioning.read(positive)
    expected = sample(model, Request(
        text_states=prompt.text_states, token_tags=prompt.token_tags, latent_frames=2, latent_height=4,
        latent_width=4, audio_latents=8, seed=3,
    ), device="cpu")  # fmt: skip
    video, audio = tensors(output)
    assert torch.equal(video, expected.video) and torch.equal(audio, expected.audio)
    report = output.args[1]
    assert output.ui["text"] == (report.to_text(),)
    assert len(report.steps) == 4


def test_settings_reach_the_core(run, request_of):
    vsa = VSAConfig(keep_rule="sparsity", sparsity=0.5)
    report = run("FastH3Sampler", **request_of(vsa=vsa, grid="trained", shift_video=6.0)).args[1]
    assert any("sparsity 0.5" in text for text in report.departures)
    assert any("trained grid" in text for text in report.departures)
    assert any("shift_video 6" in text for text in report.departures)


def test_second_run_equals_the_first_and_seeds_differ(run, request_of, model):
    first, second, other = (run("FastH3Sampler", **request_of(seed=seed)) for seed in (3, 3, 4))
    assert all(torch.equal(a, b) for a, b in zip(tensors(first), tensors(second), strict=True))
    assert not torch.equal(tensors(first)[0], tensors(other)[0])
    reports = [output.args[1].to_dict() for output in (first, second)]
    for report in reports:
        report.pop("seconds")
        for step in report["steps"]:
            step.pop("seconds")
    assert reports[0] == reports[1]


def test_what_the_latent_holds_does_not_matter_and_is_said(run, request_of, latent):
    video, audio = _latents.split(latent)
    filled = _latents.join(torch.randn(video.shape), torch.randn(audio.shape))
    first, second = run("FastH3Sampler", **request_of()), run("FastH3Sampler", **request_of(latent=filled))
    assert torch.equal(tensors(first)[0], tensors(second)[0])
    assert [any("not empty" in w for w in out.args[1].warnings) for out in (first, second)] == [False, True]


def test_weights_stay_for_the_next_run(run, request_of, model):
    model.store.release()
    first, second = (run("FastH3Sampler", **request_of()).args[1] for _ in range(2))
    assert model.store.location == torch.device("cpu")
    assert first.seconds["load"] > second.seconds["load"], "the report counts the loading that the host does"


def keyframed(positive, *keyframes):
    prompt = _conditioning.read(positive)
    return _conditioning.write(Prompt(prompt.text_states, prompt.token_tags, keyframes))


def test_keyframes_run_and_are_reported_as_off_contract(run, request_of, positive):
    given = keyframed(positive, Keyframe(0, torch.randn(1, 24, 1, 4, 4)), Keyframe(4, None, torch.randn(1, 32, 2, 1)))
    report = run("FastH3Sampler", **request_of(positive=given)).args[1]
    assert report.geometry["task"] == "fl2va"
    assert any("keyframes" in text for text in report.departures)


# change of the request -> error, message. None of them may touch the weights.
BAD = {
    "encoder": (
        lambda r: {"positive": [[torch.zeros(1, 4, 5120), {}]]}, ContractError, "5120 wide, this model reads 64"),
    "video-only": (lambda r: {"latent": {"samples": torch.zeros(1, 24, 2, 4, 4)}}, ContractError, "one stream"),
    "batch": (lambda r: {"latent": {"samples": StreamPair(
        (torch.zeros(2, 24, 2, 4, 4), torch.zeros(2, 32, 2, 8)))}}, GeometryError, "batch of 2"),
    "two-prompts": (lambda r: {"positive": r["positive"] * 2}, ContractError, "2 entries"),
    "keyframe-size": (lambda r: {"positive": keyframed(r["positive"], Keyframe(0, torch.zeros(1, 24, 1, 6, 4)))},
                      GeometryError, "64 x 96 pixels for a video of 64 x 64"),
    "keyframe-place": (lambda r: {"positive": keyframed(r["positive"], Keyframe(5, torch.zeros(1, 24, 1, 4, 4)))},
                       GeometryError, "frame 5: the video has frames 0 to 4"),
    "grid": (lambda r: {"grid": "other"}, ConfigError, "grid='other'"),
    "shift": (lambda r: {"shift_video": -1.0}, ConfigError, "shift_video=-1.0"),
    "dense-layer": (lambda r: {"vsa": VSAConfig(dense_layers=(9,))}, ConfigError, r"dense_layers=\[9\]"),
    "offload": (lambda r: {"offload": object()}, ConfigError, "offload"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_request_touches_no_weights(run, request_of, model, name):
    change, error, message = BAD[name]
    model.store.release()
    given = request_of()
    with pytest.raises(error, match=message):
        run("FastH3Sampler", **given | change(given))
    assert model.store.location is None


def test_unknown_backend_says_which_there_are_and_touches_no_weights(run, request_of, model):
    model.store.release()
    with pytest.raises(Exception, match=r"backend 'nonsense' cannot run here.*eager, reference"):
        run("FastH3Sampler", **request_of(vsa=VSAConfig(backend="nonsense")))
    assert model.store.location is None


class Stop(BaseException):
    """As ComfyUI's InterruptProcessingException: not an Exception."""


def test_interrupt_inside_a_block_and_a_good_run_after(run, request_of, host, monkeypatch):
    calls = []

    def interrupt():
        calls.append(1)
        if len(calls) == 12:
            raise Stop

    expected = tensors(run("FastH3Sampler", **request_of()))
    monkeypatch.setattr(host, "check_interrupt", interrupt)
    with pytest.raises(Stop):
        run("FastH3Sampler", **request_of())
    monkeypatch.undo()
    assert torch.equal(tensors(run("FastH3Sampler", **request_of()))[0], expected[0])


def progress_of(host, monkeypatch, previews):
    shown = []
    monkeypatch.setattr(host, "progress", lambda total: lambda done, picture=None: shown.append((done, total, picture)))
    monkeypatch.setattr(host, "wants_preview", lambda: previews)
    monkeypatch.setattr(preview_budget, "SHARE", 1e9)  # steps of milliseconds: none would be due
    return shown


@pytest.mark.parametrize("previews", [True, False])
def test_bar_moves_once_a_step(run, request_of, host, monkeypatch, previews):
    shown = progress_of(host, monkeypatch, previews)
    run("FastH3Sampler", **request_of())
    assert [(done, total) for done, total, _ in shown] == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert all((picture is not None) == previews for *_, picture in shown)


def test_a_failing_preview_does_not_end_the_run(run, request_of, host, monkeypatch, caplog):
    shown = progress_of(host, monkeypatch, True)
    monkeypatch.setattr(_previews, "latent_preview", lambda latent, colours: 1 / 0)
    run("FastH3Sampler", **request_of())
    assert [picture for *_, picture in shown] == [None] * 4
    assert caplog.text.count("previews are off") == 1


def draft_weights(width=8):
    """A draft decoder of the released form, with few channels."""
    shapes = {"1": (width, 24, 3), "8": (width, width, 3), "14": (width, width, 3), "20": (width, width, 3),
              "22": (12, width, 3), "7.conv": (width, width, 1), "13.conv": (2 * width, width, 1),
              "19.conv": (2 * width, width, 1)}
    for block in (3, 4, 5, 9, 10, 11, 15, 16, 17):
        shapes |= {f"{block}.conv.0": (width, 2 * width, 3), f"{block}.conv.2": (width, width, 3),
                   f"{block}.conv.4": (width, width, 3)}
    return {f"decoder.{name}.weight": 0.1 * torch.randn(out, inp, k, k) for name, (out, inp, k) in shapes.items()}


@pytest.mark.parametrize("name, makes", [("taeh3.safetensors", "draft"), ("taeh3_bad.safetensors", "map")])
def test_previews_of_a_draft_decoder_if_there_is_one(run, request_of, host, folders, monkeypatch, caplog, name, makes):
    shown, made = progress_of(host, monkeypatch, True), []
    real = DraftVAE.decode
    monkeypatch.setattr(DraftVAE, "decode", lambda vae, latent: (made.append(latent.shape), real(vae, latent))[1])
    roots = host.model_roots
    approx = folders / "approx"
    approx.mkdir()
    monkeypatch.setattr(host, "model_roots", lambda kind: [approx] if kind == "vae_approx" else roots(kind))
    if makes == "draft":
        save_file(draft_weights(), approx / name)
    else:
        (approx / name).write_text("no weights")
    run("FastH3Sampler", **request_of())
    assert all(picture is not None for *_, picture in shown)
    assert len(made) == (1 + 2 * 4 if makes == "draft" else 0), "one before the steps, two latents in each of four"
    assert ("no previews from" in caplog.text) == (makes == "map")


def test_room_asked_for_grows_with_the_video(run, request_of, host, monkeypatch):
    asked = []
    real = host.acquire
    monkeypatch.setattr(host, "acquire", lambda store, device, working: (asked.append(working),
                                                                         real(store, device, working)))
    run("FastH3Sampler", **request_of())
    longer = run("FastH3EmptyLatent", width=96, height=64, seconds=0.9).args[0]
    run("FastH3Sampler", **request_of(latent=longer))
    assert 0 < asked[0] < asked[1]


def test_handle_is_immutable(model):
    assert isinstance(model, H3Model)
    with pytest.raises(AttributeError):
        model.contract = None
