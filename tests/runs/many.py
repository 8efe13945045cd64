"""Runs of many seeds, one after another, and a report of the ones that failed."""

from __future__ import annotations

import argparse
import logging
import time
from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


def main(doc: str | None, live: Callable[[int, Counter[str]], None]) -> int:
    """Let `live` count the events of the run of each seed; return the number of failures (at most 100)."""
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument("--seeds", type=int, default=40, help="how many")
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args()
    logging.getLogger("reknit").setLevel(logging.CRITICAL)
    began, bad, done = time.time(), [], Counter[str]()
    for seed in range(options.first, options.first + options.seeds):
        try:
            live(seed, done)
        except Exception as error:
            bad.append(seed)
            print(f"seed {seed}: {type(error).__name__}: {error}", flush=True)
    reported = ", ".join(f"{number} {what}" for what, number in sorted(done.items()))
    print(f"{options.seeds} seeds from {options.first}, {time.time() - began:.0f} s: {reported}; bad: {bad}")
    return min(len(bad), 100)
