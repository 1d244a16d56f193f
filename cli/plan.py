"""`plan`: what a request will need, from headers and sizes, before anything is loaded."""

import argparse
import json
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", type=Path, help="transformer weights; left out: the released model's sizes")
    parser.add_argument("--contract", default="auto", help="name of the contract when the file records none")
    parser.add_argument("--width", type=int, default=1344, help="pixels, a multiple of 32")
    parser.add_argument("--height", type=int, default=768, help="pixels, a multiple of 32")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--frames", type=int, help="17k + 5")
    size.add_argument("--seconds", type=float, default=5.0, help="raised to the next 17k + 5 frames at 24 a second")
    parser.add_argument("--text-tokens", type=int, default=256, help="length of the prompt in tokens")
    parser.add_argument("--dtype", default="auto", help="auto, bf16 or fp32")
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")


def main(args: argparse.Namespace) -> int:
    import torch

    from ..fasth3_core.contracts import CONTRACTS
    from ..fasth3_core.errors import ConfigError
    from ..fasth3_core.model.handle import H3Model
    from ..fasth3_core.packing.geometry import snap_frames
    from ..fasth3_core.planning import plan, released, resident_parameters
    from ..fasth3_core.sampling.settings import resolve

    frames = args.frames if args.frames is not None else snap_frames(args.seconds)
    if args.model is None:
        name = "preview-4" if args.contract == "auto" else args.contract
        if name not in CONTRACTS:
            raise ConfigError("contract", name, f"one of {list(CONTRACTS)}", "Use 'preview-4' if unsure.")
        config = released(gates=CONTRACTS[name].sparse)
        model = H3Model(config, CONTRACTS[name], store=None, source="released sizes")
        element = 2
        weight_bytes = resident_parameters(config) * element
    else:
        from ..fasth3_core.checkpoint.load import load_model

        model = load_model(args.model, contract=args.contract, dtype=args.dtype)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        config, weight_bytes = model.config, model.store.nbytes(device)
        element = model.store.dtype_on(device).itemsize
    settings = resolve(model)
    result = plan(
        width=args.width, height=args.height, frames=frames, text_tokens=args.text_tokens,
        forwards=settings.video.num_forwards, config=config, vsa=settings.vsa, weight_bytes=weight_bytes,
        element_size=element,
    )
    text = f"contract {model.contract.name}\n{result.to_text()}"
    print(json.dumps(result.to_dict(), indent=1) if args.json else text)
    return 0
