"""The corpus of hostile files; run as a program, it feeds them all to the readers and reports on each."""

from __future__ import annotations

import json
import os
import random
import resource
import sys
import time
from typing import TYPE_CHECKING, Any

from reknit.errors import FormatError, ShortageError
from reknit.format.blob_codec import decode_blobs
from reknit.format.data_file import decode_header
from reknit.format.file_table import with_table
from reknit.format.index import decode_index, encode_index
from reknit.format.index.checks import check_extents
from reknit.format.manifest_file import decode_record
from reknit.types.box import Box
from reknit.types.shard import TensorSpec
from tests.attacks import hostile_documents, hostile_index, hostile_table
from tests.format.samples import index_of, sample_index

if TYPE_CHECKING:
    from collections.abc import Iterator


def corpus() -> Iterator[tuple[str, str, Any]]:
    """Yield kind, name and payload of every hostile file."""
    for kind, attacks in {
        "manifests": hostile_documents.manifests,
        "indexes": hostile_index.attacks,
        "headers": hostile_documents.headers,
        "blobs": hostile_documents.blobs,
        "tables": hostile_table.attacks,
        "extents": hostile_documents.extents,
    }.items():
        for name, payload in attacks():
            yield kind, name, payload


def refuse(kind: str, payload: Any) -> None:
    """Feed a payload to the reader of its kind."""
    if kind == "manifests":
        decode_record(payload)
    elif kind == "indexes":
        decode_index(payload)
    elif kind == "headers":
        decode_header(*payload)
    elif kind == "blobs":
        decode_blobs(payload)
    elif kind == "tables":
        with_table(hostile_table.manifest_of(*payload), payload[0])
    else:
        check_extents(sample_index(), payload)


def _memory(field: str) -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(field))


def _report_memory() -> None:
    decode_index(encode_index(sample_index()))
    for kind, name, payload in corpus():
        with open("/proc/self/clear_refs", "w") as refs:
            refs.write("5")  # the peak begins anew
        before, begin = _memory("VmRSS"), time.perf_counter()
        error = None
        try:
            refuse(kind, payload)
        except FormatError as refusal:
            error = str(refusal)
        seconds, growth = time.perf_counter() - begin, _memory("VmHWM") - before
        size = len(payload) if isinstance(payload, bytes) else 0 if kind == "extents" else len(payload[0])
        report = {"error": error, "seconds": seconds, "size": size, "nbytes": growth}
        print(json.dumps({"kind": kind, "name": name, **report}))


def _report_mutations() -> None:
    """Change bytes inside the pages of a good index, which the reader's own checks cover least."""
    good = encode_index(sample_index())
    dice = random.Random(0)
    tried = refused = 0
    for at in range(0, len(good), 3):
        for value in (0, 0xFF, good[at] ^ 1 << dice.randrange(8)):
            tried += 1
            try:
                decode_index(good[:at] + bytes([value]) + good[at + 1 :])
            except FormatError:
                refused += 1
    print(json.dumps({"tried": tried, "refused": refused}))


def _report_shortage() -> None:
    """Decode an index in processes with a limit on their memory, from none to plenty."""
    spec, box = TensorSpec((1,), "int8"), Box((0,), (1,))
    rows = [("m", f"{i:0100}", spec, box, "m/00000.01234567.safetensors", i) for i in range(30_000)]
    data = encode_index(index_of(rows))
    for mib in range(0, 132, 12):
        child = os.fork()
        if not child:
            limit = _memory("VmSize") + (mib << 20)
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
            try:
                decode_index(data)
                os._exit(0)
            except (ShortageError, MemoryError):
                os._exit(1)
            finally:
                os._exit(2)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(json.dumps({"mib": mib, "code": code}), flush=True)


if __name__ == "__main__":
    {"memory": _report_memory, "mutate": _report_mutations, "shortage": _report_shortage}[sys.argv[1]]()
