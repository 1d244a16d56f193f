"""Options that several commands have."""

import argparse


def add_device(parser: argparse.ArgumentParser) -> None:
    """`--device`, for `devices.chosen`."""
    parser.add_argument("--device", help="cpu, cuda, cuda:1, ...; default: the accelerator if there is one")


def add_set(parser: argparse.ArgumentParser) -> None:
    """`--set`, for `graph.apply_settings`."""
    parser.add_argument("--set", action="append", default=[], metavar="NODE.INPUT=VALUE",
                        help="change an input; NODE is an id, or a class that occurs once; may be repeated")


def add_layout(parser: argparse.ArgumentParser) -> None:
    """`--layout`, of the tensors in a file."""
    parser.add_argument("--layout", default="auto",
                        help="of tensor names that two layouts share: diffusers, single-file or original (%(default)s)")
