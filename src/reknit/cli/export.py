"""`reknit export`: write an item in a format that other tools read."""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import asdict
from typing import get_args

from reknit.cli.output import print_fields, print_json, printable
from reknit.errors import shown
from reknit.interop.safetensors_export import MAX_SHARD_NBYTES, Dtype, ExportReport, export_hf
from reknit.monitor.progress_text import amount

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(i?))?B?", re.IGNORECASE)
_SHOWN = 10


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the program."""
    parser = commands.add_parser(
        "export",
        help="write an item in another format",
        description="Write an item of a checkpoint in the format of another tool.",
    )
    formats = parser.add_subparsers(dest="format", metavar="FORMAT", required=True)
    hf = formats.add_parser(
        "hf",
        help="safetensors files as Hugging Face libraries read them",
        description="Write the tensors of an item as model.safetensors, or several such files with an index. "
        "Memory stays bounded, every byte is verified as it is read, and OUT appears whole or not at all.",
    )
    hf.add_argument("path", metavar="PATH", help="a checkpoint: a folder or URL")
    hf.add_argument("out", metavar="OUT", help="a local folder, empty or absent")
    hf.add_argument("--item", default="model", metavar="NAME", help="the item to export (default: model)")
    hf.add_argument("--dtype", choices=get_args(Dtype), help="convert floating tensors (default: as saved)")
    hf.add_argument(
        "--max-shard-size",
        type=parse_size,
        default=MAX_SHARD_NBYTES,
        metavar="SIZE",
        help="largest size of a file, such as 5GB or 4GiB (default: 5GB)",
    )
    hf.add_argument("--keep-tied", action="store_true", help="write tied weights under each of their names")
    hf.add_argument(
        "--overwrite", action="store_true", help="replace the weights in OUT; other files there stay"
    )
    hf.add_argument("--json", action="store_true", help="print JSON")
    hf.set_defaults(run=run_hf)


def parse_size(text: str) -> int:
    """Return the bytes that a text such as ``5GB`` (powers of 1000) or ``4GiB`` (of 1024) means."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size: write 5GB, 500MB or 4GiB")
    base = 1024 if match[3] else 1000
    power = "KMGT".index(match[2].upper()) + 1 if match[2] else 0
    nbytes = float(match[1]) * base**power
    if nbytes < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is too small: at least one byte")
    if nbytes >= 2**63:
        raise argparse.ArgumentTypeError(f"{shown(text)} is too large: less than 2**63 bytes")
    return int(nbytes)


def run_hf(args: argparse.Namespace) -> int:
    """Export, and return the exit code."""
    report = export_hf(
        args.path,
        args.out,
        item=args.item,
        dtype=args.dtype,
        max_shard_nbytes=args.max_shard_size,
        overwrite=args.overwrite,
        keep_tied=args.keep_tied,
    )
    if args.json:
        print_json(asdict(report))
    else:
        _print(report, args.dtype)
    for name, count in report.overflowed.items():
        warning = f"{count} numbers of {printable(name)} are too large for {args.dtype} and became infinite"
        print(f"reknit: warning: {warning}", file=sys.stderr)
    return 0


def _print(report: ExportReport, dtype: str | None) -> None:
    print_fields(
        {
            "exported": report.path,
            "item": report.item,
            "tensors": report.num_tensors,
            "size": amount(report.nbytes),
            "files": len(report.files),
        }
    )
    if report.cast:
        print(f"converted to {dtype}: {len(report.cast)} tensors")
    if report.tied:
        print("left out, tied to another tensor:")
        for name, owner in list(report.tied.items())[:_SHOWN]:
            print(f"  {printable(name)} = {printable(owner)}")
        if len(report.tied) > _SHOWN:
            print(f"  and {len(report.tied) - _SHOWN} more")
