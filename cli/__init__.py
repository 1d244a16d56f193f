"""`python -m comfyui_fasth3 COMMAND`. A command is a module with `add_arguments(parser)` and `main(args) -> int`."""

import argparse
import importlib
import io
import logging
import os
import sys
from collections.abc import Sequence

from safetensors import SafetensorError

from ..fasth3_core.errors import FastH3Error

COMMANDS = {
    "run": "run an API-format graph in this process, without ComfyUI",
    "demo": "make a tiny model, run the shipped preview graph on it, and check the MP4 it writes",
    "doctor": "show versions, devices and which kernels can run here",
    "inspect": "say what a model file, a folder or an adapter is, from its headers alone",
    "quantize": "write a transformer in 8 bits: int8 ConvRot or fp8, with what each layer loses",
    "plan": "tokens, tiles and memory of a request, before anything is loaded",
    "probe-decoder": "find out how a 24-block video decoder decodes, by comparing it with the released one",
    "verify": "compare this machine's results with recorded ones: a self-test after installing",
    "submit": "send an API-format graph to a running ComfyUI, follow it and fetch its files",
}
"""Command -> one line for the list of commands; the module of that name (with _ for -) is imported when asked for."""

PROG = "comfyui-fasth3"


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 done; 1 failed, with a message; 2 wrong usage; 130 stopped with Ctrl-C."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if isinstance(sys.stdout, io.TextIOWrapper):  # a file's name may hold what the terminal cannot show
        sys.stdout.reconfigure(errors="backslashreplace")
    logging.basicConfig(level=logging.INFO, format="%(message)s")  # to stderr: stdout is for results
    try:
        try:
            return _run(argv)
        finally:
            if sys.stdout is not None:  # None: closed before we came
                sys.stdout.flush()  # here, where a closed pipe is an exception like any other
    except KeyboardInterrupt:
        return _failed(argv, "stopped", 130)
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the flush at exit fails again
        return 1
    except (FastH3Error, OSError, SafetensorError) as error:  # OSError: a folder that cannot be made, a full disk
        return _failed(argv, str(error), 1)


def _run(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(_usage())
        return 0 if argv else 2
    name, rest = argv[0], argv[1:]
    if name not in COMMANDS:
        print(f"{PROG}: no command {name!r}\n\n{_usage()}", file=sys.stderr)
        return 2
    command = importlib.import_module(f".{name.replace('-', '_')}", __package__)  # seconds, where it brings torch
    parser = argparse.ArgumentParser(prog=f"{PROG} {name}", description=COMMANDS[name])
    command.add_arguments(parser)
    return command.main(parser.parse_args(rest))


def _failed(argv: list[str], why: str, status: int) -> int:
    print(f"{' '.join([PROG, *argv[:1]])}: {why}", file=sys.stderr)
    return status


def _usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {text}" for name, text in COMMANDS.items()]
    return "\n".join([f"usage: {PROG} COMMAND [options]    ({PROG} COMMAND --help says more)", "", *lines])
