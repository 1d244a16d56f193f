"""`plan`: what a request will need, from headers and sizes, before anything is loaded."""

import argparse
import json
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", type=Path, help="transformer weights; left out: the released model's sizes")
    parser.add_argument("--contract", default="auto", help="which student it is, where no file says (%(default)s)")
    parser.add_argument("--width", type=int, default=1344, help="pixels, a multiple of 32 (%(default)d)")
    parser.add_argument("--height", type=int, default=768, help="pixels, a multiple of 32 (%(default)d)")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--frames", type=int, help="one of 5, 22, 39, ... 124, ... 362: 17k + 5")
    size.add_argument("--seconds", type=float, default=5.0,
                      help="raised to the next 17k + 5 frames at 24 fps (%(default)g)")
    parser.add_argument("--text-tokens", type=int, default=256, help="length of the prompt in tokens (%(default)d)")
    parser.add_argument("--dtype", default="auto", choices=("auto", "bf16", "fp16", "fp32", "fp8"),
                        help="of the weights; auto is what the loader takes on this machine, without a file bf16")
    parser.add_argument("--offload", default="resident", choices=("auto", "resident", "stream", "mmap"),
                        help="where the blocks are kept (%(default)s)")
    parser.add_argument("--device-gib", type=float, default=0.0,
                        help="device memory that the run may take; a request that cannot fit is an error")
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")


def main(args: argparse.Namespace) -> int:
    import torch

    from ..fasth3_core.contracts import CONTRACTS
    from ..fasth3_core.errors import ConfigError
    from ..fasth3_core.model.handle import H3Model
    from ..fasth3_core.packing.geometry import snap_frames
    from ..fasth3_core.planning import Wanted, plan
    from ..fasth3_core.planning_fit import fit
    from ..fasth3_core.planning_sizes import released, released_sizes
    from ..fasth3_core.sampling.settings import resolve
    from ..fasth3_core.weights.host_memory import available_bytes
    from ..fasth3_core.weights.placement import GIB, Offload, Room
    from ..fasth3_core.weights.policy import DTYPES

    frames = args.frames if args.frames is not None else snap_frames(args.seconds)
    if args.model is None:
        name = "preview-4" if args.contract == "auto" else args.contract
        if name not in CONTRACTS:
            raise ConfigError("contract", name, f"one of {list(CONTRACTS)}", "README.md says which student each is.")
        config = released(CONTRACTS[name])
        model = H3Model(config, CONTRACTS[name], store=None, source="released sizes")
        dtype = DTYPES["bf16" if args.dtype in ("auto", "fp8") else args.dtype]
        sizes = released_sizes(config, dtype.itemsize, fp8=args.dtype == "fp8")
    else:
        from ..fasth3_core.checkpoint.load import load_model

        model = load_model(args.model, contract=args.contract, dtype=args.dtype)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        config, sizes = model.config, model.store.sizes(device)
        dtype = model.store.dtype_on(device)
    settings = resolve(model)
    wanted = Wanted(
        width=args.width, height=args.height, frames=frames, text_tokens=args.text_tokens,
        forwards=settings.video.num_forwards, config=config, vsa=settings.vsa, sizes=sizes,
        element_size=dtype.itemsize, dequantised=0 if model.store is None else model.store.widened_bytes(),
        fp8=args.dtype == "fp8",
    )
    offload = Offload(policy=args.offload, device_gib=args.device_gib)
    room = Room(device=int(offload.device_gib * GIB) or None, host=available_bytes())
    result = plan(*fit(wanted, offload, room))
    about = f"{model.source}, contract {model.contract.name}, {str(dtype).removeprefix('torch.')}"
    about += " with fp8 projections" * (args.dtype == "fp8")
    text = f"{about}\n{result.to_text()}"
    print(json.dumps(result.to_dict(), indent=1) if args.json else text)
    return 0
