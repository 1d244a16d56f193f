"""Mirrors fasth3_core/contracts.py and sampling/settings.py."""

import math

import pytest
from comfyui_fasth3.fasth3_core.config import DiTConfig, VSAConfig
from comfyui_fasth3.fasth3_core.contracts import CONTRACTS, Record, infer
from comfyui_fasth3.fasth3_core.errors import ConfigError, ContractError
from comfyui_fasth3.fasth3_core.model.handle import H3Model
from comfyui_fasth3.fasth3_core.sampling.schedule import explicit
from comfyui_fasth3.fasth3_core.sampling.settings import resolve

DIMS = dict(
    hidden_size=64, num_refiner_layers=2, num_heads=2, head_dim=32, ffn_dim=48, in_channels=24, audio_in_channels=32,
    text_dim=20, freq_dim=32, time_embed_hidden_dim=64, time_embed_dim=32, rope_freq_dim=4,
)


def config(*, num_layers=50, adaln="full", adaln_rank=None, has_gates=True, output_heads=1):
    return DiTConfig(**DIMS, num_layers=num_layers, adaln=adaln, adaln_rank=adaln_rank, has_gates=has_gates,
                     output_heads=output_heads)


def model(name, **kwargs):
    return H3Model(config(**kwargs), CONTRACTS[name], store=None, source="test")


@pytest.mark.parametrize(
    ("kwargs", "gates_zero", "name"),
    [
        (dict(has_gates=False), None, "base"),
        (dict(num_layers=42), True, "compact"),
        (dict(num_layers=42, adaln="rank", adaln_rank=16), False, "trim-8"),
        (dict(output_heads=32), False, "omniref-8"),
    ],
)
def test_auto_knows_from_the_tensors(kwargs, gates_zero, name):
    assert infer(config(**kwargs), gates_zero=gates_zero, recorded=None).name == name


def test_auto_asks_where_tensors_cannot_say():
    with pytest.raises(ContractError, match=r"'preview-4' .* or 'v2-8'"):
        infer(config(), gates_zero=False, recorded=None)


RECORD = {
    "model_id": "x", "dmd_denoising_steps": [999, 874, 749, 624, 500, 375, 250, 125], "num_inference_steps": 9,
    "video_scheduler_shift": 10.0, "audio_scheduler_shift": 3.0, "vsa_sparsity": 0.8, "vsa_tile_size": 64,
    "attention_backend": "VIDEO_SPARSE_ATTN_H3", "guidance_scale": 1.0,
}


def test_a_recorded_contract_is_taken():
    contract = infer(config(), gates_zero=False, recorded=Record(RECORD, "here"))
    assert (contract.name, contract.points, contract.shift_video, contract.sparsity) == ("v2-8", 9, 10.0, 0.8)
    other = RECORD | {"dmd_denoising_steps": [900, 500], "num_inference_steps": 3}
    own = infer(config(), gates_zero=False, recorded=Record(other, "here"))
    assert (own.name, own.rungs, own.default_grid) == ("recorded", (900, 500), "trained")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dmd_denoising_steps": []}, "no dmd_denoising_steps"),
        ({"dmd_denoising_steps": [500, 500]}, "fall strictly"),
        ({"dmd_denoising_steps": [999.5, 500]}, "whole numbers that fall strictly"),
        ({"dmd_denoising_steps": "999"}, "dmd_denoising_steps='999': expected whole numbers"),
        ({"num_inference_steps": 8}, "num_inference_steps=8: expected 9, one more than the rungs"),
        ({"num_inference_steps": "9"}, "num_inference_steps='9'"),
        ({"guidance_scale": 4.0}, "guidance_scale=4.0: expected 1"),
        ({"vsa_tile_size": 100}, r"vsa_tile_size=100: expected one of \[64, 128, 256\]"),
        ({"vsa_sparsity": float("nan")}, "vsa_sparsity=nan: expected 0 <= sparsity < 1"),
        ({"vsa_sparsity": [0.9]}, r"vsa_sparsity=\[0.9\]"),
        ({"video_scheduler_shift": 0}, "video_scheduler_shift=0: expected 0.01 or more. Choose the contract"),
        ({"audio_scheduler_shift": 1e-30}, "audio_scheduler_shift=1e-30: expected 0.01 or more. Choose the contract"),
        ({"audio_scheduler_shift": float("inf")}, "audio_scheduler_shift=inf: expected 0.01 or more"),
    ],
)
def test_bad_records_are_refused(change, message):
    with pytest.raises(ContractError, match=f"^here (says|has) .*{message}"):
        infer(config(), gates_zero=False, recorded=Record(RECORD | change, "here"))


