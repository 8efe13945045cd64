"""The seconds, processor time and memory of some work, and whether the machine was idle."""

from __future__ import annotations

import resource
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

MIB = 1 << 20
PIECE = 8 * MIB
_LOOK_S = 0.5


def timed(work: Callable[[], object], nbytes: int) -> dict[str, float]:
    """Return the speed of some work on so many bytes, and the processor time and memory of this process."""
    Path("/proc/self/clear_refs").write_text("5")
    before, used = memory(), cpu()
    begin = time.perf_counter()
    work()
    seconds = time.perf_counter() - begin
    return {
        "MB/s": nbytes / 1e6 / seconds,
        "CPU s/GB": (cpu() - used) / (nbytes / 1e9),
        "extra MiB": (memory() - before) / MIB,
    }


def memory() -> int:
    """Return the most memory that this process has held since the peak was reset."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise SystemExit("this needs Linux")


def cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def idle_share() -> float:
    """Return the idle share of the machine, measured over half a second."""
    before = _ticks()
    time.sleep(_LOOK_S)
    after = _ticks()
    return (after[0] - before[0]) / max(1, after[1] - before[1])


def wait_until_idle(share: float, seconds: float) -> float:
    """Wait until a share of the machine is idle, or for some seconds, and return the idle share."""
    end = time.monotonic() + seconds
    while (found := idle_share()) < share and time.monotonic() < end:
        pass
    return found


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines()


def _ticks() -> tuple[int, int]:
    """Return the idle ticks of the processors, and all ticks."""
    fields = [int(word) for word in _lines("/proc/stat")[0].split()[1:9]]
    return fields[3] + fields[4], sum(fields)
