"""`reknit certify-storage` tests whether a store is fit for checkpoints."""

from __future__ import annotations

import subprocess
import sys
from contextlib import closing
from importlib.util import find_spec
from typing import TYPE_CHECKING

from reknit.errors import MissingExtraError
from reknit.plugins.store import open_storage

if TYPE_CHECKING:
    import argparse


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the program."""
    parser = commands.add_parser(
        "certify-storage",
        help="check that a store supports all that checkpoints need",
        description="Run the suite that every store of reknit passes, and saves that fail at every "
        "operation, in a scratch folder of a store, and print the results.",
    )
    parser.add_argument("url", metavar="URL", help="a folder or URL below which a scratch folder is made")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Certify, and return the exit code."""
    if find_spec("pytest") is None:
        raise MissingExtraError(
            "certify-storage runs tests, and pytest is not installed", remedy="pip install 'reknit[testing]'"
        )
    # This raises errors of the URL and of credentials before any test runs.
    with closing(open_storage(args.url)) as storage:
        storage.folders()
    # The suite is a program of its own: it belongs to the tests, which nothing else depends on.
    command = [sys.executable, "-m", "reknit.testing.certify", args.url]
    return subprocess.run(command, check=False).returncode
