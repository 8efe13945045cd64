"""The way from a call to the disk, and the size of the source: numbers that may only fall.

The limits are in `tests/way/limits.json`.  After a change that lowers a number, run `scripts/way --lower`,
which writes lower numbers only, and commit that file.  `scripts/way --names` lists the modules, stacks
and calls of the store behind the numbers.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.way.house import counted, house
from tests.way.run import LIMITS, WAYS, lowered

ROOT = Path(__file__).parents[1]
WAY_NAMES = [way.__name__.replace("_", " ") for way in WAYS]
VARYING = ("calls", "functions", "idle modules")
"""Numbers that depend a little on the kernel and the file system."""
REMEDY = "`scripts/way --names` shows the modules, stacks and calls of the store"


@pytest.fixture(scope="module")
def limits() -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = json.loads(LIMITS.read_text())
    return found


@pytest.fixture(scope="module")
def numbers(limits: dict[str, dict[str, int]]) -> dict[str, dict[str, int]]:
    """Measure all ways, and again if one exceeds a limit: a busy machine may repeat a wait for a thread."""
    found = measured()
    if any(exceeded(found[way], limits[way]) for way in WAY_NAMES):
        again = measured()
        found = {
            way: {name: min(number, found[way].get(name, number)) for name, number in each.items()}
            for way, each in again.items()
        }
    return found


def measured() -> dict[str, dict[str, int]]:
    command = [sys.executable, "-m", "tests.way.run", "--json"]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    found: dict[str, dict[str, int]] = json.loads(run.stdout)
    return found


def exceeded(numbers: dict[str, int], limits: dict[str, int]) -> dict[str, str]:
    """Return the numbers over their limits; a number without a limit exceeds it."""
    return {
        name: f"{number}, but the limit is {limits.get(name)}"
        for name, number in numbers.items()
        if number > limits.get(name, -1) * (1.02 if name in VARYING else 1)
    }


# Other versions of Python compile comprehensions otherwise, and so have other numbers.
@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="the limits are those of Python 3.11")
@pytest.mark.parametrize("way", WAY_NAMES)
def test_a_way_through_the_source_is_no_longer_than_its_limit(
    way: str, numbers: dict[str, dict[str, int]], limits: dict[str, dict[str, int]]
) -> None:
    assert exceeded(numbers[way], limits[way]) == {}, REMEDY


def test_the_source_is_no_larger_than_its_limit(limits: dict[str, dict[str, int]]) -> None:
    assert exceeded(house(), limits["source"]) == {}


def test_only_code_counts_as_code() -> None:
    source = (
        '"""Docs.\n\nMore."""\n\n# Why.\nx = """a\n\n# b"""\ny = f(1, 2, 3, 4, 5, 6, 7)\nz = f(*y, k=1)\n'
    )
    assert counted(source) == (5, 1)


def test_a_limit_is_lowered_but_never_raised() -> None:
    numbers = {"a": {"calls": 1, "modules": 9, "stacks": 4}}
    limits = {"a": {"calls": 2, "modules": 8, "gone": 3}, "removed": {"calls": 1}}
    assert lowered(limits, numbers) == {"a": {"calls": 1, "modules": 8, "stacks": 4}}
