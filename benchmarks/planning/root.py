"""The root's part of a save, in a process of its own, whose memory holds nothing else."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from msgspec.structs import replace

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import msgspec

from benchmarks.planning.tree import WRITE_ID
from reknit.engine.saving.coordinator import Coordinator
from reknit.engine.saving.packing import Sections, merge_claims, merge_receipts
from reknit.engine.stored.manifest_content import ManifestContent, list_files, receipts_to_manifest
from reknit.format import paths
from reknit.format.checksum import BLOCK_NBYTES, FORMAT_VERSION, block_digests
from reknit.format.index import encode_index
from reknit.format.manifest_file import encode_manifest
from reknit.types.manifest import FileEntry, Manifest

REPEAT = 3


class Clock:
    """CPU seconds by task."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = {}
        self._last = time.process_time()

    def timed(self, what: str) -> None:
        """Add the time since the last lap to a task."""
        now = time.process_time()
        self.spent[what] = self.spent.get(what, 0.0) + now - self._last
        self._last = now


def save(coordinator: Coordinator, claims: list[bytes], receipts: list[bytes]) -> dict[str, Any]:
    """Run the root's computations of one save, and return their seconds and the sizes of the results."""
    clock = Clock()
    merged = merge_claims(Sections.unpack(claims))
    clock.timed("merge_and_decode")
    coordinator.assign(None, [merged])
    clock.timed("resolve")
    reported, chunks = merge_receipts(Sections.unpack(receipts))
    clock.timed("merge_and_decode")
    index = coordinator.assembled(reported, chunks).named(WRITE_ID)
    clock.timed("assemble_and_check")
    data = encode_index(index, checked=True)
    clock.timed("encode_index")
    planning = dict(clock.spent)
    counted = receipts_to_manifest(reported, WRITE_ID)
    clock.timed("tally")
    content, manifest = _manifest(data, counted)
    clock.timed("manifest")
    return {
        **{f"{what}_s": seconds for what, seconds in clock.spent.items()},
        "planning_and_index_s": sum(planning.values()),
        "all_s": sum(clock.spent.values()),
        "index_nbytes": len(data),
        "index_with_files_nbytes": len(content),
        "manifest_nbytes": len(manifest),
        "chunks": len(index.tensor),
        "files": len(counted.files.paths),
    }


def _manifest(index: bytes, counted: ManifestContent) -> tuple[bytes, bytes]:
    """Return the whole index with its digests, and the manifest that would commit this save."""
    path = paths.index_path(WRITE_ID)
    draft = Manifest(FORMAT_VERSION, WRITE_ID, 1, 0.0, counted.items, path, (), (), BLOCK_NBYTES)
    content, manifest = list_files(draft, index, counted.files)
    own = FileEntry(path, len(content), tuple(block_digests(content)))
    return content, encode_manifest(replace(manifest, files=(*manifest.files, own)))


def _memory(what: str) -> int:
    """Return a memory size of this process in bytes; `getrusage` would count its parent's too."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (kib,) = [line.split()[1] for line in lines if line.startswith(f"{what}:")]
    return int(kib) << 10


def main() -> int:
    """Read the messages to the root, and print the costs of its part: the best of a few times."""
    before = _memory("VmRSS")
    claims, receipts, silent = msgspec.msgpack.decode(
        Path(sys.argv[1]).read_bytes(), type=tuple[list[bytes], list[bytes], list[bytes]]
    )
    first: list[dict[str, Any]] = []
    for _ in range(REPEAT):
        coordinator = Coordinator()
        first.append(save(coordinator, claims, receipts))
        if len(first) == 1:
            peak = _memory("VmHWM") - before
    runs = {"first": first}
    if any(silent):
        runs["same_plans"] = [save(coordinator, claims, silent) for _ in range(REPEAT)]
        some = [receipts[0], *silent[1:]]
        runs["one_rank_changed"] = [save(coordinator, claims, some) for _ in range(REPEAT)]
    best = {
        name: {
            **min(each, key=lambda run: run["all_s"]),
            "all_runs_s": [run["all_s"] for run in each],
            "planning_runs_s": [run["planning_and_index_s"] for run in each],
        }
        for name, each in runs.items()
    }
    print(json.dumps({**best, "peak_memory_nbytes": peak}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
