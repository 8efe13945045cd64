"""The invariants of every run, checked on the bytes on disk without the code that wrote them."""

from __future__ import annotations

import base64
import json
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from reknit.errors import CheckpointExistsError, CommError, ReknitError
from tests.simulation.clock import Violation
from tests.simulation.job import ITEM, tensors

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.simulation.job import Ending, Save
    from tests.simulation.storage import Change, Disk

MANIFEST = "manifest.json"
LATE_S = 5.0
"""Time after its deadline in which a rank may still receive the end of a round."""


class Commit(NamedTuple):
    """A manifest that appeared: its folder, its incarnation, and its save."""

    folder: str
    run: int
    number: int
    write_id: str


@dataclass
class Oracle:
    """Checks every change of the disk, and every end of a round and of a save.

    Every method raises `Violation`.
    """

    disk: Disk
    root_can_read: bool = True
    commits: list[Commit] = field(default_factory=list)
    endings: list[Ending] = field(default_factory=list)
    _needed: dict[str, set[str]] = field(default_factory=dict)
    _writing: dict[str, set[int]] = field(default_factory=dict)
    _ended: Counter[tuple[int, int]] = field(default_factory=Counter)

    def changed(self, change: Change) -> None:
        """Judge a change of the disk."""
        path, run = change.path, change.process.run
        folder, _, name = path.partition("/")
        if name == MANIFEST and path not in self.disk.files:
            raise Violation(f"the only checkpoint of {folder} is gone: {change.operation} {path}")
        if name == MANIFEST:
            self._committed(folder, run)
        elif path in self._needed.get(folder, ()):
            raise Violation(f"a file of the committed checkpoint was changed: {change.operation} {path}")
        elif change.operation == "create" and self._ended[run, 0] <= self._ended[run, change.process.rank]:
            # The save for which this rank writes has begun on rank 0, and has not ended there.
            self._writing.setdefault(folder, set()).add(run)

    def round_over(self, name: str, timeout_s: float, took_s: float) -> None:
        """Judge the time of a round on one rank, without the time in which it decided or was stopped."""
        if took_s > timeout_s + LATE_S:
            raise Violation(f"a round ({name}) of {timeout_s:g} s ended after {took_s:g} s")

    def saved(self, ending: Ending) -> None:
        """Judge the end of a save on one rank."""
        self.endings.append(ending)
        self._ended[ending.run, ending.rank] += 1
        if ending.rank == 0:
            self._writing.setdefault(ending.folder, set()).discard(ending.run)
        made = [c for c in self.commits if (c.run, c.number) == (ending.run, ending.number)]
        if ending.write_id is not None and ending.write_id not in {c.write_id for c in made}:
            raise Violation(f"rank {ending.rank} got a wrong answer that save {ending.number} is committed")
        shown = {commit.folder: commit for commit in self.commits}.values()
        failed = isinstance(ending.error, ReknitError) and self.root_can_read
        if failed and ending.rank == 0 and any(c in shown for c in made):
            raise Violation(f"rank 0 committed save {ending.number}, and says: {ending.error}")

    def settled(self, live: set[tuple[int, int]], *, same_error: bool) -> None:
        """Judge the ends of the saves on all ranks (run and rank) that are still there."""
        by_save: dict[tuple[int, int], list[Ending]] = {}
        for end in self.endings:
            if (end.run, end.rank) in live:
                by_save.setdefault((end.run, end.number), []).append(end)
        for (run, number), ends in by_save.items():
            for end in ends:
                # Any error but a CommError promises that the save failed.
                sure = isinstance(end.error, ReknitError) and not isinstance(end.error, CommError)
                made = any((c.run, c.number) == (run, number) for c in self.commits)
                if made and sure and self.root_can_read:
                    raise Violation(f"save {number} is committed, but rank {end.rank} received: {end.error}")
            if same_error and len({(end.outcome, str(end.error)) for end in ends}) > 1:
                reported = {end.rank: f"{end.outcome}: {end.error}" for end in ends}
                raise Violation(f"save {number} ended in different ways on different ranks: {reported}")

    def all_well(self, run: int, saves: Sequence[Save]) -> None:
        """Judge the saves of an incarnation without faults."""
        for end in self.endings:
            refused = isinstance(end.error, CheckpointExistsError) and not saves[end.number].overwrite
            if end.run == run and end.error is not None and not refused:
                raise Violation(
                    f"nothing went wrong, but save {end.number} failed on rank {end.rank}: {end.error}"
                )

    def tidy(self) -> None:
        """Judge the files after a last save that succeeded on all ranks."""
        for folder, needed in self._needed.items():
            wanted = needed | {f"{folder}/{MANIFEST}"}
            left = {p for p in (*self.disk.files, *self.disk.under_way) if p.startswith(f"{folder}/")}
            # A removal that was interrupted keeps its note until no request of it can be carried out.
            left -= {path for path in left if path.startswith(f"{folder}/.notes/removal.")}
            if left != wanted:
                raise Violation(f"files are left over in {folder}: {sorted(left - wanted)}")

    def _committed(self, folder: str, run: int) -> None:
        """Judge a manifest that has just appeared."""
        document = json.loads(self.disk.files[f"{folder}/{MANIFEST}"])
        about = document["metadata"]
        newest = max(
            [run, *self._writing.get(folder, ()), *(c.run for c in self.commits if c.folder == folder)]
        )
        if run != about["run"] or run < newest:
            raise Violation(
                f"incarnation {run} of the job committed save {about['save']} of incarnation {about['run']} "
                f"when incarnation {newest} was saving to {folder}, or had saved, already"
            )
        commit = Commit(folder, run, about["save"], document["write_id"])
        if "table" in document:
            _add_listed(document, self.disk.files[f"{folder}/{document['index']}"])
        self._needed[folder] = {f"{folder}/{file['path']}" for file in document["files"]}
        for file in document["files"]:
            _check_file(self.disk, folder, file, document["block_nbytes"])
        _check_tensors(self.disk, folder, document)
        if commit not in self.commits:
            self.commits.append(commit)


