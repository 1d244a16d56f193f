"""Mirrors fasth3_core/sampling/: requests, noise, and the whole loop on a tiny transformer."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from comfyui_fasth3.fasth3_core.config import VSAConfig
from comfyui_fasth3.fasth3_core.contracts import CONTRACTS
from comfyui_fasth3.fasth3_core.errors import ContractError, FastH3Error, GeometryError, Interrupted
from comfyui_fasth3.fasth3_core.model.handle import H3Model
from comfyui_fasth3.fasth3_core.packing.layout import Keyframe, Reference
from comfyui_fasth3.fasth3_core.packing.rows import patchify
from comfyui_fasth3.fasth3_core.sampling.loop import sample
from comfyui_fasth3.fasth3_core.sampling.noise import Condition, draw
from comfyui_fasth3.fasth3_core.sampling.request import Request
from comfyui_fasth3.fasth3_core.sampling.settings import resolve
from comfyui_fasth3.fasth3_core.weights.tensors import TensorStore
from comfyui_fasth3.kernels.registry import BackendUnavailable

from .tiny import TEXT_DIM, tiny_store, tiny_tensors


def request(**changes) -> Request:
    base = Request(
        text_states=torch.randn(1, 6, TEXT_DIM, generator=torch.Generator().manual_seed(1)),
        latent_frames=7, latent_height=8, latent_width=12, audio_latents=37, seed=3,
    )
    return replace(base, **changes)


def model(contract="preview-4", **kwargs) -> H3Model:
    store = tiny_store(**kwargs)
    return H3Model(store.config, CONTRACTS[contract], store, "tiny")


def run(m=None, r=None, **kwargs):
    return sample(m or model(), r or request(), device="cpu", **kwargs)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(text_states=torch.zeros(2, 6, TEXT_DIM)), "Batch is 1 only"),
        (dict(text_states=torch.zeros(1, 0, TEXT_DIM)), "the prompt has no tokens"),
        (dict(text_states=torch.zeros(1, 6, 33)), "33 wide, the model reads 20.*Qwen3-VL-32B"),
        (dict(token_tags=torch.ones(5, dtype=torch.int64)), "5 token tags for 6 prompt tokens"),
        (dict(latent_height=9), "192 x 144 pixels: width and height must be multiples of 32"),
        (dict(latent_height=0), "192 x 0 pixels: width and height"),
        (dict(latent_frames=8), "8 latent frames.*Nearest: 7 or 12"),
        (dict(audio_latents=36), "36 audio latents for 22 frames: 0.917 s of sound has 37"),
        (dict(keyframes=[Keyframe(0, torch.zeros(1, 24, 1, 8, 8))]), "128 x 128 pixels for a video of 192 x 128"),
        (dict(keyframes=[Keyframe(0, torch.zeros(2, 24, 1, 8, 12))]), r"\[2, 24, 1, 8, 12\]: expected \[1, 24, t"),
        (dict(references=[Reference("image", torch.zeros(1, 16, 1, 4, 4))]), r"expected \[1, 24, t, h, w\]"),
        (dict(references=[Reference("audio", None, torch.zeros(2, 32, 2, 4))]), r"expected \[1, 32, 2, a\]"),
        (dict(references=[Reference("audio", None, torch.zeros(1, 32, 2, 0))]), r"expected \[1, 32, 2, a\]"),
        (dict(noise=(torch.zeros(1, 24, 7, 8, 10), torch.zeros(1, 32, 2, 37))), r"expected \[1, 24, 7, 8, 12\]"),
        (dict(text_states=torch.full((1, 6, TEXT_DIM), torch.nan)), "prompt states: there is NaN or infinity in it"),
        (dict(keyframes=[Keyframe(0, torch.full((1, 24, 1, 8, 12), torch.inf))]), "latent: there is NaN or infinity"),
        (dict(keyframes=[Keyframe(22, torch.zeros(1, 24, 1, 8, 12))]), "frames 0 to 21"),
    ],
)
def test_bad_requests_are_refused_before_any_weight_is_read(change, message):
    m = model()

    def untouched(*args, **kwargs):
        raise AssertionError("weights were touched")

    m.store.materialise = untouched
    with pytest.raises((ContractError, GeometryError), match=message):
        run(m, request(**change))


def test_noise_is_drawn_in_the_reference_order():
    first, second = torch.randn(2, 1, 24, 1, 4, 4)
    sound = torch.randn(1, 32, 2, 3)
    conditions = [Condition(first, True), Condition(sound, False), Condition(second, True)]
    drawn = draw(7, (1, 24, 2, 4, 4), (16, 32), conditions, "fastvideo")
    generator = torch.Generator().manual_seed(7)
    t = torch.tensor(0.999)
    for latent, rows in ((first, drawn.condition_rows[0]), (second, drawn.condition_rows[2])):
        noise = torch.randn(latent.shape, generator=generator)
        assert torch.equal(rows, patchify(t * latent + (1 - t) * noise))
    assert torch.equal(drawn.video, torch.randn(1, 24, 2, 4, 4, generator=generator))
    assert torch.equal(drawn.audio_rows, torch.randn(16, 32, generator=generator))


def test_condition_noise_rules():
    latents = [Condition(torch.randn(1, 24, 1, 4, 4), True)] * 2
    comfy = draw(7, (1, 24, 2, 4, 4), (16, 32), latents, "comfy")
    assert torch.equal(comfy.condition_rows[0], comfy.condition_rows[1])  # the seed restarts for each
    clean = draw(7, (1, 24, 2, 4, 4), (16, 32), latents, "none")
    assert torch.equal(clean.condition_rows[0], patchify(latents[0].latent)) and clean.condition_time == 1.0
    with pytest.raises(FastH3Error, match="condition_noise='some'"):
        draw(7, (1, 24, 2, 4, 4), (16, 32), latents, "some")


def test_same_seed_same_bits_twice():
    a, b = run(), run()
    assert torch.equal(a.video, b.video) and torch.equal(a.audio, b.audio)
    assert not torch.equal(run(r=request(seed=4)).video, a.video)


def test_same_seed_same_bits_in_another_process(tmp_path):
    root = Path(__file__).resolve().parents[2]
    code = f"""
