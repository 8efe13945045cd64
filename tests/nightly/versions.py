"""Other versions of Python, torch and Megatron-Core: which tests fail there, and is the cause ours?

python -m tests.nightly.versions [ROW ...]

prints a table.  All `CAUSES` lie outside of reknit; a failure without one of them ends the run with an error.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]

TORCH = ("tests/frameworks", "tests/torchrun")
MEGATRON = ("tests/megatron",)


class Row(NamedTuple):
    """An environment, and the tests that run there."""

    python: str
    torch: str
    tests: tuple[str, ...]


ROWS = {
    "torch-2.6": Row("3.11", "2.6.0", TORCH),
    "torch-2.8": Row("3.11", "2.8.0", TORCH),
    "torch-2.10": Row("3.11", "2.10.0", TORCH),
    "torch-2.12": Row("3.11", "2.12.0", TORCH),
    "torch-2.14": Row("3.11", "2.14.1", TORCH),
    "torch-2.15": Row("3.11", "2.15.0", TORCH),
    "python-3.12": Row("3.12", "2.13.0", (*MEGATRON, *TORCH)),
}

CAUSES = {
    r"'Stream' object has no attribute 'record_event'": "FSDP2 of torch 2.6 does not run on the CPU",
    r"FSDP\+TP sharding does not support uneven|currently only allows even|src_data_rank|"
    r"ColwiseParallel currently|shape '\[2, 10\]' is invalid|plus negative padding": (
        "DTensor of torch 2.6 and 2.8 cannot be cut like that"
    ),
    r"len\(local_shards\) > 0|cat_tensor_shape\[1\]|in handle_view": (
        "LocalShardsWrapper of torch 2.6 takes fewer shards"
    ),
    r"unexpected keyword argument 'decoupled_weight_decay'": "Adam of torch 2.6 has fewer options",
    r"clone\(\) got an unexpected keyword argument 'device'": "FSDP1 of torch 2.6 offloads fewer parameters",
    r"not implemented for 'UInt64'": "torch 2.6 and 2.8 do not index uint64",
    r"assert '448.0' == 'nan'": "torch 2.6 to 2.12 rounds to float8 otherwise",
}
"""Messages of failures, as patterns, and the causes outside of reknit."""

_ENVIRONMENT = {
    "TORCH_CUDA_ARCH_LIST": "8.0"  # Megatron 0.15 compiles for some device while it is imported
}


def causes_of(report: Path) -> tuple[int, int, Counter[str]]:
    """Return the numbers of tests that passed and were skipped, and the causes of failures.

    The cause of a failure that none of the `CAUSES` explains is the name of its test.
    """
    passed = skipped = 0
    causes: Counter[str] = Counter()
    for case in ElementTree.parse(report).iter("testcase"):
        text = "\n".join(found.text or "" for kind in ("failure", "error") for found in case.findall(kind))
        if text:
            known = (cause for pattern, cause in CAUSES.items() if re.search(pattern, text))
            causes[next(known, f"{case.get('classname')}::{case.get('name')}")] += 1
        elif case.find("skipped") is not None:
            skipped += 1
        else:
            passed += 1
    return passed, skipped, causes


def tried(row: Row, folder: Path) -> tuple[int, int, Counter[str]]:
    """Make the environment of a row, run its tests there, and return `causes_of` them."""
    made = subprocess.run(
        ["scripts/setup", "--python", row.python, "--torch", row.torch],
        cwd=ROOT,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    python, report = ROOT / made.stdout.strip() / "bin" / "python", folder / f"{row.python}-{row.torch}.xml"
    folder.mkdir(parents=True, exist_ok=True)
    # Warnings of other versions are not failures.
    command = [str(python), "-m", "pytest", "-q", "-n", "2", "-W", "ignore", "-p", "no:cacheprovider"]
    subprocess.run(
        [*command, f"--junit-xml={report}", *row.tests],
        cwd=ROOT,
        env={**os.environ, **_ENVIRONMENT},
        check=False,
    )
    return causes_of(report)


def main(names: list[str]) -> int:
    """Try the rows of these names, or all; return the number of failures without a known cause."""
    unknown, lines = 0, ["| Python | torch | passed | skipped | failed, by cause |", "|---|---|---|---|---|"]
    for name in names or ROWS:
        row = ROWS[name]
        passed, skipped, causes = tried(row, ROOT / "build" / "versions")
        unknown += sum(count for cause, count in causes.items() if cause not in CAUSES.values())
        failed = "; ".join(f"{count} {cause}" for cause, count in causes.most_common()) or "none"
        lines.append(f"| {row.python} | {row.torch} | {passed} | {skipped} | {failed} |")
    print("\n".join(lines))
    return unknown


if __name__ == "__main__":
    sys.exit(min(main(sys.argv[1:]), 1))
