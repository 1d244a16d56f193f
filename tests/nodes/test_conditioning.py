"""Mirrors nodes/_conditioning.py: what other nodes may hand over, and one clear error for what they may not."""

import pytest
import torch
from comfyui_fasth3.fasth3_core.errors import ContractError, GeometryError
from comfyui_fasth3.nodes import _conditioning as conditioning

WIDTH = 64
STATES = torch.zeros(1, 6, WIDTH)
TAGS = torch.tensor([1, 0, 0, 0, 1, 1])
PICTURE = torch.zeros(1, 24, 1, 4, 6)
SOUND = torch.zeros(1, 32, 2, 8)


def entry(states=STATES, **extra):
    return [[states, {"pooled_output": None, **extra}]]


def test_plain_text():
    prompt = conditioning.read(entry(minimax_token_tags=TAGS), WIDTH)
    assert prompt.text_states is STATES
    assert torch.equal(prompt.token_tags, TAGS)
    assert (prompt.keyframes, prompt.references) == ((), ())


@pytest.mark.parametrize("tags", [TAGS[None], TAGS.int(), TAGS.tolist()], ids=["batched", "int32", "list"])
def test_tags_in_every_form(tags):
    assert torch.equal(conditioning.read(entry(minimax_token_tags=tags)).token_tags, TAGS)


def test_text_without_tags_is_all_text():
    assert torch.equal(conditioning.read(entry()).token_tags, torch.ones(6, dtype=torch.int64))


def test_keyframes_as_the_stock_nodes_write_them():
    frames = [
        {"resolved_frame_index": 0, "latent": PICTURE},
        {"resolved_frame_index": 21, "audio_latent": SOUND},
        {"resolved_frame_index": 4, "latent": PICTURE, "audio_latent": SOUND},
    ]
    prompt = conditioning.read(entry(minimax_token_tags=TAGS, minimax_keyframes=frames))
    assert [k.frame for k in prompt.keyframes] == [0, 21, 4]
    assert prompt.keyframes[0].latent is PICTURE and prompt.keyframes[0].audio_latent is None
    assert prompt.keyframes[1].latent is None and prompt.keyframes[1].audio_latent is SOUND


def test_references_as_the_stock_node_writes_them():
    clip = torch.zeros(1, 24, 2, 4, 4)
    blocks = [
        {"kind": "image", "latent_h": 4, "latent_w": 6, "latent": PICTURE},
        {"kind": "video", "latent_t": 2, "latent_h": 4, "latent_w": 4, "ref_audio_t": 0, "latent": clip,
         "audio_latent": None},
        {"kind": "video_audio", "latent_t": 2, "latent_h": 4, "latent_w": 4, "ref_audio_t": 8, "latent": clip,
         "audio_latent": SOUND},
        {"kind": "audio", "ref_audio_t": 8, "audio_latent": SOUND},
    ]
    prompt = conditioning.read(entry(minimax_token_tags=TAGS, minimax_refs=blocks))
    assert [r.kind for r in prompt.references] == ["image", "video", "video_audio", "audio"]


def test_what_is_written_can_be_read():
    frames = [{"resolved_frame_index": 0, "latent": PICTURE, "audio_latent": SOUND}]
    blocks = [
        {"kind": "image", "latent_t": 1, "latent_h": 4, "latent_w": 6, "latent": PICTURE},
        {"kind": "audio", "ref_audio_t": 8, "audio_latent": SOUND},
    ]
    written = entry(minimax_token_tags=TAGS, minimax_keyframes=frames, minimax_refs=blocks)
    prompt = conditioning.read(written)
    again = conditioning.read(conditioning.write(prompt))
    assert again.text_states is prompt.text_states
    assert torch.equal(again.token_tags, prompt.token_tags)
    assert (again.keyframes, again.references) == (prompt.keyframes, prompt.references)
    assert conditioning.write(prompt)[0][1]["minimax_refs"] == blocks


@pytest.mark.parametrize("extra", [
    {"strength": 1.0}, {"minimax_visual_cond_noise_aug": 0.999}, {"minimax_audio_cond_noise_aug": 1.0},
    {"unknown_key_of_another_pack": object()}, {"minimax_keyframes": []}, {"minimax_refs": None},
], ids=lambda extra: next(iter(extra)))  # fmt: skip
def test_what_changes_nothing_is_let_through(extra):
    prompt = conditioning.read(entry(minimax_token_tags=TAGS, **extra), WIDTH)
    assert prompt.text_states is STATES and torch.equal(prompt.token_tags, TAGS)
    assert (prompt.keyframes, prompt.references) == ((), ())


