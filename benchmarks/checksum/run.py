"""How fast is each candidate for the block digest, on one thread and on two?  Prints JSON.

Run: python benchmarks/checksum/run.py [--mib 512] [--block-mib 4] [--repeat 5]
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import platform
import statistics
import threading
import time
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

if TYPE_CHECKING:
    from collections.abc import Callable

    Digest = Callable[[memoryview], object]

MIB = 1 << 20


def candidates() -> dict[str, Digest]:
    """Return every candidate that is installed, by name."""
    found: dict[str, Digest] = {
        "xxh3-64": xxhash.xxh3_64_intdigest,
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


def seconds(digest: Digest, blocks: list[memoryview], threads: int) -> float:
    """Return the time that `threads` threads need when each digests all the blocks."""

    def work() -> None:
        for block in blocks:
            digest(block)

    crew = [threading.Thread(target=work) for _ in range(threads)]
    begin = time.perf_counter()
    for member in crew:
        member.start()
    for member in crew:
        member.join()
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--block-mib", type=int, default=4)
    parser.add_argument("--repeat", type=int, default=5)
    chosen = parser.parse_args()
    data = memoryview(np.random.default_rng(0).bytes(chosen.mib * MIB))
    step = chosen.block_mib * MIB
    blocks = [data[start : start + step] for start in range(0, len(data), step)]
    results = []
    for name, digest in candidates().items():
        row: dict[str, Any] = {"candidate": name}
        for threads in (1, 2):
            rates = [
                threads * len(data) / seconds(digest, blocks, threads) / 1e9 for _ in range(chosen.repeat)
            ]
            row[f"gb_per_s_{threads}_threads"] = {
                "best": round(max(rates), 2),
                "median": round(statistics.median(rates), 2),
            }
        results.append(row)
    print(
        json.dumps(
            {
                "machine": platform.machine(),
                "python": platform.python_version(),
                "xxhash": xxhash.VERSION,
                "mib": chosen.mib,
                "block_mib": chosen.block_mib,
                "repeat": chosen.repeat,
                "results": results,
            },
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