import importlib.util, runpy, sys, torch
sys.path.insert(0, r"{root / 'tests'}")
import conftest
sys.path.insert(0, r"{root}")
from tests.core import test_sampling as t
out = t.run()
torch.save((out.video, out.audio), r"{tmp_path / 'out.pt'}")
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)
    video, audio = torch.load(tmp_path / "out.pt")
    here = run()
    assert torch.equal(video, here.video) and torch.equal(audio, here.audio)


def test_tile_order_is_only_an_order():
    """At sparsity 0 a model with silent gates equals the dense one on the packed order."""
    tensors = tiny_tensors()
    silent = {name: torch.zeros_like(t) if "gate_compress" in name else t for name, t in tensors.items()}
    gated, plain = TensorStore(silent), TensorStore({n: t for n, t in tensors.items() if "gate_compress" not in n})
    dense = sample(H3Model(plain.config, CONTRACTS["preview-4-dense"], plain, "t"), request(), device="cpu")
    keep_all = VSAConfig(keep_rule="sparsity", sparsity=0.0)
    sparse = sample(H3Model(gated.config, CONTRACTS["preview-4"], gated, "t"), request(), device="cpu", vsa=keep_all)
    torch.testing.assert_close(sparse.video, dense.video, rtol=0, atol=2e-5)
    torch.testing.assert_close(sparse.audio, dense.audio, rtol=0, atol=2e-5)


