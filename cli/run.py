"""run: an API-format graph in this process, with this package's nodes and a handful of file nodes."""

import argparse
import logging
import os
from pathlib import Path

from ..fasth3_core.errors import ConfigError, FastH3Error
from ..kernels.registry import BackendUnavailable
from . import options
from .devices import chosen
from .graph import apply_settings, read_graph, saved_files

log = logging.getLogger("fasth3")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("graph", type=Path, help="API-format JSON, for example workflows/api/*.json")
    options.add_set(parser)
    parser.add_argument("--models", type=Path, default=Path("models"), help="holds diffusion_models, vae (%(default)s)")
    parser.add_argument("--input", type=Path, default=Path("input"), help="pictures and prompt files (%(default)s)")
    parser.add_argument("--output", type=Path, default=Path("output"), help="where saving nodes write (%(default)s)")
    options.add_device(parser)


def main(args: argparse.Namespace) -> int:
    graph = read_graph(args.graph)
    apply_settings(graph, args.set)
    for path in run_graph(graph, args.models, args.input, args.output, args.device):
        print(f"saved {path}")
    return 0


def run_graph(graph: dict, models: Path, inputs: Path, outputs: Path, device: str | None = None) -> list[Path]:
    """Run a graph on three folders; returns the files that it saved. What nodes say goes to the log."""
    # here, not at the top: these need the node API, and `run --help` must work without
    from ..nodes import NODES, _host
    from ..nodes._host_standalone import StandaloneHost
    from .executor import execute
    from .file_nodes import FILE_NODES

    _check_writable(outputs)
    _host.use(StandaloneHost(models, inputs, outputs, chosen(device)))
    try:
        classes = {cls.GET_SCHEMA().node_id: cls for cls in [*NODES, *FILE_NODES]}
        results = execute(graph, classes, on_node=_say)
    except BackendUnavailable as error:
        raise FastH3Error(str(error)) from error
    finally:
        _host.use(None)
    saved = (item for result in results.values() for item in saved_files(result.ui))
    return [outputs / item["subfolder"] / item["filename"] for item in saved]


def _check_writable(folder: Path) -> None:
    """Before the work, not after it: saving nodes make the folder when they come to it."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise ConfigError("output", str(folder), "a folder that can be written", f"See what {there} is.")


def _say(number: int, total: int, node_id: str, class_type: str) -> None:
    log.info("[%d/%d] node %s: %s", number, total, node_id, class_type)
