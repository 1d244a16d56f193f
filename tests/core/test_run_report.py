"""Mirrors fasth3_core/report/run_report.py: the text of a whole report, and of one that lacks any of its parts."""

from dataclasses import fields, replace

import pytest
from comfyui_fasth3.fasth3_core.report.run_report import RunReport, StepReport

ADAPTER = {"name": "a.safetensors", "strength": 0.8, "merged": 6, "beside": 0, "created": 1, "unmatched": 0}
WHOLE = RunReport(
    model={"source": "m/model.safetensors", "dtype": "bfloat16", "contract_by": "default of its size",
           "adapters": [ADAPTER]},
    contract={"name": "preview-4", "shift_video": 12.0, "shift_audio": 3.0},
    departures=["grid 'uniform'"],
    warnings=["5 frames"],
    geometry={"width": 1344, "height": 768, "frames": 124, "tokens": 38010},
    attention={"backend": "eager", "tile_size": 64, "video_tiles": 660, "refused": {"triton": "no GPU"}},
    token_ops=[{"op": "swiglu", "backend": "eager"}, {"op": "rms_modulate", "backend": "triton"}],
    steps=[StepReport(0, 1.0, 1.0, 4, 0, 66, 0.5), StepReport(1, 0.9, 0.7, 3, 1, 66, 0.5)],
    seconds={"load": 1.0, "sample": 2.5},
    weights={"placement": "4 of 7 blocks streamed", "streamed_bytes": 2**30, "copies": 8, "pinned_bytes": 1,
             "host_bytes": 2, "wait_seconds": 0.25},
)  # fmt: skip


def test_a_whole_report():
    assert WHOLE.to_text().splitlines() == [
        "m/model.safetensors: contract preview-4 (shifts 12/3), 2 forwards, bfloat16",
        "1344x768, 124 frames, 38010 tokens",
        "contract preview-4 by default of its size",
        "adapter a.safetensors at 0.8: 6 merged, 1 created tensors",
        "VSA: backend eager, tile 64, 7 of 8 block calls sparse, 66 of 660 video tiles kept",
        "not used: triton: no GPU",
        "token-wise operations: eager, triton",
        "weights: 4 of 7 blocks streamed; 1.0 GiB streamed in 8 copies, 50% of them page-locked, waited 0.25 s",
        "departs from the contract: grid 'uniform'",
        "warning: 5 frames",
        "load 1.00 s, sample 2.50 s",
    ]


def test_dense_attention():
    assert "dense attention by contract, 8 block calls" in replace(WHOLE, attention={}).to_text()


@pytest.mark.parametrize("field", [entry.name for entry in fields(RunReport) if entry.name != "schema"])
def test_a_part_that_is_not_recorded_is_not_told(field):
    empty = getattr(RunReport(), field)
    text = replace(WHOLE, **{field: empty}).to_text()
    assert "None" not in text and all(text.splitlines())


def test_nothing_recorded():
    assert RunReport().to_text() == "?: contract not recorded, 0 forwards"