def frame(**changes):
    made = {"resolved_frame_index": 0, "latent": PICTURE, **changes}
    return {"minimax_keyframes": [{key: value for key, value in made.items() if value is not ...}]}


def reference(**changes):
    made = {"kind": "image", "latent_h": 4, "latent_w": 6, "latent": PICTURE, **changes}
    return {"minimax_refs": [{key: value for key, value in made.items() if value is not ...}]}


BAD = {
    "nothing": (None, ContractError, "Connect a text encoder"),
    "empty": ([], ContractError, "or empty"),
    "tensor": (STATES, ContractError, "no list of"),
    "no-dict": ([[STATES, None]], ContractError, "no list of"),
    "combined": (entry() + entry(), ContractError, "2 entries"),
    "batch": (entry(torch.zeros(2, 6, WIDTH)), ContractError, r"\[2, 6, 64\].*batch 1"),
    "no-tokens": (entry(torch.zeros(1, 0, WIDTH)), ContractError, r"\[1, 0, 64\]"),
    "flat": (entry(torch.zeros(6, WIDTH)), ContractError, r"\[6, 64\]"),
    "other-encoder": (entry(torch.zeros(1, 6, 4096)), ContractError, "4096 wide, this model reads 64.*minimax"),
    "nan": (entry(torch.full((1, 6, WIDTH), float("nan"))), ContractError, "not finite"),
    "tag-count": (entry(minimax_token_tags=TAGS[:-1]), ContractError, "6 tokens but 5 token tags"),
    "tag-value": (entry(minimax_token_tags=TAGS * 2), ContractError, r"got \[2\]"),
    "mask": (entry(mask=torch.ones(1, 8, 8)), ContractError, r"a mask \(mask\)"),
    "area": (entry(area=(1, 1, 0, 0)), ContractError, "an area"),
    "strength": (entry(strength=0.5), ContractError, "a strength"),
    "controlnet": (entry(control=object()), ContractError, "a ControlNet"),
    "time-range": (entry(start_percent=0.2), ContractError, "a time range"),
    "noise-aug": (entry(minimax_visual_cond_noise_aug=0.9), ContractError, "to 0.9; FastH3 runs conditions at 0.999"),
    "frames-no-list": (entry(minimax_keyframes={"a": 1}), ContractError, "must be a list of dicts"),
    "frame-without-tags": (entry(**frame()), ContractError, "no minimax_token_tags"),
    "frame-no-index": (
        entry(minimax_token_tags=TAGS, **frame(resolved_frame_index=...)), ContractError, "index is None"),
    "frame-negative": (entry(minimax_token_tags=TAGS, **frame(resolved_frame_index=-1)), ContractError, "is -1"),
    "frame-no-latent": (entry(minimax_token_tags=TAGS, **frame(latent=...)), ContractError, "neither a latent nor"),
    "frame-latent-shape": (
        entry(minimax_token_tags=TAGS, **frame(latent=PICTURE[0])), ContractError, r"keyframe 0: latent is \[24, 1"),
    "frame-latent-type": (entry(minimax_token_tags=TAGS, **frame(latent="x")), ContractError, "latent is str"),
    "frame-sound-shape": (
        entry(minimax_token_tags=TAGS, **frame(audio_latent=SOUND[:, :, :1])), ContractError, "audio_latent is"),
    "ref-kind": (entry(minimax_token_tags=TAGS, **reference(kind="text")), ContractError, "'text'"),
    "ref-no-kind": (entry(minimax_token_tags=TAGS, **reference(kind=...)), ContractError, "'None'"),
    "ref-no-latent": (entry(minimax_token_tags=TAGS, **reference(latent=...)), ContractError, "lacks a picture"),
    "ref-size": (
        entry(minimax_token_tags=TAGS, **reference(latent_w=8)), GeometryError, "latent_w says 8, its latent has 6"),
    "ref-sound": (
        entry(minimax_token_tags=TAGS, **reference(kind="audio", latent=..., audio_latent=SOUND, ref_audio_t=9)),
        GeometryError, "ref_audio_t says 9, its audio_latent has 8"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_conditioning(name):
    given, error, message = BAD[name]
    with pytest.raises(error, match=message):
        conditioning.read(given, WIDTH)