def test_gates_count_even_when_every_tile_is_kept():
    keep_all = VSAConfig(keep_rule="sparsity", sparsity=0.0)
    m = model()
    tensors = {n: t for n, t in tiny_tensors().items() if "gate_compress" not in n}
    plain = TensorStore(tensors)
    dense = sample(H3Model(plain.config, CONTRACTS["preview-4-dense"], plain, "t"), request(), device="cpu")
    assert (run(m, vsa=keep_all).video - dense.video).abs().max() > 1e-2


@pytest.mark.parametrize("contract", ["preview-4", "v2-8"])
def test_report_says_what_ran(contract):
    out = run(model(contract, num_layers=3), request(), vsa=VSAConfig(tile_size=64, dense_layers=(1,)))
    report = out.report
    forwards = CONTRACTS[contract].points - 1
    assert [s.index for s in report.steps] == list(range(forwards))
    tiles = report.attention["video_tiles"]
    kept = report.steps[0].kept_tiles
    assert (tiles, kept) == (4, 1)
    assert all((s.sparse_blocks, s.dense_blocks) == (2, 1) for s in report.steps)
    assert report.departures == ["blocks 1 keep every tile"]
    assert report.environment["device"] == "cpu" and report.environment["torch"] == torch.__version__
    text = report.to_text()
    assert f"{2 * forwards} of {3 * forwards} block calls sparse" in text
    assert f"{kept} of {tiles} video tiles kept" in text and "blocks 1 keep every tile" in text
    assert report.to_dict()["geometry"]["tokens"] == 6 + 74 + 7 * 4 * 6
    assert "22 frames: the model was trained on 124 to 362" in report.warnings[0]


def test_every_departure_of_a_request_is_reported():
    assert run().report.departures == []
    keyframe = Keyframe(0, torch.zeros(1, 24, 1, 8, 12))
    noise = torch.randn(1, 24, 7, 8, 12), torch.randn(1, 32, 2, 37)
    report = run(r=request(keyframes=[keyframe], condition_noise="none", noise=noise)).report
    assert report.departures[1:] == [
        "condition noise 'none' instead of 'fastvideo'", "the text encoder has not seen the pictures",
        "starting noise given instead of drawn from the seed",
    ]
    shown = run(r=request(keyframes=[keyframe], token_tags=torch.tensor([1, 0, 0, 0, 1, 1]))).report
    assert len(shown.departures) == 1 and "keyframes" in shown.departures[0]


@pytest.mark.parametrize(
    ("name", "where"),
    [("blocks.0.mlp.fc2.weight", "first in block 0"), ("blocks.1.attn.out_proj.weight", "first in block 1")],
)
def test_the_block_where_values_leave_the_range_is_named(name, where):
    tensors = tiny_tensors()
    tensors[name] = torch.full_like(tensors[name], torch.inf)
    store = TensorStore(tensors)
    with pytest.raises(FastH3Error, match=f"forward 1 returned NaN or infinity .*{where}, in float32"):
        run(H3Model(store.config, CONTRACTS["preview-4"], store, "tiny"))


def test_fp16_runs_with_a_warning_when_it_is_named():
    assert any(text.startswith("fp16: the residual") for text in run(model(dtype=torch.float16)).report.warnings)
    assert not any("fp16" in text for text in run().report.warnings)


def test_steps_are_reported_with_clean_estimates():
    seen = []
    out = run(on_step=lambda i, n, video, audio: seen.append((i, n, video.clone(), audio.clone())))
    assert [(i, n) for i, n, *_ in seen] == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert torch.equal(seen[-1][2], out.video) and torch.equal(seen[-1][3], out.audio)


def test_interrupt_within_a_forward_and_then_a_good_run():
    m = model()
    calls = 0

    def stop():
        nonlocal calls
        calls += 1
        if calls == 7:
            raise Interrupted

    with pytest.raises(Interrupted):
        run(m, check_interrupt=stop)
    good = run(m)
    assert torch.equal(good.video, run().video)


