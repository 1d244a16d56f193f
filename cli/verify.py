"""`verify DIR`: recompute recorded truth on this machine and print one row a case."""

import argparse
import time
from pathlib import Path

from . import options

DTYPES = ("fp32", "bf16", "fp16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, help="folder of recorded files, such as tests/golden")
    options.add_device(parser)
    parser.add_argument(
        "--dtype", action="append", choices=DTYPES, help="may be repeated; default: fp32, and bf16 too on a GPU"
    )
    parser.add_argument("--backend", action="append", default=[],
                        help="of the sparse op, such as eager; may be repeated; default: all")
    parser.add_argument("--quiet", action="store_true", help="print only what is not ok, and the count")


def main(args: argparse.Namespace) -> int:
    """0 when every case ran on something and stayed within its tolerance, else 1."""
    import torch

    from ..fasth3_core.errors import FastH3Error
    from ..fasth3_core.selftest.golden import Target
    from ..fasth3_core.selftest.run import recorded_files, verify_file
    from .devices import chosen

    device = chosen(args.device)
    names = args.dtype or (["fp32"] if device.type == "cpu" else ["fp32", "bf16"])
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    counts = {"ok": 0, "FAIL": 0, "n/a": 0}
    failed = []
    for path in recorded_files(args.folder):
        for name in names:
            started, ran = time.perf_counter(), set()
            cases = set()
            try:
                for row in verify_file(path, Target(device, dtypes[name], tuple(args.backend))):
                    counts[row.status] += 1
                    cases.add(row.case)
                    if row.error is not None:
                        ran.add(row.case)
                    if not args.quiet or row.status == "FAIL":
                        print(_line(row))
            except FastH3Error as error:
                print(f"{path.name}: {error}")
                failed.append(f"{path.name} ({name})")
                continue
            if not cases or cases - ran:
                failed.append(f"{path.name} ({name}): nothing ran for {', '.join(sorted(cases - ran)) or 'any case'}")
            if not args.quiet:
                print(f"{path.name} {name}: {time.perf_counter() - started:.1f} s")
    for text in failed:
        print(f"FAIL {text}")
    faults = f", {len(failed)} files not wholly checked" if failed else ""
    print(f"{counts['ok']} ok, {counts['FAIL']} failed, {counts['n/a']} not available on {device}{faults}")
    return 1 if failed or counts["FAIL"] or not counts["ok"] else 0


def _line(row) -> str:
    head = f"{row.status:<4} {row.file:<34} {row.case:<44} {row.backend:<10} {row.dtype:<9}"
    if row.error is None:
        return f"{head} {row.note}"
    return f"{head} {row.metric:<10} {row.error:.3g} <= {row.tolerance:.3g} {row.note}".rstrip()
