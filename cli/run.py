"""run: an API-format graph in this process, with this package's nodes and a handful of file nodes."""

import argparse
from pathlib import Path

import torch

from ..fasth3_core.errors import ConfigError
from .graph import apply_settings, read_graph


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("graph", type=Path, help="API-format JSON, for example workflows/api/*.json")
    parser.add_argument("--set", action="append", default=[], metavar="NODE.INPUT=VALUE",
                        help="change an input; NODE is an id, or a class that occurs once. Repeatable")
    parser.add_argument("--models", type=Path, default=Path("models"), help="holds diffusion_models/ and vae/")
    parser.add_argument("--input", type=Path, default=Path("input"), help="where loader nodes look")
    parser.add_argument("--output", type=Path, default=Path("output"), help="where saving nodes write")
    parser.add_argument("--device", help="cpu, cuda, cuda:1, ...; the accelerator if there is one by default")


def main(args: argparse.Namespace) -> int:
    graph = read_graph(args.graph)
    apply_settings(graph, args.set)
    lines, _ = run_graph(graph, args.models, args.input, args.output, args.device)
    print("\n".join(lines))
    return 0


def run_graph(
    graph: dict, models: Path, inputs: Path, outputs: Path, device: str | None = None
) -> tuple[list[str], list[Path]]:
    """Run a graph on three folders; returns what the nodes saved and said, a line each, and the files."""
    # here, not at the top: these need the node API, and `run --help` must work without
    from ..nodes import NODES, _host
    from ..nodes._host_standalone import StandaloneHost
    from .executor import execute
    from .file_nodes import FILE_NODES

    try:
        place = None if device is None else torch.device(device)
    except RuntimeError as error:
        raise ConfigError("device", device, "a torch device such as cpu or cuda:0", "Leave it out.") from error
    _host.use(StandaloneHost(models, inputs, outputs, place))
    try:
        classes = {cls.GET_SCHEMA().node_id: cls for cls in [*NODES, *FILE_NODES]}
        results = execute(graph, classes, on_node=_say)
    finally:
        _host.use(None)
    said, files = [], []
    for node_id, result in results.items():
        saved = [outputs / item["subfolder"] / item["filename"] for item in result.ui.get("images", ())]
        said += [f"node {node_id} saved {path}" for path in saved]
        said += [f"node {node_id}: {text}" for text in result.ui.get("text", ()) if text]
        files += saved
    lines = [line for text in said for line in text.splitlines()]
    return list(dict.fromkeys(lines)), files  # the saving node repeats the sampler's report


def _say(number: int, total: int, node_id: str, class_type: str) -> None:
    print(f"[{number}/{total}] node {node_id}: {class_type}", flush=True)
