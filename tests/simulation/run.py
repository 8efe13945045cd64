"""Simulate the worlds of many seeds: ``python -m tests.simulation.run --seeds 10000 --first 0``."""

from __future__ import annotations

import argparse
import sys
import time

from tests.simulation.simulator import Violation, simulate
from tests.simulation.worlds import world


def main() -> int:
    """Run, print every violation, and return their number (at most 100)."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="how many")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--stop-after", type=int, default=10, help="violations")
    options = parser.parse_args()
    began, violations, events = time.time(), [], 0
    for seed in range(options.first, options.first + options.seeds):
        try:
            events += simulate(seed, **world(seed)).events
        except Violation as violation:
            violations.append(seed)
            print(f"seed {seed}: {violation}\n", flush=True)
            if len(violations) >= options.stop_after:
                break
    seconds = time.time() - began
    print(f"{options.seeds} seeds from {options.first}, {events} events, {seconds:.0f} s; bad: {violations}")
    return min(len(violations), 100)


if __name__ == "__main__":
    sys.exit(main())