def test_a_record_may_leave_fields_empty_and_have_one_rung():
    silent = {"vsa_tile_size": None, "video_scheduler_shift": None}
    single = {"dmd_denoising_steps": [999], "num_inference_steps": 2}
    contract = infer(config(), gates_zero=False, recorded=Record(RECORD | silent | single, "here"))
    assert (contract.rungs, contract.tile_size, contract.shift_video) == ((999,), 64, 12.0)


@pytest.mark.parametrize(
    ("name", "kwargs", "gates_zero", "message"),
    [
        ("preview-4", dict(has_gates=False), None, "has no to_gate_compress weights"),
        ("v2-8", {}, True, "every gate of the model is zero"),
        ("base", {}, False, "the model has trained VSA gates"),
        ("nonsense", {}, False, "contract='nonsense'"),
        ("preview-4", dict(output_heads=32), False, "has 1 output heads, the model 32"),
        ("omniref-8", {}, False, "has 32 output heads, the model 1"),
    ],
)
def test_a_named_contract_must_fit(name, kwargs, gates_zero, message):
    with pytest.raises((ContractError, ConfigError), match=message):
        infer(config(**kwargs), gates_zero=gates_zero, recorded=None, requested=name)


def test_contract_run_has_no_departures():
    for name, contract in CONTRACTS.items():
        settings = resolve(model(name, has_gates=contract.sparse, output_heads=max(1, contract.fine_steps)))
        assert settings.departures == ()
        assert settings.video.num_forwards == settings.audio.num_forwards == contract.points - 1
        assert (settings.vsa is None) == (not contract.sparse)
        if contract.fine_steps:  # every forward averages as many heads, and all are used
            assert settings.bank.per_forward * settings.video.num_forwards == contract.fine_steps
    preview = resolve(model("preview-4"))
    assert (preview.vsa.sparsity, preview.vsa.tile_size, preview.vsa.mode) == (0.9, 64, "exempt")


def test_every_departure_is_said():
    vsa = VSAConfig(keep_rule="sparsity", sparsity=0.5, tile_size=256, mode="compete", dense_first_steps=1,
                    dense_layers=(2,))
    settings = resolve(model("preview-4"), vsa, "trained", 10.0, 4.0, task="fl2va")
    assert [text.split(" instead")[0] for text in settings.departures] == [
        "trained grid", "shift_video 10", "shift_audio 4",
        "keyframes: FastH3 4-step students (Preview, v1, v1.1, v1.2) was distilled for t2va only", "sparsity 0.5",
        "tiles of 256 tokens", "mode 'compete'", "first 1 steps keep every tile", "blocks 2 keep every tile",
    ]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: resolve(model("base", has_gates=False), VSAConfig()), "no to_gate_compress weights"),
        (lambda: resolve(model("compact"), VSAConfig()), "all its gates are zero"),
        (lambda: resolve(model("base", has_gates=False), grid="trained"), "no published rungs"),
        (lambda: resolve(model("preview-4"), grid="karras"), "grid='karras'"),
        (lambda: resolve(model("omniref-8", output_heads=32), grid="trained"), "its heads belong to its own grid"),
        (lambda: resolve(model("preview-4"), shift_video=-1.0), "shift_video=-1.0"),
        (lambda: resolve(model("preview-4"), shift_audio=1e-30), "shift_audio=1e-30: expected 0.01 or more"),
        (lambda: resolve(model("preview-4"), shift_audio=float("nan")), "shift_audio=nan"),
        (lambda: resolve(model("preview-4"), shift_video=math.inf), "shift_video=inf"),
        (lambda: resolve(model("preview-4"), shift_audio=1e9), "shift_audio=1000000000.0: .*all 5 points.*Use 0 for 3"),
        (lambda: resolve(model("preview-4"), schedules=(explicit([1, 0.5, 0]), explicit([1, 0]))), "3 video and 2 "),
        (lambda: resolve(model("preview-4"), VSAConfig(dense_layers=(50,))), r"dense_layers=\[50\].*0 to 49"),
    ],
)
def test_settings_that_do_not_fit_the_contract(call, message):
    with pytest.raises((ContractError, ConfigError), match=message):
        call()
