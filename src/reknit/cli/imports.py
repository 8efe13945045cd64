"""`reknit import`: make a checkpoint of reknit of one that another program saved."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from reknit.cli.output import print_json, printable
from reknit.integrations.formats.import_ import import_checkpoint, launched
from reknit.plugins.events import amount

if TYPE_CHECKING:
    import argparse


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the program."""
    parser = commands.add_parser(
        "import",
        help="make a checkpoint of one that another program saved",
        description="Copy a checkpoint of another program, and commit it as a checkpoint of reknit.  Memory "
        "stays bounded, no code of the checkpoint runs, and every file is read back and compared with its "
        "digests.  You can repeat this after any failure: whole files of an earlier try are kept.  Under "
        "torchrun each rank copies a share, and so does each process of a Ray cluster with --ray.",
    )
    parser.add_argument("path", metavar="SRC", help="a checkpoint of another program: a file, folder or URL")
    parser.add_argument("to", metavar="DST", help="the destination: a folder or URL")
    parser.add_argument("--step", type=int, metavar="N", help="the training step, if SRC does not record it")
    parser.add_argument(
        "--weights",
        metavar="FILE",
        help="which model of a folder of Hugging Face, by the file with which it begins: model.safetensors",
    )
    parser.add_argument("--workers", type=int, metavar="N", help="threads that copy at once")
    parser.add_argument("--ray", type=int, metavar="N", help="copy with N processes of a Ray cluster")
    parser.add_argument("--overwrite", action="store_true", help="replace another checkpoint at DST")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Import, and return the exit code."""
    options: dict[str, Any] = {
        "step": args.step,
        "weights": args.weights,
        "overwrite": args.overwrite,
        "workers": args.workers,
    }
    if args.ray is not None:
        from reknit.integrations.ray import import_on_ray  # few imports need it

        report = import_on_ray(args.path, args.to, args.ray, **options)
    else:
        with launched() as group:
            report = import_checkpoint(args.path, args.to, **options, group=group)
            if group.rank:
                return 0
    if args.json:
        print_json(report._asdict())
        return 0
    step = "" if report.step is None else f" (step {report.step})"
    kept = f", {report.num_kept} kept of an earlier try" if report.num_kept else ""
    print(
        f"{printable(report.path)}{step} is committed: {report.num_tensors} tensors of {report.format}, "
        f"{amount(report.nbytes)} in {report.num_files} files copied{kept}"
    )
    print(printable(f"of the source, {report.unchecked.removeprefix('it has no digests: ')}"))
    return 0
