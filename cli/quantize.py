"""quantize: a transformer in bf16 into one file in 8 bits, with what each layer loses."""

import argparse
import json
import logging
import re
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..fasth3_core.errors import ConfigError
from . import options

log = logging.getLogger("fasth3")

_SECONDS_BETWEEN_LINES = 2.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=Path, help="a transformer in float: a file, a folder of shards, or a repository")
    parser.add_argument("output", type=Path, help="the .safetensors file to write")
    parser.add_argument("--form", choices=("int8", "fp8"), default="int8",
                        help="int8 with a scale a row, rotated (ConvRot), or fp8 with one scale (%(default)s)")
    parser.add_argument("--group", type=int, default=256,
                        help="input channels rotated together in int8, a power of four; 0 for none (%(default)d)")
    parser.add_argument("--adaln", action="store_true", help="quantise full-width AdaLN too, two fifths of the model")
    parser.add_argument("--keep", metavar="REGEX", help="layers that stay float, such as 'blocks\\.(0|49)\\.'")
    parser.add_argument("--adapter", action="append", default=[], metavar="FILE[=STRENGTH]",
                        help="merge an adapter first; repeatable, in order")
    parser.add_argument("--contract", default="auto",
                        help="the student that the model with its adapters is, where it does not say (%(default)s)")
    options.add_layout(parser)
    parser.add_argument("--device", default="cpu", help="where the arithmetic runs (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print the losses as JSON")


def main(args: argparse.Namespace) -> int:
    from ..fasth3_core.checkpoint.convert import Choice, convert, mean_loss
    from .devices import chosen
    from .inspect import gigabytes

    if args.output.suffix != ".safetensors":
        raise ConfigError("output", str(args.output), "a name that ends in .safetensors", "Add the ending.")
    if not args.output.parent.is_dir():
        raise ConfigError("output", str(args.output), "a file in a folder that exists", f"Make {args.output.parent}.")
    group = args.group
    if group and (group < 16 or group & (group - 1) or group.bit_length() % 2 == 0):
        raise ConfigError("group", group, "0, or a power of four from 16", "Use 256, which ComfyUI's files have.")
    try:
        keep = re.compile(args.keep) if args.keep else None
    except re.error as error:
        raise ConfigError("keep", args.keep, f"a regular expression ({error})", "Escape dots as \\.") from error
    component, plan, metadata = _source(args)
    if args.output.exists() and args.output.resolve() in {file.path.resolve() for file in component.files}:
        raise ConfigError("output", str(args.output), "another file than the source", "Name a new file.")
    started = time.monotonic()
    layers = convert(
        component, plan, args.output, Choice(form=args.form, group=group, adaln=args.adaln, keep=keep), metadata,
        device=chosen(args.device), on_bytes=_progress(), on_layer=(lambda layer: None) if args.json else _say,
    )  # fmt: skip
    size = args.output.stat().st_size
    if args.json:
        print(json.dumps({
            "output": str(args.output), "bytes": size, "relative_error": mean_loss(layers),
            "layers": [asdict(layer) for layer in layers],
        }, indent=1))  # fmt: skip
    else:
        worst = max(layers, key=lambda layer: layer.loss)
        print(f"{len(layers)} layers lose {mean_loss(layers):.4f} of their norm in all, {worst.layer} the most: "
              f"{worst.loss:.4f}")  # fmt: skip
        seconds = time.monotonic() - started
        print(f"{args.output}: {gigabytes(component.nbytes)} -> {gigabytes(size)} in {seconds:.0f} s")
    return 0


def _source(args: argparse.Namespace) -> tuple[Any, Any, dict[str, str]]:
    """(files, plan of their tensors with the adapters merged, metadata of the file to write)."""
    from ..fasth3_core.adapters.apply import Settings, apply_adapter
    from ..fasth3_core.adapters.contract import as_record
    from ..fasth3_core.checkpoint.component import open_component
    from ..fasth3_core.checkpoint.load import RECORD_KEY, TRANSFORMER_FOLDERS, load_model, recorded_contract
    from ..fasth3_core.checkpoint.names import plan_transformer

    if not args.adapter:
        component = open_component(args.model, TRANSFORMER_FOLDERS)
        recorded = recorded_contract(component)
        metadata = _metadata(RECORD_KEY, recorded and recorded.fields, [])
        return component, plan_transformer(component, args.layout), metadata
    model = load_model(args.model, layout=args.layout)
    for number, given in enumerate(args.adapter, 1):
        path, strength = _strength(given)
        last = number == len(args.adapter)
        settings = Settings(strength=strength)
        model, report = apply_adapter(model, path, settings, contract=args.contract if last else "auto")
        log.info("%s", report.to_text(every_key=False))
    record = as_record(model.contract, model.contract.about) if model.contract.rungs else None
    return model.opened.component, model.store.plan, _metadata(RECORD_KEY, record, args.adapter)


def _strength(given: str) -> tuple[str, float]:
    path, equals, strength = given.rpartition("=")
    if not equals:
        return given, 1.0
    try:
        return path, float(strength)
    except ValueError as error:
        raise ConfigError("adapter", given, "FILE or FILE=STRENGTH", "Write it as lora.safetensors=0.8.") from error


def _metadata(key: str, record, adapters: list[str]) -> dict[str, str]:
    said = {} if record is None else {key: json.dumps(dict(record))}
    return said | ({"fasth3.adapters": json.dumps([Path(given).name for given in adapters])} if adapters else {})


def _say(layer) -> None:
    print(f"{layer.layer:<44}{layer.spec.name:<30}lost {layer.loss:.5f}", flush=True)


def _progress():
    last = time.monotonic()

    def update(done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last >= _SECONDS_BETWEEN_LINES:
            last = time.monotonic()
            log.info("  %.2f of %.2f GB", done / 1e9, total / 1e9)

    return update
