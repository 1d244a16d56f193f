"""Mirrors fasth3_core/model/head_bank.py."""

import pytest
import torch
from comfyui_fasth3.fasth3_core.contracts import CONTRACTS
from comfyui_fasth3.fasth3_core.model.head_bank import Bank, collapse, heads_of_steps
from comfyui_fasth3.fasth3_core.sampling import schedule

HEADS, OUT, IN = 8, 3, 5


def bank():
    return torch.randn(HEADS * OUT, IN), torch.randn(HEADS * OUT)


@pytest.mark.parametrize(("first", "last"), [(0, 2), (2, 4), (6, 8), (3, 4)])
def test_collapsed_head_is_the_weighted_mean_of_the_heads(first, last):
    weight, bias = bank()
    sigmas = schedule.shifted(schedule.uniform_base(HEADS + 1), 12.0).sigmas
    x = torch.randn(IN)
    each = (weight @ x + bias).view(HEADS, OUT)
    covered = sigmas[:-1] - sigmas[1:]
    expected = sum(covered[j] * each[j] for j in range(first, last)) / covered[first:last].sum()
    w, b = collapse(weight, bias, sigmas, first, last, "absolute")
    torch.testing.assert_close(w @ x + b, expected)


@pytest.mark.parametrize(("first", "last"), [(0, 2), (0, 1), (6, 8)])
def test_both_forms_are_one_bank(first, last):
    weight, bias = bank()
    sigmas = torch.linspace(1, 0, HEADS + 1) ** 2
    head_weight, head_bias = weight.view(HEADS, OUT, IN), bias.view(HEADS, OUT)
    residual_weight, residual_bias = head_weight - head_weight[:1], head_bias - head_bias[:1]
    residual_weight[0], residual_bias[0] = head_weight[0], head_bias[0]
    w, b = collapse(weight, bias, sigmas, first, last, "absolute")
    w2, b2 = collapse(residual_weight.reshape(-1, IN), residual_bias.reshape(-1), sigmas, first, last, "residual")
    torch.testing.assert_close(w2, w)
    torch.testing.assert_close(b2, b)


@pytest.mark.parametrize("form", ["absolute", "residual"])
def test_every_forward_has_its_own_heads(form):
    """Two fine steps each, of the sigmas of its stream."""
    weight, bias = bank()
    sigmas = {s: torch.linspace(1, 0, HEADS + 1) ** power for s, power in (("video", 2), ("audio", 3))}
    top = {f"final_layer.{s}_out.{leaf}": w for s in sigmas for leaf, w in (("weight", weight), ("bias", bias))}
    made = heads_of_steps(top, Bank(sigmas, 2), form, HEADS // 2)
    for i, heads in enumerate(made):
        for stream, (w, b) in heads.items():
            expected_w, expected_b = collapse(weight, bias, sigmas[stream], 2 * i, 2 * i + 2, form)
            assert torch.equal(w, expected_w) and torch.equal(b, expected_b)
    assert len({tuple(heads[s][1].tolist()) for heads in made for s in heads}) == HEADS


def test_nodes_of_the_bank_schedule():
    contract = CONTRACTS["omniref-8"]
    base = schedule.bank_base(contract.fine_steps, contract.points, contract.max_time)
    video = schedule.shifted(base, contract.shift_video, contract.max_time).sigmas
    audio = schedule.shifted(base, contract.shift_audio, contract.max_time).sigmas
    expected_video = [0.999, 0.987247, 0.972, 0.951429, 0.922154, 0.877171, 0.7992, 0.630947, 0]
    expected_audio = [0.999, 0.953591, 0.8991, 0.8325, 0.74925, 0.642214, 0.4995, 0.2997, 0]
    torch.testing.assert_close(video, torch.tensor(expected_video), rtol=0, atol=6e-7)
    torch.testing.assert_close(audio, torch.tensor(expected_audio), rtol=0, atol=6e-7)
