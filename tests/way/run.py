"""Measures the way of a save and of a load.  ``python -m tests.way.run [--names] [--house] [--lower]``.

The ways are a first save, a first load, a first save in the background (the process of the trainer), and a
second save of the same state.  Each runs in a process that has imported torch, and no module of reknit.  The
state has two tensors and a number, and the store is a local folder.  For each way, the program prints

* the modules of reknit that the process has imported, and the idle ones, of which no function ran;
* the functions that ran, their calls, the stores that were opened, and the calls of a store;
* the deepest stack, and the deepest above a call for the index, the manifest or the data, in own frames.

With ``--names`` it also prints the idle modules, the deepest stack and each call of a store.  With
``--house`` it prints the counts of the source instead, and with ``--json`` the numbers of the ways for a
program.  ``--lower`` writes the numbers that have fallen into `limits.json`, which `tests/test_way.py`
compares.  It never raises a limit.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tests.way.house import house
from tests.way.trace import StoreCall, Trace, own_modules

if TYPE_CHECKING:
    from collections.abc import Callable

LIMITS = Path(__file__).with_name("limits.json")
FILES = {"index": ("index.",), "manifest": ("manifest.json",), "data": (".safetensors", ".msgpack")}
"""The files of which the frames have a limit, by parts of their names."""
TIMEOUT_S = 60.0


class Way(NamedTuple):
    """The measures of one way: the numbers that have limits, and the names behind them."""

    numbers: dict[str, int]
    idle: list[str]
    deepest: list[str]
    store: list[StoreCall]


def state() -> dict[str, Any]:
    """Return two tensors and a number."""
    import torch

    return {"model": {"a": torch.zeros(4), "b": torch.zeros(4)}, "step": 3}


def first_save(folder: Path, trace: Trace) -> None:
    """Save for the first time."""
    values = state()
    trace.start()
    import reknit

    reknit.save(folder / "saved", values)
    trace.stop()


def first_load(folder: Path, trace: Trace) -> None:
    """Load the checkpoint of `first_save`."""
    values = state()
    trace.start()
    import reknit

    reknit.load(folder / "saved", values)
    trace.stop()


def first_save_in_the_background(folder: Path, trace: Trace) -> None:
    """Save while the process goes on, until the save has ended."""
    values = state()
    trace.start()
    import reknit

    reknit.save(folder / "in-the-background", values, wait=False).result(TIMEOUT_S)
    trace.stop()


def second_save(folder: Path, trace: Trace) -> None:
    """Save the same state again, and count this save only."""
    values = state()
    import reknit

    reknit.save(folder / "before", values)
    trace.start()
    reknit.save(folder / "after", values)
    trace.stop()


WAYS = (first_save, first_load, first_save_in_the_background, second_save)


def measured(way: Callable[[Path, Trace], None], folder: Path) -> Way:
    """Run a way, and return its measures."""
    # On each machine as many threads, and as many variables for the agent.
    os.cpu_count = lambda: 2
    kept = {name: os.environ.get(name, "") for name in ("HOME", "PATH", "PYTHONPATH")}
    os.environ.clear()
    os.environ.update(kept)
    trace = Trace()
    way(folder, trace)
    idle = trace.idle()
    numbers = {
        "modules": len(own_modules()),
        "idle modules": len(idle),
        "functions": len(trace.functions),
        "calls": sum(trace.calls.values()),
        "opened stores": trace.opened,
        "calls of a store": len(trace.store),
        "deepest stack": len(trace.deepest),
    }
    for name, parts in FILES.items():
        found = [call.frames for call in trace.store if any(part in call.path for part in parts)]
        if found:
            numbers[f"stack at the {name}"] = max(found)
    return Way(numbers, idle, trace.deepest, trace.store)


def in_a_fork(way: Callable[[Path, Trace], None], folder: Path) -> Way:
    """Run a way in a fork of this process, and return its measures."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        with os.fdopen(writer, "wb") as answers:
            pickle.dump(measured(way, folder), answers)
        sys.exit()  # not `os._exit`: the agent ends with the process that started it
    os.close(writer)
    with os.fdopen(reader, "rb") as answers:
        answer = answers.read()
    if os.waitpid(pid, 0)[1] or not answer:
        raise RuntimeError(f"{way.__name__} failed in its process")
    found: Way = pickle.loads(answer)
    return found


def ways() -> dict[str, Way]:
    """Return the measures of all ways."""
    import torch  # noqa: F401 (once, for all forks)

    folder = Path(tempfile.mkdtemp(prefix="reknit-way-"))  # without `with`, which would end in each fork, too
    found = {way.__name__.replace("_", " "): in_a_fork(way, folder) for way in WAYS}
    shutil.rmtree(folder)
    return found


def lowered(limits: dict[str, dict[str, int]], numbers: dict[str, dict[str, int]]) -> dict[str, Any]:
    """Return the limits, with each number that is lower than its limit, and each that has no limit yet."""
    return {
        place: {name: min(number, limits.get(place, {}).get(name, number)) for name, number in found.items()}
        for place, found in numbers.items()
    }


def show(numbers: dict[str, dict[str, int]]) -> None:
    """Print a table: a row for each number, a column for each way."""
    names = dict.fromkeys(name for found in numbers.values() for name in found)
    width = max(map(len, names))
    print(" " * width, *numbers, sep="  ")
    for name in names:
        cells = (str(found.get(name, "-")).rjust(len(place)) for place, found in numbers.items())
        print(name.ljust(width), *cells, sep="  ")


def show_names(found: dict[str, Way]) -> None:
    """Print the names behind the numbers of each way."""
    for name, way in found.items():
        print(f"\n{name}: idle modules\n ", "\n  ".join(way.idle))
        print(f"\n{name}: deepest stack\n ", "\n  ".join(way.deepest))
        print(f"\n{name}: calls of a store, with the frames above")
        for call in way.store:
            print(f"  {call.frames:3}  {call.method} {call.path}")


def main() -> None:
    """Measure, and print or compare."""
    parser = argparse.ArgumentParser(
        prog="scripts/way", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--names", action="store_true", help="print the names behind the numbers")
    parser.add_argument("--house", action="store_true", help="print the counts of the source")
    parser.add_argument("--lower", action="store_true", help="write numbers that have fallen as limits")
    parser.add_argument("--json", action="store_true", help="print all numbers as JSON")
    chosen = parser.parse_args()
    if chosen.house:
        show({"source": house()})
        return
    found = ways()
    numbers = {name: way.numbers for name, way in found.items()}
    if chosen.lower:
        limits = json.loads(LIMITS.read_text()) if LIMITS.exists() else {}
        LIMITS.write_text(json.dumps(lowered(limits, {"source": house()} | numbers), indent=2) + "\n")
    if chosen.json:
        print(json.dumps(numbers))
        return
    show(numbers)
    if chosen.names:
        show_names(found)


if __name__ == "__main__":
    main()
