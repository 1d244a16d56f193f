"""inspect: what model files are, from their headers alone."""

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from ..fasth3_core.errors import FastH3Error
from . import options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE",
                        help="a weight file, the folder of a sharded model, or a downloaded repository")
    options.add_layout(parser)
    parser.add_argument("--checksum", action="store_true", help="read the files whole and print their SHA-256")
    parser.add_argument("--json", action="store_true", help="print one JSON list")


def main(args: argparse.Namespace) -> int:
    """0 when every file could be described, else 1."""
    from ..fasth3_core.checkpoint.checksum import checksums
    from ..fasth3_core.checkpoint.component import open_component
    from ..fasth3_core.checkpoint.describe import components, describe

    found, failed = [], False
    for file in args.files:
        for path in components(file):
            try:
                facts = describe(path, args.layout)
            except FastH3Error as error:
                failed = True
                print(error, file=sys.stderr)
                found.append({"path": str(path), "error": str(error)})
                continue
            if args.checksum:
                facts["sha256"] = checksums(open_component(path))
            found.append(facts)
            if not args.json:
                print(_text(facts))
    if args.json:
        print(json.dumps(found, indent=2))
    return 1 if failed else 0


def _text(facts: dict[str, Any]) -> str:
    lines = [facts["path"]]
    for key, value in _rows(facts):
        lines.append(f"  {key:<14}{value}")
    return "\n".join(lines)


def _rows(facts: dict[str, Any]):
    yield "component", facts["component"] + (f": {facts['note']}" if "note" in facts else "")
    dtypes = ", ".join(f"{count} {dtype}" for dtype, count in facts["dtypes"].items())
    yield "size", f"{gigabytes(facts['bytes'])} in {facts['files']} file(s), {facts['tensors']} tensors ({dtypes})"
    if "layout" in facts:
        yield "layout", facts["layout"] + (f", names begin with {facts['prefix']!r}" if facts["prefix"] else "")
        yield "quantisation", _quantisation(facts["quantisation"])
    if dims := facts.get("dimensions"):
        yield "blocks", f"{dims['num_layers']} and {dims['num_refiner_layers']} for the text"
        yield "width", (
            f"{dims['hidden_size']}, {dims['num_heads']} heads x {dims['head_dim']}, feed-forward {dims['ffn_dim']}, "
            f"text {dims['text_dim']}, {dims['rope_freq_dim']} rotary frequencies an axis"
        )
        inner = f", inner width {dims['adaln_rank']}" if dims["adaln_rank"] else ""
        yield "AdaLN", f"{dims['adaln']} form{inner}"
        yield "VSA gates", facts["gates"]
        if dims["output_heads"] > 1:
            yield "output heads", f"a bank of {dims['output_heads']}"
        contract = facts["contract"]
        by = f"{contract['auto']}, by {contract['by']}"
        yield "contract", by if contract["auto"] else f"not decided: {contract['why_not']}"
        yield "could be", ", ".join(contract["candidates"]) or "none that is known"
        memory = ", ".join(f"{gigabytes(size)} in {name}" for name, size in facts["bytes_in_memory"].items())
        yield "in memory", memory
    if "adapter" in facts:
        yield from _adapter_rows(facts["adapter"])
    if "decoder_blocks" in facts:
        yield "decoder", f"{facts['decoder_blocks']} blocks, width {facts['decoder_width']}"
    if "encoder" in facts:
        yield "encoder", "yes" if facts["encoder"] else "no: it can only decode"
    for name, digest in facts.get("sha256", {}).items():
        yield "sha256", f"{digest}  {name}"
    if facts.get("ignored"):
        yield "not used", ", ".join(facts["ignored"][:4]) + (", ..." if len(facts["ignored"]) > 4 else "")


def _adapter_rows(adapter: dict[str, Any]):
    ranks = ", ".join(f"{count} pairs of rank {rank}" for rank, count in adapter["ranks"].items())
    roles = ", ".join(f"{count} {role}" for role, count in adapter["tensors"].items() if role not in ("down", "up"))
    yield "format", adapter["format"]
    yield "holds", "; ".join(part for part in (ranks, roles) if part)
    yield "scale", adapter["scale"]
    yield "names", ", ".join(f"{count} layers in {naming} naming" for naming, count in adapter["naming"].items())
    for kind, count in adapter["layers"].items():
        yield "layers", f"{count} x {kind}"
    if adapter["unknown"]:
        yield "unknown", "; ".join(adapter["unknown"][:6]) + ("; ..." if len(adapter["unknown"]) > 6 else "")
    yield "fits", adapter["fits"]
    yield "contract", adapter["contract"] or "it names none: the model's stays, or one is chosen"


def _quantisation(classes: dict[str, dict[str, int]]) -> str:
    if not classes:
        return "none"
    layers: dict[str, Counter[str]] = {}
    for layer, counts in classes.items():
        for name, count in counts.items():
            layers.setdefault(name, Counter())[layer] += count
    return "; ".join(f"{sum(of.values())} layers {name} ({', '.join(of)})" for name, of in layers.items())


def gigabytes(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e8 else f"{size / 1e6:.2f} MB"
