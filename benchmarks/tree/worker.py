"""One rank of a job without torch: it joins trees, holds rounds, and saves."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import reknit
from reknit.comm.group import barrier
from reknit.errors import ReknitError
from reknit.options import CommOptions, SaveOptions


def state(rank: int) -> dict[str, Any]:
    """Return a small state: a tensor of the rank's own, and one that all ranks have alike."""
    return {"model": {f"own.{rank}": np.full(1024, rank, np.float32), "shared": np.arange(4096.0)}}


class Worker:
    """A rank, as the command line describes it."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.rank, self.size, self.spec = spec["rank"], spec["size"], spec
        self.timeout_s: float = spec["timeout_s"]

    def joined(self, job: str, fan_out: int, generation: int | None = None) -> Any:
        """Join a tree."""
        options = CommOptions(fan_out=fan_out, connect_timeout_s=120, generation=generation)
        at = self.spec["at"]
        return reknit.connect(self.rank, self.size, at=at, job=job, options=options)

    def save(self, group: Any, step: int) -> float:
        """Save one small checkpoint, and return the seconds that it took."""
        begin = time.perf_counter()
        path = f"{self.spec['folder']}/step_{step:08d}"
        options = SaveOptions(timeout_s=self.timeout_s, progress=False)
        reknit.save(path, state(self.rank), step=step, group=group, options=options)
        return time.perf_counter() - begin

    def measure(self) -> list[dict[str, Any]]:
        """Hold rounds and save in a tree of each fan-out."""
        found = []
        for number, fan_out in enumerate(self.spec["fan_outs"]):
            begin = time.perf_counter()
            group = self.joined(f"fan-out-{fan_out}", fan_out)
            joined_s = time.perf_counter() - begin
            times = []
            for k in range(self.spec["rounds"]):
                begin = time.perf_counter()
                barrier(group, f"round {k}", self.timeout_s)
                times.append(time.perf_counter() - begin)
            saves = [self.save(group, 100 * number + k) for k in range(self.spec["saves"])]
            barrier(group, "end", self.timeout_s)
            group.close()
            found.append(
                {
                    "fan_out": fan_out,
                    "height": group.topology.height,
                    "join_s": round(joined_s, 3),
                    "round_ms": round(1e3 * float(np.median(times)), 2),
                    "round_worst_ms": round(1e3 * max(times), 2),
                    "save_ms": round(1e3 * float(np.median(saves)), 1) if saves else None,
                }
            )
        return found

    def endure(self) -> dict[str, Any]:
        """Save step after step until a save fails, or enough were made, and return the outcome."""
        group = self.joined(self.spec["job"], self.spec["fan_outs"][0], self.spec["generation"])
        Path(self.spec["out"] + ".ready").touch()
        first = self.spec["first_step"]
        for step in range(first, first + self.spec["saves"]):
            begin = time.perf_counter()
            try:
                self.save(group, step)
            except ReknitError as error:
                seconds = round(time.perf_counter() - begin, 2)
                group.close()
                return {"step": step, "error": type(error).__name__, "says": str(error), "after_s": seconds}
        barrier(group, "end", self.timeout_s)
        group.close()
        return {"error": None}


def main() -> None:
    spec = json.loads(sys.argv[1])
    worker = Worker(spec)
    found = worker.endure() if "job" in spec else worker.measure()
    Path(spec["out"]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