def _add_listed(document: dict[str, Any], index: bytes) -> None:
    """Add the files that the index lists to a manifest, in the manifest's own format."""
    table = document["table"]
    paths, sizes, digests, items, places, names, numbers = msgspec.msgpack.decode(
        index[table["start"] : table["start"] + table["nbytes"]]
    )
    values = iter(np.frombuffer(numbers, "<i8").tolist())
    columns = (
        np.frombuffer(column, kind).tolist()
        for column, kind in ((sizes, "<i8"), (items, "<i4"), (places, "<i4"))
    )
    for path, nbytes, item, place in zip(paths.split("\n"), *columns, strict=True):
        size = 8 * -(-nbytes // document["block_nbytes"])
        part, digests = digests[:size], digests[size:]
        file = {"path": path, "nbytes": nbytes, "digests": base64.b64encode(part)}
        document["files"].append(file)
        if item >= 0:
            coordinate = None if place < 0 else {name: next(values) for name in names[place]}
            blob = {"item": document["items"][item], "path": path, "coordinate": coordinate}
            document["blobs"].append(blob)


def _check_file(disk: Disk, folder: str, file: dict[str, Any], block_nbytes: int) -> None:
    path = f"{folder}/{file['path']}"
    data = disk.files.get(path)
    if data is None or len(data) != file["nbytes"]:
        raise Violation(f"a checkpoint was committed whose file {path} is not there in full")
    blocks = [data[start : start + block_nbytes] for start in range(0, len(data), block_nbytes)]
    digests = np.frombuffer(base64.b64decode(file["digests"]), "<u8").tolist()
    if [xxhash.xxh3_64_intdigest(block) for block in blocks] != digests:
        raise Violation(f"a checkpoint was committed whose file {path} has other bytes than it says")


def _check_tensors(disk: Disk, folder: str, document: dict[str, Any]) -> None:
    """Assemble every tensor from the rows of the index, and compare it with the saved values."""
    about = document["metadata"]
    wanted = tensors(about["ranks"], about["run"], about["save"])
    index = pa.BufferReader(disk.files[f"{folder}/{document['index']}"])
    found = {name: np.zeros(len(whole), np.int64) for name, whole in wanted.items()}
    for row in pq.ParquetFile(index).read(use_threads=False).to_pylist():
        if row["item"] != ITEM or row["fqn"] not in wanted:
            raise Violation(f"a checkpoint was committed with a tensor {row['item']}/{row['fqn']}")
        (start,), (length,), whole = row["offsets"], row["lengths"], wanted[row["fqn"]]
        data = disk.files[f"{folder}/{row['file']}"][row["start"] : row["start"] + row["nbytes"]]
        if not np.array_equal(np.frombuffer(data, "<f8"), whole[start : start + length]):
            raise Violation(f"a checkpoint was committed with wrong values of {row['fqn']} in {row['file']}")
        found[row["fqn"]][start : start + length] += 1
    holes = [name for name, times in found.items() if (times != 1).any()]
    if holes:
        raise Violation(f"a checkpoint was committed that does not tile {holes[:8]}")
    own = {(b["coordinate"] or {}).get("rank") for b in document["blobs"]}
    if own != {None, *range(about["ranks"])}:
        raise Violation(f"a checkpoint was committed with blobs of the ranks {own}")