def test_given_noise_replaces_the_seed():
    noise = torch.randn(1, 24, 7, 8, 12), torch.randn(1, 32, 2, 37)
    a, b = run(r=request(noise=noise, seed=1)), run(r=request(noise=noise, seed=2))
    assert torch.equal(a.video, b.video) and torch.equal(a.audio, b.audio)


def test_keyframes_and_references_change_the_result_and_are_said():
    keyframe = Keyframe(0, torch.randn(1, 24, 1, 8, 12))
    reference = Reference("image", torch.randn(1, 24, 1, 4, 6))
    plain = run()
    for changes, word in ((dict(keyframes=[keyframe]), "keyframes"), (dict(references=[reference]), "references")):
        out = run(r=request(**changes))
        assert (out.video - plain.video).abs().max() > 1e-3
        assert out.report.departures[0].startswith(word)


def test_head_bank_runs_as_its_own_average():
    """A bank whose heads are all the same is the single-head student on the bank's grid."""
    bank, single = tiny_tensors(output_heads=32), tiny_tensors()
    for name in ("final_layer.video_out", "final_layer.audio_out"):
        for leaf in ("weight", "bias"):
            head = single[f"{name}.{leaf}"]
            rest = torch.zeros(31 * head.shape[0], *head.shape[1:])
            bank[f"{name}.{leaf}"] = torch.cat([head, rest])  # the differences to head 0
    omni = H3Model(TensorStore(bank).config, CONTRACTS["omniref-8"], TensorStore(bank), "bank")
    shown = torch.tensor([1, 0, 0, 0, 1, 1])
    out = run(omni, request(references=[Reference("image", torch.randn(1, 24, 1, 4, 6))], token_tags=shown))
    assert len(out.report.steps) == 8 and out.report.departures == []
    settings = resolve(omni)
    plain = H3Model(TensorStore(single).config, CONTRACTS["preview-4"], TensorStore(single), "single")
    other = sample(plain, request(), device="cpu", schedules=(settings.video, settings.audio),
                   vsa=VSAConfig(tile_size=128))
    torch.testing.assert_close(run(omni).video, other.video, rtol=0, atol=2e-5)


@pytest.mark.parametrize(("heads", "segments"), [(32, (6, 6, 10, 4, 74)), (1, (6, 10, 84))])
def test_head_bank_tiles_every_condition_on_its_own(heads, segments):
    """Text, two pictures with a sound between them, audio; every other student tiles text, pictures and sound."""
    store = tiny_store(output_heads=heads)
    student = H3Model(store.config, CONTRACTS["omniref-8" if heads > 1 else "preview-4"], store, "student")
    pictures = [Reference("image", torch.randn(1, 24, 1, 4, width)) for width in (6, 4)]
    given = [pictures[0], Reference("audio", None, torch.randn(1, 32, 2, 5)), pictures[1]]
    seen = set()

    def attend(q, k, v, gate, *, plan, **rest):
        seen.add(plan.segments)
        return v

    run(student, request(references=given, token_tags=torch.ones(6, dtype=torch.int64)), attend=attend)
    assert seen == {segments}


def test_head_bank_refuses_reference_videos_before_the_weights():
    store = tiny_store(output_heads=32)
    omni = H3Model(store.config, CONTRACTS["omniref-8"], store, "bank")
    with pytest.raises(ContractError, match="every reference video as a region of its own"):
        run(omni, request(references=[Reference("video", torch.randn(1, 24, 2, 4, 6))]))


def test_values_that_are_not_finite_stop_the_run():
    m = model()
    m.store.top()["final_layer.audio_out.bias"].fill_(float("nan"))
    with pytest.raises(FastH3Error, match="infinity in the audio stream, after the last block, in float32"):
        run(m)


def test_named_backend_that_cannot_run_is_refused_before_the_weights():
    m = model()
    m.store.materialise = None
    with pytest.raises(BackendUnavailable, match="'sage'"):
        run(m, vsa=VSAConfig(backend="sage"))
