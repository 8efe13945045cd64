"""`reknit export`: write a checkpoint in a format that other tools read."""

from __future__ import annotations

import argparse
import importlib
import re
import runpy
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, get_args

import reknit
from reknit.cli.output import print_fields, print_json, printable
from reknit.errors import MissingExtraError, UsageError, shown
from reknit.integrations.formats.programs import installed
from reknit.integrations.hugging_face.export import MAX_SHARD_NBYTES, Dtype, export_hf
from reknit.plugins.events import amount

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reknit.integrations.formats.verify import StateReport
    from reknit.integrations.hugging_face.export import ExportReport

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(i?))?B?", re.IGNORECASE)
_SHOWN = 10

_STATES = {
    "dcp": ("a folder of torch.distributed.checkpoint", "torch"),
    "torch": ("a file that torch.load(weights_only=True) reads", "torch"),
    "npz": ("a file that numpy.load reads", None),
    "orbax": ("a folder that Orbax restores", "orbax"),
}
"""Formats of whole states: the result of an export, and the extra that it needs."""

_HOMES = {
    "dcp": "reknit.integrations.dcp.export",
    "torch": "reknit.integrations.torch_save.export",
    "npz": "reknit.integrations.numpy_gguf.export",
    "orbax": "reknit.integrations.orbax.export",
}

_FILES = frozenset({"torch", "npz"})


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the program."""
    parser = commands.add_parser(
        "export",
        help="write a checkpoint in another format",
        description="Write a checkpoint, or some items of it, in the format of another tool. Memory stays "
        "bounded, every byte is verified as it is read, and DST appears whole or not at all.",
    )
    formats = parser.add_subparsers(dest="format", metavar="FORMAT", required=True)
    _add_hugging_face(formats)
    for name, (what, _) in _STATES.items():
        one = formats.add_parser(name, help=what, description=f"Write {what}.")
        _add_common(one, "a local file" if name in _FILES else "a local folder, empty or absent")
        one.add_argument(
            "--item", action="append", metavar="NAME", help="an item to export, repeatable (default: all)"
        )
        if name in _FILES:
            one.add_argument("--overwrite", action="store_true", help="replace the file DST")
        one.set_defaults(run=run_state, format=name)
    for name, made in installed().items():
        if callable(getattr(made, "export", None)):
            one = formats.add_parser(
                name, help=f"a checkpoint of {name}", description=f"Write a checkpoint of {name}."
            )
            one.add_argument("path", metavar="SRC", help="a checkpoint: a folder or URL")
            one.add_argument("out", metavar="DST", help="the destination")
            one.set_defaults(run=run_installed, format=name)


def _add_common(parser: argparse.ArgumentParser, destination: str) -> None:
    parser.add_argument("path", metavar="SRC", help="a checkpoint: a folder or URL")
    parser.add_argument("out", metavar="DST", help=destination)
    parser.add_argument(
        "--verify", action="store_true", help="read the result with its own library and compare every bit"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def _add_hugging_face(formats: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    hf = formats.add_parser(
        "huggingface",
        aliases=["hf"],
        help="safetensors files as Hugging Face libraries read them",
        description="Write the tensors of an item as model.safetensors, or several such files with an index.",
    )
    _add_common(hf, "a local folder, empty or absent")
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
        "--transforms",
        metavar="FILE.py:NAME",
        help="rules of reknit.transforms, or a function that returns them, in a file or module of yours",
    )
    hf.add_argument(
        "--adapter",
        nargs="?",
        const="default",
        metavar="NAME",
        help="write only the weights of an adapter of PEFT (default name: default)",
    )
    hf.add_argument(
        "--config-from", metavar="DIR", help="copy configuration and tokenizer from this folder of a model"
    )
    hf.add_argument(
        "--overwrite", action="store_true", help="replace the weights in DST; other files there stay"
    )
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


def load_rules(text: str) -> Any:
    """Return the rules that ``FILE.py:NAME`` or ``package.module:NAME`` names.  Raises `UsageError`."""
    place, _, name = text.rpartition(":")
    if not place or not name:
        raise UsageError(f"{text!r} names no rules", remedy="write FILE.py:NAME or package.module:NAME")
    try:
        is_file = place.endswith(".py")
        found = runpy.run_path(place) if is_file else vars(importlib.import_module(place))
    except (OSError, ImportError) as error:
        raise UsageError(f"cannot read rules from {place}: {error}", remedy="check the path") from error
    if name not in found:
        raise UsageError(f"{place} has no {name!r}", remedy="name a list of rules, or a function for it")
    rules = found[name]
    return rules() if callable(rules) else rules


def run_hf(args: argparse.Namespace) -> int:
    """Export the weights of an item, and return the exit code."""
    report = export_hf(
        args.path,
        args.out,
        item=args.item,
        dtype=args.dtype,
        max_shard_nbytes=args.max_shard_size,
        overwrite=args.overwrite,
        keep_tied=args.keep_tied,
        transforms=() if args.transforms is None else load_rules(args.transforms),
        adapter=args.adapter,
        config_from=args.config_from,
        verify=args.verify,
    )
    if args.json:
        print_json(asdict(report))
    else:
        _print_weights(report, args.dtype)
    for name, count in report.overflowed.items():
        warning = f"{count} numbers of {printable(name)} are too large for {args.dtype} and became infinite"
        print(f"reknit: warning: {warning}", file=sys.stderr)
    return 0


def run_state(args: argparse.Namespace) -> int:
    """Export a state, and return the exit code."""
    _, extra = _STATES[args.format]
    try:
        module = importlib.import_module(_HOMES[args.format])
    except ImportError as error:
        raise MissingExtraError(
            f"an export to {args.format} needs {error.name}, which is not installed",
            remedy=f"pip install 'reknit[{extra}]'",
        ) from error
    options = {"overwrite": args.overwrite} if args.format in _FILES else {}
    export = getattr(module, f"export_{args.format}")
    report: StateReport = export(args.path, args.out, items=args.item, verify=args.verify, **options)
    if args.json:
        print_json(asdict(report))
        return 0
    print_fields(
        {
            "exported": report.path,
            "items": ", ".join(report.items),
            "tensors": report.num_tensors,
            "size": amount(report.nbytes),
            "verified": "yes" if report.verified else "no",
        }
    )
    _print_names("stored as another type:", report.changed, "as")
    _print_names("left out:", report.left_out, "--")
    return 0


def run_installed(args: argparse.Namespace) -> int:
    """Let the format of another distribution write a checkpoint, and return the exit code."""
    with reknit.open(args.path) as checkpoint:
        installed()[args.format].export(checkpoint, args.out)
    print_fields({"exported": args.out})
    return 0


def _print_weights(report: ExportReport, dtype: str | None) -> None:
    print_fields(
        {
            "exported": report.path,
            "item": report.item,
            "tensors": report.num_tensors,
            "size": amount(report.nbytes),
            "files": len(report.files),
            "verified": "yes" if report.verified else "no",
        }
    )
    if report.passed:
        print(f"copied: {', '.join(map(printable, report.passed))}")
    if report.cast:
        print(f"converted to {dtype}: {len(report.cast)} tensors")
    _print_names("left out, tied to another tensor:", report.tied, "=")
    _print_names("left out:", report.left_out, "--")


def _print_names(title: str, names: Mapping[str, str], between: str) -> None:
    """Print pairs of names, as many as a screen takes."""
    if not names:
        return
    print(title)
    for name, other in list(names.items())[:_SHOWN]:
        print(f"  {printable(name)} {between} {printable(other)}")
    if len(names) > _SHOWN:
        print(f"  and {len(names) - _SHOWN} more")
