"""`reknit verify` checks that a checkpoint is whole, and that its index agrees with its data files."""

from __future__ import annotations

import os
import shlex
from contextlib import closing
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

import reknit
from reknit.cli.output import print_json, printable
from reknit.engine.stored.at_path import read_manifest
from reknit.engine.stored.file_checks import read_checked, whole_manifest
from reknit.engine.stored.places import files_at
from reknit.errors import FormatError, StorageError, UsageError
from reknit.format.checksum import block_digests
from reknit.format.index import decode_index, encode_index
from reknit.format.index.arrow_file import rebuild_index
from reknit.format.manifest_file import decode_record
from reknit.format.paths import parse_path
from reknit.integrations.formats.export import read_header
from reknit.plugins.events import amount
from reknit.plugins.format import full_name, names_in, open_checkpoint
from reknit.plugins.store import LocalStorage

if TYPE_CHECKING:
    import argparse

    from reknit import VerifyReport
    from reknit.plugins.format import Index, Manifest
    from reknit.plugins.store import Storage


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the program."""
    parser = commands.add_parser(
        "verify",
        help="check a checkpoint without loading it",
        description="Check the metadata of a checkpoint, or every byte with --data; print every problem on a "
        "line of its own, and exit with 1 if there is one.  Nothing in the checkpoint is changed.",
    )
    parser.add_argument("path", metavar="PATH", help="a checkpoint: a folder or URL")
    parser.add_argument("--data", action="store_true", help="also read the tensors, and compare every digest")
    parser.add_argument(
        "--rebuild-index",
        action="store_true",
        help="rebuild the index from the headers of the data files alone, and report whether the two agree",
    )
    parser.add_argument(
        "--output", metavar="FILE", help="with --rebuild-index: write the rebuilt index to this new file"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


class _Findings:
    """Problems and notes, printed at once, or together as JSON at the end."""

    def __init__(self, *, quiet: bool) -> None:
        self.problems: list[str] = []
        self.notes: list[str] = []
        self._quiet = quiet

    def problem(self, text: str) -> None:
        """Record a problem."""
        self._record(text, self.problems)

    def note(self, text: str) -> None:
        """Record a success or an action."""
        self._record(text, self.notes)

    def _record(self, text: str, kept: list[str]) -> None:
        kept.append(text)
        if not self._quiet:
            print(printable(text))


def run(args: argparse.Namespace) -> int:
    """Verify, and return the exit code."""
    if args.output and not args.rebuild_index:
        raise UsageError(
            "--output names the file for the rebuilt index, and no index is rebuilt",
            remedy="add --rebuild-index, or leave --output out",
        )
    report = reknit.verify(args.path, "data" if args.data else "metadata")
    findings = _Findings(quiet=args.json)
    for problem in report.problems:
        findings.problem(problem)
    if args.rebuild_index:
        _rebuild(args.path, args.output, findings)
    if args.json:
        facts = {"path": report.path, "level": report.level, "ok": not findings.problems}
        facts |= {"num_files": report.num_files, "nbytes_checked": report.nbytes_checked}
        facts |= {"num_unread": report.num_unread, "nbytes_unread": report.nbytes_unread}
        facts |= {"unread": _unread(report, args.path), "unchecked": report.unchecked}
        print_json(facts | {"problems": findings.problems, "notes": findings.notes})
    elif not findings.problems:
        where = "in" if args.data else "in the metadata of"
        print(f"no problems {where} {report.num_files} files ({amount(report.nbytes_checked)} checked)")
        if unread := _unread(report, args.path):
            print(printable(unread))
        if report.unchecked:
            print(printable(report.unchecked))
    return 1 if findings.problems else 0


def _unread(report: VerifyReport, path: str) -> str | None:
    """Return a message about unread bytes and the command that reads them, or None."""
    if not report.num_unread:
        return None
    return f"{report.unread_bytes()}; this reads them: reknit verify {shlex.quote(path)} --data"


def _rebuild(path: str, output: str | None, findings: _Findings) -> None:
    """Rebuild the index, compare it, and record the result."""
    with closing(open_checkpoint(path)) as storage:
        manifest = _manifest(storage)
        files = files_at(storage, None if manifest is None else manifest.moved_to)
        try:
            rebuilt = _rebuilt(files, manifest)
        except (FormatError, StorageError) as error:
            findings.problem(f"the index cannot be rebuilt: {error.message}")
        else:
            _compare(files, manifest, rebuilt, findings)
            if output is not None:
                _write(output, rebuilt.data)
                findings.note(f"wrote the rebuilt index to {output}")


class _Rebuilt(NamedTuple):
    """An index from headers: as it is, as a file, and the number of headers."""

    result: Index
    data: bytes
    num_files: int


def _manifest(storage: Storage) -> Manifest | None:
    """Return the manifest, or None if it is damaged, which `stored.verify` has reported."""
    try:
        record = decode_record(read_manifest(storage))
        return whole_manifest(files_at(storage, record.moved_to), record)
    except FormatError:
        return None


def _rebuilt(storage: Storage, manifest: Manifest | None) -> _Rebuilt:
    """Rebuild the index from the data files in the manifest, or from all data files without a manifest."""
    files = storage.list() if manifest is None else manifest.files
    names = [file.path for file in files if (name := parse_path(file.path)) and name.kind == "data"]
    index = rebuild_index({name: read_header(storage, name) for name in names})
    return _Rebuilt(index, encode_index(index), len(names))


def _compare(storage: Storage, manifest: Manifest | None, rebuilt: _Rebuilt, findings: _Findings) -> None:
    """Compare the rebuilt index with the index of the checkpoint, and record the result."""
    if manifest is None:
        return
    entry = manifest.index
    is_same_file = entry.nbytes == len(rebuilt.data) and list(entry.digests) == block_digests(
        rebuilt.data, manifest.block_nbytes
    )
    try:
        own = decode_index(read_checked(storage, entry, manifest.block_nbytes))
    except (FormatError, StorageError):  # `stored.verify` has reported it
        same = f"; rebuilt, it is byte for byte the lost {entry.path}" if is_same_file else ""
        findings.note(f"the index cannot be read{same}")
        return
    whole = rebuilt.result
    if len(whole.tensors) > len(own.tensors):
        whole = whole.without(_kept(storage, manifest).difference(own.ids))
    differing = _differing(own, whole)
    for name in differing:
        findings.problem(f"{entry.path} and the headers of the data files disagree about {name}")
    if not differing:
        findings.note(f"the index and the headers of {rebuilt.num_files} data files agree")


def _kept(storage: Storage, manifest: Manifest) -> set[tuple[str, str]]:
    """Return the names of values that ranks saved as their own: tensors among them have no chunks."""
    files = {file.path: file for file in manifest.files}
    return {
        (blob.item, fqn)
        for blob in manifest.blobs
        if blob.coordinate is not None
        for fqn in names_in(read_checked(storage, files[blob.path], manifest.block_nbytes))
    }


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
