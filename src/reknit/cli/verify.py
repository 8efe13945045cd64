"""`reknit verify`: is a checkpoint whole, and does its index say what its data files say?"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from reknit import api
from reknit.cli.output import nbytes_text, printable
from reknit.engine.checked import read_checked
from reknit.engine.opening import read_manifest
from reknit.errors import FormatError, StorageError, UsageError
from reknit.format.checksum import block_digests
from reknit.format.index_file import decode_index, encode_index
from reknit.format.manifest_file import decode_manifest
from reknit.format.paths import parse_path
from reknit.format.rebuild import rebuild_index
from reknit.interop.data_headers import read_header
from reknit.storage.local import LocalStorage
from reknit.storage.registry import open_storage
from reknit.types.shard import full_name

if TYPE_CHECKING:
    import argparse

    from reknit.storage.base import Storage
    from reknit.types.manifest import Index, Manifest


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to those of the program."""
    parser = commands.add_parser(
        "verify",
        help="check a checkpoint without loading it",
        description="Check a checkpoint, print every problem on a line of its own, and exit with 1 if there "
        "is one.  Nothing in the checkpoint is changed.",
    )
    parser.add_argument("path", metavar="PATH", help="a checkpoint: a folder or URL")
    parser.add_argument("--data", action="store_true", help="read every byte and compare its digest too")
    parser.add_argument(
        "--rebuild-index",
        action="store_true",
        help="rebuild the index from the headers of the data files alone, and say whether the two agree",
    )
    parser.add_argument(
        "--output", metavar="FILE", help="with --rebuild-index: write the rebuilt index to this new file"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Verify, and return the exit code."""
    if args.output and not args.rebuild_index:
        raise UsageError("--output is where --rebuild-index writes to", remedy="give both, or none")
    report = api.verify(args.path, "data" if args.data else "structure")
    problems = list(report.problems)
    for problem in problems:
        print(printable(problem))
    if args.rebuild_index:
        problems += _rebuild(args.path, args.output)
    if not problems:
        checked = nbytes_text(report.nbytes_checked) if args.data else "metadata"
        print(f"no problems in {report.num_files} files ({checked} checked)")
    return 1 if problems else 0


def _rebuild(path: str, output: str | None) -> list[str]:
    """Rebuild the index, compare it, print what came of it, and return the problems."""
    storage = open_storage(path)
    try:
        manifest = _manifest(storage)
        problems = []
        try:
            rebuilt = _rebuilt(storage, manifest)
        except (FormatError, StorageError) as error:
            problems.append(f"the index cannot be rebuilt: {error.message}")
        else:
            problems += _compared(storage, manifest, rebuilt)
            if output is not None:
                _write(output, rebuilt.data)
    finally:
        storage.close()
    for problem in problems:
        print(printable(problem))
    return problems


class _Rebuilt(NamedTuple):
    """An index from headers: as it is, as a file, and the number of headers."""

    result: Index
    data: bytes
    num_files: int


def _manifest(storage: Storage) -> Manifest | None:
    """Return the manifest, or None when it is damaged; `api.verify` has said so."""
    try:
        return decode_manifest(read_manifest(storage))
    except FormatError:
        return None


def _rebuilt(storage: Storage, manifest: Manifest | None) -> _Rebuilt:
    """Rebuild the index from the data files that the manifest names, or else from those that are there."""
    files = storage.list() if manifest is None else manifest.files
    names = [file.path for file in files if (name := parse_path(file.path)) and name.kind == "data"]
    index = rebuild_index({name: read_header(storage, name) for name in names})
    return _Rebuilt(index, encode_index(index), len(names))


def _compared(storage: Storage, manifest: Manifest | None, rebuilt: _Rebuilt) -> list[str]:
    """Compare the rebuilt index with the checkpoint's own; print how they agree, or return how not."""
    if manifest is None:
        return []
    (entry,) = [file for file in manifest.files if file.path == manifest.index_path]
    is_same_file = entry.nbytes == len(rebuilt.data) and list(entry.digests) == block_digests(
        rebuilt.data, manifest.block_nbytes
    )
    try:
        own = decode_index(read_checked(storage, entry, manifest.block_nbytes))
    except (FormatError, StorageError):  # `api.verify` has said so
        told = f"; rebuilt, it is byte for byte the lost {entry.path}" if is_same_file else ""
        print(f"the index cannot be read{told}")
        return []
    if differing := _differing(own, rebuilt.result):
        return [f"{entry.path} and the headers of the data files disagree about {name}" for name in differing]
    print(f"the index and the headers of {rebuilt.num_files} data files agree")
    return []


def _differing(a: Index, b: Index) -> list[str]:
    """Return the tensors that two indexes do not place alike."""
    differing = []
    for item, fqn in sorted(a.ids.keys() | b.ids.keys()):
        numbers = a.ids.get((item, fqn)), b.ids.get((item, fqn))
        if numbers[0] is None or numbers[1] is None or not _same(a, numbers[0], b, numbers[1]):
            differing.append(full_name(item, fqn))
    return differing


def _same(a: Index, n: int, b: Index, m: int) -> bool:
    one, two = slice(a.first[n], a.first[n + 1]), slice(b.first[m], b.first[m + 1])
    if a.tensors[n].spec != b.tensors[m].spec or one.stop - one.start != two.stop - two.start:
        return False
    ndim = len(a.tensors[n].spec.shape)
    return (
        np.array_equal(a.offsets[one, :ndim], b.offsets[two, :ndim])
        and np.array_equal(a.lengths[one, :ndim], b.lengths[two, :ndim])
        and np.array_equal(a.start[one], b.start[two])
        and [a.files[k] for k in a.file[one].tolist()] == [b.files[k] for k in b.file[two].tolist()]
    )


def _write(output: str, data: bytes) -> None:
    """Write a new local file; nothing is ever replaced."""
    folder, name = os.path.split(os.path.abspath(output))
    if not name or not LocalStorage(folder).put(name, data, if_absent=True):
        raise UsageError(f"{output} exists already", remedy="name a new file")
    print(f"wrote the rebuilt index to {output}")
