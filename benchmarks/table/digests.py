"""The speed of each candidate for the digest of a block, on one thread and on two."""

from __future__ import annotations

import hashlib
import importlib
import threading
import zlib
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from benchmarks.table.rounds import Contestant, Row, in_turn

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.table.sizes import Sizes
    from benchmarks.timing import Bench

    Digest = Callable[[memoryview], object]

OURS, BLOCK = "xxh3-64", 4 << 20


def candidates() -> dict[str, Digest]:
    """Return every candidate that is installed, by name."""
    found: dict[str, Digest] = {
        OURS: xxhash.xxh3_64_intdigest,
        "xxh3-128": xxhash.xxh3_128_intdigest,
        "zlib.crc32": zlib.crc32,
        "sha256": lambda block: hashlib.sha256(block).digest(),
        "blake2b": lambda block: hashlib.blake2b(block).digest(),
    }
    optional: dict[str, tuple[str, Callable[[Any], Digest]]] = {
        "awscrt crc32c": ("awscrt.checksums", lambda module: module.crc32c),
        "awscrt crc64nvme": ("awscrt.checksums", lambda module: module.crc64nvme),
        "crc32c": ("crc32c", lambda module: module.crc32c),
        "google-crc32c": ("google_crc32c", lambda module: module.value),
        "zlib-ng crc32": ("zlib_ng.zlib_ng", lambda module: module.crc32),
        "blake3": ("blake3", lambda module: lambda block: module.blake3(block).digest()),
    }
    for name, (module, choose) in optional.items():
        try:
            found[name] = choose(importlib.import_module(module))
        except (ImportError, AttributeError):
            continue
    return found


def rows(bench: Bench, sizes: Sizes) -> list[Row]:
    """Measure all candidates; each thread digests all the blocks."""
    data = memoryview(np.random.default_rng(0).bytes(sizes.digest_mib << 20))
    blocks = [data[start : start + BLOCK] for start in range(0, len(data), BLOCK)]
    found = []
    for threads in (1, 2):
        contestants = [
            Contestant(name, "ours" if name == OURS else "rival", partial(_digested, digest, blocks, threads))
            for name, digest in candidates().items()
        ]
        row = Row(f"digests of {sizes.digest_mib} MiB by each of {threads} threads", "s")
        found.append(in_turn(bench, row, contestants, sizes.repeat))
    return found


def _digested(digest: Digest, blocks: list[memoryview], threads: int, number: int) -> None:
    def work() -> None:
        for block in blocks:
            digest(block)

    crew = [threading.Thread(target=work) for _ in range(threads)]
    for member in crew:
        member.start()
    for member in crew:
        member.join()
