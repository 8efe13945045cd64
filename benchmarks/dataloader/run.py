"""What does a data loader cost at a save?  Collecting its state, and writing many small files.

    scripts/bench dataloader [collect] [files] [--mib 256] [--workers 4] [--keep FILE]

`collect`: workers hold token buffers of `--mib` MiB each.  A save is planned in advance, or not.  The time
that the trainer waits is measured, for saves that wait and for saves in the background.  `files`: 512 shards
of 200 KB go to a store that answers after 20 ms, and come back on another number of ranks.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
from corpus import Repeated

import reknit
from benchmarks.slow_store import SlowStorage
from reknit.dataloader import TokenLoader, TokenSet
from reknit.storage.registry import register
from tests.storage.process_memory import ProcessMemory

_SAMPLE = 65_536
_SETTLE_S = 30.0


def loader(args: argparse.Namespace) -> TokenLoader:
    """Return a loader whose workers each hold a buffer of so many bytes."""
    tokens = args.mib * (1 << 20) // 4
    num_samples = 4 * args.workers * (tokens // _SAMPLE + 8)
    sets = [
        TokenSet(
            name="large",
            open=Repeated,
            arguments={"num_samples": num_samples, "length": _SAMPLE},
            num_partitions=args.workers,
        )
    ]
    return TokenLoader(
        sets, token_budget=_SAMPLE, num_workers=args.workers, buffer_tokens=tokens, epochs=None, prefetch=1
    )


def collect(args: argparse.Namespace) -> dict[str, Any]:
    """Measure how long the trainer waits for the loader's state."""
    found: dict[str, Any] = {"workers": args.workers, "mib_per_worker": args.mib}
    folder = Path(tempfile.mkdtemp(prefix="reknit-bench-"))
    try:
        one = loader(args)
        for _ in range(args.workers):
            next(one)
        reknit.prepare(folder / "a", {"loader": one})
        for planned in (False, True):
            for wait in (True, False):
                if planned:
                    one.expect_save(args.workers)
                for _ in range(args.workers):
                    next(one)
                time.sleep(
                    _SETTLE_S * args.mib / 256 if planned else 1.0
                )  # the step goes on, workers have time
                name = f"{'planned' if planned else 'unplanned'}, {'waits' if wait else 'in the background'}"
                start = time.perf_counter()
                pending = reknit.save(folder / name, {"loader": one}, wait=wait)
                blocked_s = time.perf_counter() - start
                report = pending.result()
                collected = sum(r.seconds for r in report.phases if r.phase == "collect")
                found[name] = {"collect_ms": round(collected * 1e3, 2), "call_ms": round(blocked_s * 1e3, 1)}
                print(name, found[name], flush=True)
                shutil.rmtree(folder / name)
        found["mib_saved"] = report.nbytes >> 20
        one.close()
    finally:
        shutil.rmtree(folder)
    return found


def shards(args: argparse.Namespace, **more: Any) -> TokenLoader:
    """Return a loader whose token buffer has one item of `--nbytes` of each of `--files` sources."""
    length = args.nbytes // 4
    sets = [
        TokenSet(
            name="small",
            open=Repeated,
            arguments={"num_samples": 2 * args.files, "length": length},
            num_partitions=args.files,
        )
    ]
    return TokenLoader(sets, token_budget=length, buffer_tokens=args.files * length, **more)


def files(args: argparse.Namespace) -> dict[str, Any]:
    """Measure the cost of many small files for a save, and the time that ranks take to read their parts."""
    found: dict[str, Any] = {"files": args.files, "nbytes": args.nbytes, "latency_ms": args.latency_ms}
    latency_s = args.latency_ms / 1e3
    register("slow", lambda url, _: SlowStorage(ProcessMemory(url.partition("://")[2]), latency_s, latency_s))
    one = shards(args, num_workers=1, prefetch=0)
    one.expect_save(1)
    next(one)
    time.sleep(5)  # the step goes on, and the worker has time
    weights = {f"w{n}": np.zeros(1000) for n in range(10)}
    reknit.save("slow://first", weights)
    for name, state in (("without", weights), ("with", {**weights, "loader": one})):
        start = time.perf_counter()
        reknit.save(f"slow://{name}", state)
        found[f"save_{name}_s"] = round(time.perf_counter() - start, 3)
    found["added_s"] = round(found["save_with_s"] - found["save_without_s"], 3)
    target = shards(args)
    start = time.perf_counter()
    reknit.load("slow://with", {"loader": target})
    found["load_s"] = round(time.perf_counter() - start, 3)
    print(found, flush=True)
    one.close()
    return found


def main() -> None:
    """Run the parts that are asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", choices=["collect", "files", []], default=[])
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--mib", type=int, default=256, help="MiB of token buffers of each worker")
    parser.add_argument("--files", type=int, default=512)
    parser.add_argument("--nbytes", type=int, default=200_000)
    parser.add_argument("--latency-ms", type=float, default=20.0)
    parser.add_argument("--keep", type=Path, help="file for the results, as JSON")
    args = parser.parse_args()
    parts = {"collect": collect, "files": files}
    found = {name: parts[name](args) for name in args.parts or parts}
    print(json.dumps(found, indent=2))
    if args.keep:
        args.keep.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
